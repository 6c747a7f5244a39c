"""Reports: composed of blocks, rendered as Markdown or as one HTML file, and published in a folder.

A composer gives `make_report` every block that its report may have. A block without content is left out, and so is a
heading without a block below it, so no composer asks whether there is something to show.
"""

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct

from penstock.errors import ConfigError
from penstock.perf.bench.results import json_text, write_whole, writing

T = TypeVar("T")

REPORT, PAGE = "report.md", "report.html"
UNKNOWN: Final = "n/a"


class Heading(Struct, frozen=True):
    text: str


class Paragraph(Struct, frozen=True):
    """A sentence; `mark` is "good", "bad" or ""."""

    text: str
    mark: str = ""


class BulletList(Struct, frozen=True):
    items: Sequence[str]


class CodeBlock(Struct, frozen=True):
    caption: str
    text: str


class TableBlock(Struct, frozen=True):
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


Block = Heading | Paragraph | BulletList | CodeBlock | TableBlock


class Plot(Struct, frozen=True):
    """An SVG figure; `note` explains it and names what it leaves out."""

    title: str
    svg: str
    note: str


class Report(Struct, frozen=True):
    """Blocks in order; `verdict` precedes everything else, also the plots."""

    title: str
    verdict: Sequence[Block]
    rest: Sequence[Block]


def make_report(title: str, verdict: Sequence[Block], rest: Sequence[Block]) -> Report:
    """The report of those blocks that say something."""
    return Report(title, _with_content(verdict), _with_content(rest))


def _with_content(blocks: Sequence[Block]) -> list[Block]:
    kept: list[Block] = []
    for block in reversed(blocks):
        match block:
            case Heading():
                empty = not kept or isinstance(kept[-1], Heading)
            case Paragraph(text) | CodeBlock(_, text):
                empty = not text
            case BulletList(content) | TableBlock(_, content):
                empty = not content
        if not empty:
            kept.append(block)
    return kept[::-1]


def table(columns: Mapping[str, Callable[[T], str]], items: Iterable[T], note: str = "") -> TableBlock:
    """A row for each item; a column without a text in any row is left out."""
    rows = [[text(item) for text in columns.values()] for item in items]
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    header = list(columns)
    return TableBlock([header[i] for i in shown], [[row[i] for i in shown] for row in rows], note)


def facts(texts: Mapping[str, str]) -> TableBlock:
    """Names with their texts."""
    return TableBlock(["", ""], [[name, text] for name, text in texts.items()])


def reproduce(command: str) -> CodeBlock:
    return CodeBlock("To reproduce:", command)


def by_text(texts: Iterable[tuple[str, str]], everything: int) -> list[str]:
    """Each distinct text of (text, name) once, after its names unless there are `everything` of them."""
    found: dict[str, list[str]] = {}
    for text, name in dict.fromkeys(texts):
        found.setdefault(text, []).append(name)
    return [text if len(names) == everything else f"{_listed(names)}: {text}" for text, names in found.items()]


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def publish(
    folder: Path, report: Report, draw: Callable[[], Sequence[Plot]], files: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Writes report.md and report.html into the folder and returns their paths.

    `files` maps the names of further files to their text, or to a value that is written as JSON. If `draw` raises
    ConfigError, for instance without matplotlib, the page says why it has no plots. Raises NotWritten.
    """
    try:
        plots, without = draw(), ""
    except ConfigError as error:
        plots, without = [], error.message
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (files or {}).items():
            write_whole(folder / name, (content if isinstance(content, str) else json_text(content)).encode())
        write_whole(folder / REPORT, markdown(report).encode())
        write_whole(folder / PAGE, page(report, plots, without).encode())
    return folder / REPORT, folder / PAGE


# ---- figures


def seconds(value: float | None) -> str:
    """Three digits in a suitable unit: 420 µs, 12.3 ms, 1.25 s."""
    if value is None:
        return UNKNOWN
    scale, unit = _unit(value)
    return f"{number(value * scale)} {unit}"


def around(middle: float, low: float, high: float) -> str:
    """Seconds with their bounds, in one unit: 12.3 ms (11.9..13)."""
    scale, unit = _unit(middle)
    return f"{number(middle * scale)} {unit} ({number(low * scale)}..{number(high * scale)})"


def _unit(value: float) -> tuple[float, str]:
    return (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")


def number(value: float | None) -> str:
    """Three digits; no decimals from 100 on."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """A share in percent, such as 0.14 %, 2.5 %, 40 %; `signed` for changes."""
    if value is None:
        return UNKNOWN
    shown = round(100 * value, 2) + 0.0  # never -0
    size = abs(shown)
    text = f"{shown:,.0f}" if size >= 9.95 else f"{shown:.2f}" if 0 < size < 0.995 else f"{shown:.1f}"
    return f"{'+' if signed and shown > 0 else ''}{text} %"


def memory(count: float | None) -> str:
    """Bytes in a suitable unit: 400 MiB, 1.5 GiB."""
    if count is None:
        return UNKNOWN
    return f"{number(count / 2**30)} GiB" if count >= 2**30 else f"{number(count / 2**20)} MiB"


def value_text(objective: str, value: float | None) -> str:
    """The value of an objective of an SLO."""
    if objective == "error":
        return percent(value)
    return f"{number(value)}/s" if objective == "throughput" else seconds(value)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of text: the first column to the left, the others to the right."""
    width = max(len(row) for row in rows)
    cells = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(width)]
    lines = ((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])) for row in cells)
    return ["  ".join(line).rstrip() for line in lines]


