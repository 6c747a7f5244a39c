"""Tokenizers and contractions for English text."""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

_MARKS = re.compile(r"<br />|['\".,()!?;:]")
_TOKENS = ("'", ".", ",", "(", ")", "!", "?")  # marks that are tokens; the others are dropped


def ngrams_iterator(token_list: list[str], ngrams: int) -> Iterator[str]:
    """The tokens, then adjacent pairs joined by a space, then triples, up to `ngrams`."""
    for n in range(1, ngrams + 1):
        for start in range(len(token_list) - n + 1):
            yield " ".join(token_list[start : start + n])


def basic_english(line: str) -> list[str]:
    """The lower-case words and punctuation marks of a line, without quotation marks, colons and semicolons."""
    return _MARKS.sub(_spaced, line.lower()).split()


def _spaced(match: re.Match[str]) -> str:
    mark = match[0]
    if mark == '"':
        return ""
    return f" {mark} " if mark in _TOKENS else " "


def get_tokenizer(tokenizer: Any, language: str = "en") -> Callable[[str], list[str]]:
    """The tokenizer of that name: None splits at whitespace, "basic_english" is `basic_english`.

    Returns a callable unchanged. Raises ValueError for an unknown name.
    """
    if tokenizer is None:
        return str.split
    if tokenizer == "basic_english" and language == "en":
        return basic_english
    if callable(tokenizer):
        found: Callable[[str], list[str]] = tokenizer
        return found
    raise ValueError(f"found tokenizer {tokenizer!r} of language {language!r}, expected 'basic_english' of 'en'")


_ENDINGS: Final = {
    "n't not": "are could did do does had has have is may might must need ought should was were would",
    "'d would": "he i it she that there they we you",
    "'ll will": "he how i it she they we what who you",
    "'ve have": "could i might must should they to we what when where who why will would you so",
    "'re are": "they we what you",
    "'s is": "he how it she that there what when where who why",
    "'m am": "i",
}
CONTRACTION_MAP: Final = {
    "ain't": "is not",
    "can't": "cannot",
    "won't": "will not",
    "shan't": "shall not",
    "sha'n't": "shall not",
    "'cause": "because",
    "how'd": "how did",
    "where'd": "where did",
    "let's": "let us",
    "so's": "so as",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "y'all": "you all",
} | {
    head + ending.split()[0]: f"{head} {ending.split()[1]}"
    for ending, heads in _ENDINGS.items()
    for head in heads.split()
}
