"""The plots of a report as SVG in the page's colours: --ink, --faint, --bad and --s1 to --s8 of its CSS."""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

from penstock.errors import ConfigError
from penstock.perf.bench.document import Plot, seconds
from penstock.perf.bench.figures import SHARES, decode
from penstock.perf.bench.measurement import (
    STAGES,
    LoadPoint,
    Measurement,
    Verdict,
    goodput,
    group_by_load,
    p99,
    parse_label,
    parse_slo,
    server_stats,
    throughput,
)
from penstock.plugins import optional_module
from penstock.values import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
PlotFunction = Callable[["Axes", T], tuple[str, str] | None]
"""Draws data on axes and returns a title and a note, or None without data for it."""

MOST: Final = 8  # lines in one plot
INK, FAINT, BAD = "#00b001", "#00b002", "#00b003"  # placeholders for the page's colours
SERIES: Final = tuple(f"#00a00{n}" for n in range(1, MOST + 1))
_PAGE_COLOURS: Final = {INK: "currentColor", FAINT: "var(--faint)", BAD: "var(--bad)"} | {
    colour: f"var(--s{n})" for n, colour in enumerate(SERIES, 1)
}
_STYLE: Final[Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "penstock", "text.parse_math": False, "font.size": 8.5, "text.color": INK,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.facecolor": "none", "figure.facecolor": "none",
    "xtick.color": INK, "ytick.color": INK, "grid.color": FAINT, "grid.linewidth": 0.4, "axes.grid": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "lines.linewidth": 1.4,
    "lines.markersize": 4, "legend.fontsize": 7.5, "axes.axisbelow": True,
}  # fmt: skip


class PlotData(Struct, frozen=True):
    """The input of every plot: points with valid runs, the SLO, and the verdict of a search."""

    points: list[LoadPoint]
    slo: str
    verdict: Verdict | None

    @property
    def in_verdict(self) -> list[str]:
        """The measured configurations that the verdict names."""
        v = self.verdict
        names = [v.chosen, v.default, *(r.settings for r in v.runners_up)] if v else []
        measured = {point.label for point in self.points}
        return [label for label in dict.fromkeys(names) if label in measured]

    @property
    def labels(self) -> list[str]:
        """All configurations: first the verdict's, then the others by merit."""
        rest = [label for label in dict.fromkeys(point.label for point in self.points) if label not in self.in_verdict]
        return self.in_verdict + sorted(rest, key=lambda label: _merit(self._best(label)), reverse=True)

    def sample(self, most: int) -> list[LoadPoint]:
        """At most `most` points: across all loads of a single configuration, else the best load of each."""
        labels = self.labels
        if len(labels) > 1:
            return [self._best(label) for label in (self.in_verdict or labels)[:most]]
        step = max(1, (len(self.points) - 1) / max(1, most - 1))
        picked = {round(n * step) for n in range(most)}
        return [point for n, point in enumerate(self.points) if n in picked]

    def of(self, label: str, mode: str) -> list[LoadPoint]:
        """The points of a configuration under closed or open loads."""
        return [p for p in self.points if p.label == label and p.load.mode == mode]

    def _best(self, label: str) -> LoadPoint:
        return max((point for point in self.points if point.label == label), key=_merit)


def draw(measurements: Sequence[Measurement], slo: str = "", verdict: Verdict | None = None) -> list[Plot]:
    """All plots that the measurements have data for. Raises ConfigError without matplotlib."""
    data = PlotData([point for point in group_by_load(measurements) if point.runs], slo, verdict)
    return draw_each(_PLOTS, data)


def draw_each(plots: Sequence[PlotFunction[T]], data: T) -> list[Plot]:
    """The plots that `data` has points for. Raises ConfigError without matplotlib."""
    matplotlib = optional_module("matplotlib", "plots are drawn by matplotlib", "plots")
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs missing from matplotlib's font; the page has its own
        drawn = [_draw_one(number, plot, data) for number, plot in enumerate(plots)]
    return [plot for plot in drawn if plot is not None]


def _draw_one(number: int, plot: PlotFunction[T], data: T) -> Plot | None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.3), layout="constrained")
    described = plot(axes := figure.add_subplot(), data)
    if described is None:
        return None
    title, note = described
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=1 if max(map(len, names)) > 30 else 2)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(title, _inline(out.getvalue(), f"p{number}-", title), note)