def as_text(blocks: Sequence[Block]) -> str:
    """The blocks that say something, for a terminal."""
    return "\n".join(line for block in _with_content(blocks) for line in _lines(block))


def _lines(block: Block) -> list[str]:
    match block:
        case Heading(text):
            return ["", text]
        case Paragraph(text):
            return [text]
        case BulletList(items):
            return [f"- {item}" for item in items]
        case CodeBlock(caption, text):
            return [caption, text]
        case TableBlock(header, rows, note):
            return [*align([header, *rows]), *([note] if note else [])]


# ---- Markdown


def markdown(report: Report) -> str:
    blocks = "\n\n".join(_markdown(block) for block in (*report.verdict, *report.rest))
    return f"# {_escape(report.title)}\n\n{blocks}\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_escape(text)}"
        case Paragraph(text, mark):
            return f"**{_escape(text)}**" if mark else _escape(text)
        case BulletList(items):
            return "\n".join(f"- {_escape(item)}" for item in items)
        case CodeBlock(caption, text):
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            return f"{_escape(caption)}\n\n{fence}\n{text}\n{fence}"
        case TableBlock(header, rows, note):
            lines = [header, ["---"] * len(header), *rows]
            cells = ([_escape(text).replace("|", "\\|") for text in line] for line in lines)
            drawn = "\n".join(f"| {' | '.join(line)} |" for line in cells)
            return f"{drawn}\n\n{_escape(note)}" if note else drawn


def _escape(text: str) -> str:
    """The text without line breaks and without Markdown or HTML of its own."""
    return re.sub(r"([\\`*\[\]]|<(?=[a-zA-Z/!?]))", r"\\\1", " ".join(text.split()))


# ---- HTML

_CSS: Final = """
:root{color-scheme:light dark;--back:#fff;--ink:#1c2024;--faint:#b9c0c7;--soft:#f3f5f7;--good:#0a7a3d;--bad:#c4281c;
--s1:#0b6cb8;--s2:#d55e00;--s3:#00875f;--s4:#a64d87;--s5:#b07d00;--s6:#3a9ad9;--s7:#6a5acd;--s8:#777}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--ink:#e4e7ea;--faint:#4a525a;--soft:#1f2429;--good:#4fd18b;
--bad:#ff7b6e;--s1:#58a9ec;--s2:#ff9350;--s3:#3fcf9f;--s4:#e08fc4;--s5:#e6b84a;--s6:#8fd0ff;--s7:#a99cff;--s8:#aaa}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--back);color:var(--ink);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;line-height:1.25}
h2{font-size:1.1rem;margin-top:2rem}
.good,.bad{font-weight:600;font-size:1.1rem;padding-left:.75rem;border-left:.3rem solid}
.good{border-color:var(--good)}
.bad{border-color:var(--bad)}
pre{background:var(--soft);padding:.75rem;border-radius:.4rem;white-space:pre-wrap;font-size:.85rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;border-bottom:1px solid var(--faint);text-align:left;vertical-align:top}
th{font-weight:600}
th,td:not(:last-child){white-space:nowrap}
td:last-child{overflow-wrap:normal;min-width:9rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.5rem;margin-top:2rem}
figure{margin:0}
figcaption{font-size:.85rem}
svg{width:100%;height:auto;display:block}
svg text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif!important}
"""


def page(report: Report, plots: Sequence[Plot], without: str = "") -> str:
    """One HTML file without scripts or external resources. `without` says why there are no plots."""
    title = html.escape(report.title)
    figures = "\n".join(_figure(plot) for plot in plots)
    missing = f"<p>No plots: {html.escape(without)}</p>" if without else ""
    drawn = f'<section class="plots">\n{figures}\n</section>' if plots else missing
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{_blocks(report.verdict)}\n{drawn}\n{_blocks(report.rest)}\n</body>\n</html>\n"
    )


def _figure(plot: Plot) -> str:
    caption = f"<strong>{html.escape(plot.title)}.</strong> {html.escape(plot.note)}"
    return f"<figure>\n{plot.svg}\n<figcaption>{caption}</figcaption>\n</figure>"


def _blocks(blocks: Sequence[Block]) -> str:
    return "\n".join(_html(block) for block in blocks)


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Paragraph(text, mark):
            return f'<p class="{mark}">{html.escape(text)}</p>' if mark else f"<p>{html.escape(text)}</p>"
        case BulletList(items):
            return "<ul>\n" + "\n".join(f"<li>{html.escape(item)}</li>" for item in items) + "\n</ul>"
        case CodeBlock(caption, text):
            return f"<p>{html.escape(caption)}</p>\n<pre>{html.escape(text)}</pre>"
        case TableBlock(header, rows, note):
            head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
            body = "\n".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            below = f"\n<p>{html.escape(note)}</p>" if note else ""
            return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>{below}'
