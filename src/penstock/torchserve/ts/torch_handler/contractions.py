"""Contracted English words in full."""

from __future__ import annotations

from typing import Final

_ENDINGS: Final = {
    "n't not": "are could did do does had has have is may might must need ought should was were would",
    "'d would": "he i it she that there they we you",
    "'ll will": "he how i it she they we what who you",
    "'ve have": "could i might must should they to we what when where who why will would you so",
    "'re are": "they we what you",
    "'s is": "he how it she that there what when where who why",
    "'m am": "i",
}
_OTHERS: Final = {
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
}


def _table() -> dict[str, str]:
    table = dict(_OTHERS)
    for ending, heads in _ENDINGS.items():
        short, word = ending.split(" ")
        table.update({head + short: f"{head} {word}" for head in heads.split()})
    return table


CONTRACTION_MAP: Final = _table()
