"""A report as blocks, the ways in which its figures are shown, and the whole as Markdown. Pure."""

from __future__ import annotations

import re

from msgspec import Struct

NOT_TOLD = "n/a"


class Heading(Struct, frozen=True):
    text: str


class Says(Struct, frozen=True):
    """A sentence; `mark` tells how it is to be taken."""

    text: str
    mark: str = ""  # "good", "bad" or ""


class Bullets(Struct, frozen=True):
    items: list[str]


class Code(Struct, frozen=True):
    text: str


class Table(Struct, frozen=True):
    header: list[str]
    rows: list[list[str]]


Block = Heading | Says | Bullets | Code | Table


class Report(Struct, frozen=True):
    """Blocks in their order; `verdict` stand before all else, also before the plots."""

    title: str
    verdict: list[Block]
    rest: list[Block]


def markdown(report: Report) -> str:
    """The report as report.md has it."""
    blocks = "\n\n".join(_markdown(block) for block in (*report.verdict, *report.rest))
    return f"# {_inline(report.title)}\n\n{blocks}\n"


def seconds(value: float | None) -> str:
    """With three digits, in the unit that suits: 420 µs, 12.3 ms, 1.25 s."""
    if value is None:
        return NOT_TOLD
    scale, unit = _unit(value)
    return f"{_digits(value * scale)} {unit}"


def around(middle: float, low: float, high: float) -> str:
    """Seconds and between which they lie, in one unit: 12.3 ms (11.9..13)."""
    scale, unit = _unit(middle)
    return f"{_digits(middle * scale)} {unit} ({_digits(low * scale)}..{_digits(high * scale)})"


def _unit(value: float) -> tuple[float, str]:
    return (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")


def number(value: float | None) -> str:
    """With three digits; whole from 100 on."""
    return NOT_TOLD if value is None else _digits(value)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """A share in percent, such as 0.14 %, 2.5 %, 40 %; with its sign where it is a change."""
    if value is None:
        return NOT_TOLD
    shown = round(100 * value, 2) + 0.0  # of what is next to nothing no sign is left
    size = abs(shown)
    text = f"{shown:,.0f}" if size >= 9.95 else f"{shown:.2f}" if 0 < size < 0.995 else f"{shown:.1f}"
    return f"{'+' if signed and shown > 0 else ''}{text} %"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_inline(text)}"
        case Says(text, mark):
            return f"**{_inline(text)}**" if mark else _inline(text)
        case Bullets(items):
            return "\n".join(f"- {_inline(item)}" for item in items)
        case Code(text):
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Table(header, rows):
            lines = [header, ["---"] * len(header), *rows]
            return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _inline(text: str) -> str:
    """Text of others must not become marks of ours."""
    return re.sub(r"([\\`*\[\]]|<(?=[a-zA-Z/!?]))", r"\\\1", " ".join(text.split()))


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")
