"""Texts of English words as tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_MARKS = re.compile(r"<br />|['\".,()!?;:]")
_APART = ("'", ".", ",", "(", ")", "!", "?")  # tokens of their own; the others are dropped


def ngrams_iterator(token_list: list[str], ngrams: int) -> Iterator[str]:
    """The tokens, then the pairs of neighbours with a blank between them, then the triples, up to `ngrams`."""
    for n in range(1, ngrams + 1):
        for start in range(len(token_list) - n + 1):
            yield " ".join(token_list[start : start + n])


def basic_english(line: str) -> list[str]:
    """The words and marks of a line, in lower case; quotation marks, colons and semicolons are dropped."""
    return _MARKS.sub(_spaced, line.lower()).split()


def _spaced(match: re.Match[str]) -> str:
    mark = match[0]
    if mark == '"':
        return ""
    return f" {mark} " if mark in _APART else " "


def get_tokenizer(tokenizer: Any, language: str = "en") -> Callable[[str], list[str]]:
    """The tokenizer of a name: None splits at blanks, "basic_english" is `basic_english`, a callable is itself.

    Raises ValueError for another.
    """
    if tokenizer is None:
        return str.split
    if tokenizer == "basic_english" and language == "en":
        return basic_english
    if callable(tokenizer):
        found: Callable[[str], list[str]] = tokenizer
        return found
    raise ValueError(f"found tokenizer {tokenizer!r} of language {language!r}, expected 'basic_english' of 'en'")
