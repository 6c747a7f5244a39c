"""The plots of a report as SVG, whose colours are the page's: --ink, --faint, --bad and --s1 to --s8 of its CSS."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from penstock.errors import ConfigError
from penstock.perf.bench.pictures import BAD, FAINT, INK, PICTURES, SERIES, Seen
from penstock.perf.bench.points import points
from penstock.perf.bench.report import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penstock.perf.bench.measurement import Measurement

_ON_PAGE: Final = {INK: "currentColor", FAINT: "var(--faint)", BAD: "var(--bad)"} | {
    colour: f"var(--s{n})" for n, colour in enumerate(SERIES, 1)
}
_STYLE: Final[Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "penstock", "text.parse_math": False, "font.size": 8.5, "text.color": INK,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.facecolor": "none", "figure.facecolor": "none",
    "xtick.color": INK, "ytick.color": INK, "grid.color": FAINT, "grid.linewidth": 0.4, "axes.grid": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "lines.linewidth": 1.4,
    "lines.markersize": 4, "legend.fontsize": 7.5, "axes.axisbelow": True,
}  # fmt: skip


class Plot(Struct, frozen=True):
    """`note` tells what is to be seen, and what is left out."""

    title: str
    svg: str
    note: str


def draw(measurements: Sequence[Measurement], slo: str = "", verdict: Verdict | None = None) -> list[Plot]:
    """All plots that the measurements can fill. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots are drawn by matplotlib; install penstock[plots]") from None
    seen = Seen([point for point in points(measurements) if point.runs], slo, verdict)
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that its own font has not: the page's has them
        drawn = [_drawn(number, plot, seen) for number, plot in enumerate(PICTURES)]
    return [plot for plot in drawn if plot is not None]


def _drawn(number: int, plot: Callable[[Axes, Seen], tuple[str, str] | None], seen: Seen) -> Plot | None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.3), layout="constrained")
    told = plot(axes := figure.add_subplot(), seen)
    if told is None:
        return None
    if len(axes.get_legend_handles_labels()[1]) > 1:
        columns = 1 if max(map(len, axes.get_legend_handles_labels()[1])) > 30 else 2
        figure.legend(loc="outside lower center", ncols=columns)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(told[0], _inline(out.getvalue(), f"p{number}-", told[0]), told[1])


def _inline(svg: str, prefix: str, title: str) -> str:
    """To stand in a page among others: no prologue, ids of its own, as wide as there is room, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}", svg)
    svg = re.sub(r'<svg\b([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg\b([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return re.sub("|".join(_ON_PAGE), lambda found: _ON_PAGE[found[0]], svg).strip()
