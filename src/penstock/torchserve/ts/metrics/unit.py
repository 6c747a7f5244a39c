"""The long words of units."""

from __future__ import annotations

from typing import Final

WORDS: Final[dict[str | None, str]] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}


class Units:
    """`units` maps the short word of a unit to the long one."""

    def __init__(self) -> None:
        self.units = dict(WORDS)


def long_word(unit: str | None) -> str:
    """The long word of a unit; one that is not known stays as it is."""
    return WORDS.get(unit, unit or "")
