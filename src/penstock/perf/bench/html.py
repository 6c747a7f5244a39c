"""The report as one HTML file: no script, nothing fetched, light or dark as the reader's screen is."""

from __future__ import annotations

import html
from collections.abc import Sequence

from penstock.perf.bench.document import Block, Bullets, Code, Heading, Report, Says, Table
from penstock.perf.bench.plots import Plot

_CSS = """
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
    """The whole file. `without` tells why there are no plots."""
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
    told = f"<strong>{html.escape(plot.title)}.</strong> {html.escape(plot.note)}"
    return f"<figure>\n{plot.svg}\n<figcaption>{told}</figcaption>\n</figure>"


def _blocks(blocks: Sequence[Block]) -> str:
    return "\n".join(_html(block) for block in blocks)


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Says(text, mark):
            return f'<p class="{mark}">{html.escape(text)}</p>' if mark else f"<p>{html.escape(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{html.escape(item)}</li>" for item in items) + "\n</ul>"
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Table(header, rows):
            head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
            body = "\n".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