def _inline(svg: str, prefix: str, title: str) -> str:
    """The SVG for embedding: without prologue, with unique ids, full width, and the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}", svg)
    svg = re.sub(r'<svg\b([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg\b([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return re.sub("|".join(_PAGE_COLOURS), lambda found: _PAGE_COLOURS[found[0]], svg).strip()


# ---- parts of plots


def _merit(point: LoadPoint) -> tuple[bool, float]:
    return point.met is True, point.median(goodput) or 0.0


def _left_out(count: int, shown: int, what: str) -> str:
    return f" {count - shown} more {what} are not shown." if count > shown else ""


def seconds_axis(axes: Axes, values: Sequence[float], name: str) -> None:
    """A logarithmic scale if the values differ much, else one from 0."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    if values and max(values) > 5 * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_ylabel(name)


def _slo_line(axes: Axes, slo: str) -> None:
    objectives = parse_slo(slo).objectives if slo else ()
    limit = next((objective.limit for objective in objectives if objective.name == "p99"), None)
    if limit is not None:
        axes.axhline(limit, color=BAD, linestyle="--", linewidth=1.2, label=f"SLO: p99 {seconds(limit)}")


def _short(text: str, most: int = 44) -> str:
    """At most `most` characters; longer settings lose their names, because the values distinguish them."""
    text = " ".join(text.split())
    if len(text) > most and all("=" in part for part in text.split(",")):
        text = ", ".join(part.partition("=")[2] for part in text.split(","))
    return shorten(text, most)


# ---- the plots


def _throughput_p99(axes: Axes, data: PlotData) -> tuple[str, str] | None:
    tails: list[float] = []
    labels = data.labels
    for label, colour in zip(labels, SERIES, strict=False):
        name = _short(label or "p99")
        for mode, marker in (("open", "o"), ("closed", "s")):
            points = sorted(data.of(label, mode), key=lambda p: (p.load.concurrency, p.load.rate))
            both = [(p.median(throughput), p.median(p99)) for p in points]
            known = [(x, y) for x, y in both if x is not None and y is not None]
            if known:
                axes.plot(*zip(*known, strict=True), marker=marker, color=colour, label=name)
                tails += [y for _, y in known]
                name = "_"  # one legend entry for both modes
    if not tails:
        return None
    _slo_line(axes, data.slo)
    axes.set_xlabel("throughput, requests/s")
    axes.set_xlim(left=0)
    seconds_axis(axes, tails, "p99 latency")
    note = "Right and low is good. A line that turns up has reached the limit of its settings. Squares: closed loop."
    return "Throughput against p99", note + _left_out(len(labels), MOST, "settings")


def _latency_rate(axes: Axes, data: PlotData) -> tuple[str, str] | None:
    labels = [label for label in data.labels if len(data.of(label, "open")) > 1]
    values: list[float] = []
    for label, colour in zip(labels, SERIES, strict=False):
        for name, figure, line in (("p99", p99, "-"), ("p50", lambda m: m.latency.p50_s, ":")):
            both = [(p.load.rate, p.median(figure)) for p in data.of(label, "open")]
            known = sorted((x, y) for x, y in both if y is not None)
            if known:
                text = f"{label} {name}" if len(labels) < 5 or name == "p99" else "_"
                axes.plot(*zip(*known, strict=True), line, marker="o", color=colour, label=_short(text.strip()))
                values += [y for _, y in known]
    if not values:
        return None
    _slo_line(axes, data.slo)
    axes.set_xlabel("offered rate, requests/s")
    axes.set_xlim(left=0)
    seconds_axis(axes, values, "latency")
    note = "Open loop, from the intended send time. Solid: p99, dotted: p50."
    return "Latency against offered rate", note + _left_out(len(labels), MOST, "settings")


def _percentiles(axes: Axes, data: PlotData) -> tuple[str, str] | None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    values: list[float] = []
    for point, colour in zip(data.sample(6), SERIES, strict=False):
        if curve := _curve(point):
            axes.plot(*zip(*curve, strict=True), color=colour, label=_short(point.name))
            values += [y for _, y in curve]
    if not values:
        return None
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([2, 10, 100, 1000, 10_000, 100_000]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 - 100 / x:.6g} %"))
    axes.set_xlabel("share of requests at most this slow")
    seconds_axis(axes, values, "latency")
    return "Percentiles", "A line ends at its slowest sample."


def _curve(point: LoadPoint) -> list[tuple[float, float]]:
    """(1 / (1 - q), seconds) from the histograms of all repeats, or else from the stored percentiles."""
    try:
        count = Counter[float]()
        for run in point.runs:
            count.update(dict(decode(run.histogram)) if run.histogram else {})
    except ConfigError:
        count.clear()
    if not count:
        known = (
            (1 / (1 - q), point.median(lambda m, name=name: getattr(m.latency, name)))  # type: ignore[misc]
            for name, q in SHARES.items()
        )
        return [(x, y) for x, y in known if y is not None]
    total, below = count.total(), 0
    curve = []
    for value, number in sorted(count.items()):
        curve.append((total / (total - below), value))
        below += number
    every = max(1, len(curve) // 200)  # a plot needs no more
    return curve[::every] + curve[-1:]


def _batches(axes: Axes, data: PlotData) -> tuple[str, str] | None:
    known = [p for p in data.points if any(sum(server_stats(run).batches.values()) for run in p.runs)]
    shown = PlotData(known, data.slo, data.verdict).sample(4)
    if not shown:
        return None
    sizes = sorted({int(size) for p in shown for run in p.runs for size in server_stats(run).batches})
    width = 0.8 / len(shown)
    for number, (point, colour) in enumerate(zip(shown, SERIES, strict=False)):
        count = Counter[int]()
        for run in point.runs:
            count.update({int(size): n for size, n in server_stats(run).batches.items()})
        shares = [100 * count[size] / count.total() for size in sizes]
        places = [n + (number - (len(shown) - 1) / 2) * width for n in range(len(sizes))]
        axes.bar(places, shares, width, color=colour, label=_short(point.name))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("rows in a batch, up to")
    axes.set_ylabel("% of the batches")
    return "Batch sizes", "The size of the batches that the model ran."


def _stages(axes: Axes, data: PlotData) -> tuple[str, str] | None:
    from matplotlib.ticker import EngFormatter

    known = [p for p in data.points if any(p.median(figure) is not None for figure in STAGES.values())]
    shown = PlotData(known, data.slo, data.verdict).sample(6)[::-1]
    if not shown:
        return None
    left = [0.0] * len(shown)
    for (name, figure), colour in zip(STAGES.items(), SERIES, strict=False):
        values = [point.median(figure) or 0.0 for point in shown]
        axes.barh(range(len(shown)), values, 0.6, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(shown)), ["\n".join(filter(None, (_short(p.label, 24), p.load.label))) for p in shown])
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_xlabel("mean time")
    return "Where the time goes", "The queue per request, the other stages per batch, as the server reports them."


def _trajectory(axes: Axes, data: PlotData) -> tuple[str, str] | None:
    trajectory = data.verdict.trajectory if data.verdict else []
    steps = [step for step in trajectory if step.goodput is not None]
    if not steps:
        return None
    for met, marker, colour, name in ((True, "o", SERIES[0], "within the SLO"), (False, "x", BAD, "not within")):
        points = [(step.elapsed_s, step.goodput) for step in steps if (step.met is True) is met]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=name)
    best = list(itertools.accumulate((step.goodput or 0.0 if step.met else 0.0 for step in steps), max))
    axes.step([step.elapsed_s for step in steps], best, where="post", color=SERIES[0], label="best so far")
    axes.set_xlabel("seconds of measuring")
    axes.set_ylabel("good responses/s")
    axes.set_ylim(bottom=0)
    return "The search", f"{len(steps)} settings measured, {len(trajectory) - len(steps)} ruled out unmeasured."


def _heat(axes: Axes, data: PlotData) -> tuple[str, str] | None:
    best = _best_of_cells(data)
    batches, instances = (sorted({cell[axis] for cell in best}) for axis in (0, 1))
    if len(batches) < 2 or len(instances) < 2:
        return None
    most = max(best.values()) or 1.0
    for (batch, count), value in best.items():
        x, y = batches.index(batch), instances.index(count)
        axes.bar(x, 1, 1, bottom=y - 0.5, color=SERIES[0], alpha=0.08 + 0.72 * value / most, linewidth=0)
        axes.text(x, y, f"{value:,.0f}", ha="center", va="center", fontsize=7.5)
    axes.grid(False)
    axes.set_xticks(range(len(batches)), [str(size) for size in batches])
    axes.set_yticks(range(len(instances)), [str(count) for count in instances])
    axes.set_xlabel("batch")
    axes.set_ylabel("instances")
    return "Batch by instances", "Best goodput per second within the SLO; 0: missed by all. Empty: not tried."


def _best_of_cells(data: PlotData) -> dict[tuple[int, int], float]:
    """(batch, instances) -> the best goodput within the SLO, over all other parameters."""
    if data.verdict and data.verdict.trajectory:
        looks = [(step.settings, step.goodput if step.met else 0.0) for step in data.verdict.trajectory]
    else:
        looks = [(p.label, (p.median(goodput) if p.met is not False else 0.0)) for p in data.points]
    best: dict[tuple[int, int], float] = {}
    for label, value in looks:
        found = parse_label(label)
        if found.get("batch", "").isdigit() and found.get("instances", "").isdigit() and value is not None:
            cell = (int(found["batch"]), int(found["instances"]))
            best[cell] = max(best.get(cell, 0.0), value)
    return best


_PLOTS: Final = (_throughput_p99, _latency_rate, _percentiles, _batches, _stages, _trajectory, _heat)
