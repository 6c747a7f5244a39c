"""The plots of a report as SVG, whose colours are the page's: --ink, --faint, --bad and --s1 to --s8 of its CSS."""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from penstock.errors import ConfigError
from penstock.perf.bench.document import Plot, seconds
from penstock.perf.bench.figures import decode
from penstock.perf.bench.measurement import SPLIT, LoadPoint, Verdict, knobs, p99, points, side, throughput, worth
from penstock.perf.bench.slo import parse_slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penstock.perf.bench.measurement import Measurement

MOST: Final = 8  # lines in one plot
INK, FAINT, BAD = "#00b001", "#00b002", "#00b003"  # stand for colours of the page until the SVG is there
SERIES: Final = tuple(f"#00a00{n}" for n in range(1, MOST + 1))


class PlotData(Struct, frozen=True):
    """What is plotted: points with valid runs, those that matter most first."""

    points: list[LoadPoint]
    slo: str
    verdict: Verdict | None

    @property
    def told(self) -> list[str]:
        """The configurations that the verdict names and that were measured."""
        v = self.verdict
        names = [v.chosen, v.default, *(r.settings for r in v.runners_up)] if v else []
        there = {point.label for point in self.points}
        return [label for label in dict.fromkeys(names) if label in there]

    @property
    def labels(self) -> list[str]:
        """All configurations: those of the verdict first, then the best."""
        there = dict.fromkeys(point.label for point in self.points)
        rest = [label for label in there if label not in self.told]
        return self.told + sorted(rest, key=lambda label: _merit(self._best(label)), reverse=True)

    def few(self, most: int) -> list[LoadPoint]:
        """At most so many points: of all loads if there is one configuration, of the best load of each otherwise."""
        labels = self.labels
        if len(labels) > 1:
            return [self._best(label) for label in (self.told or labels)[:most]]
        step = max(1, (len(self.points) - 1) / max(1, most - 1))
        picked = {round(n * step) for n in range(most)}
        return [point for n, point in enumerate(self.points) if n in picked]

    def _best(self, label: str) -> LoadPoint:
        mine = [point for point in self.points if point.label == label]
        return max(mine, key=_merit)

    def p99_limit(self) -> float | None:
        """Of the SLO, in seconds."""
        if not self.slo:
            return None
        return next((part.limit for part in parse_slo(self.slo).objectives if part.name == "p99"), None)


def _merit(point: LoadPoint) -> tuple[bool, float]:
    return point.met is True, point.median(worth) or 0.0


def _left_out(count: int, shown: int, what: str) -> str:
    return f" {count - shown} more {what} are not shown." if count > shown else ""


def _in_seconds(axes: Axes, values: Sequence[float], what: str) -> None:
    """A scale of seconds: logarithmic where the values differ much, else from 0."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    if values and max(values) > 5 * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_ylabel(what)


def _slo_line(axes: Axes, seen: PlotData) -> None:
    if (limit := seen.p99_limit()) is not None:
        axes.axhline(limit, color=BAD, linestyle="--", linewidth=1.2, label=f"SLO: p99 {seconds(limit)}")


def _throughput_p99(axes: Axes, seen: PlotData) -> tuple[str, str] | None:
    tails: list[float] = []
    labels = seen.labels
    for label, colour in zip(labels, SERIES, strict=False):
        name = _short(label or "p99")
        for mode, marker in (("open", "o"), ("closed", "s")):
            mine = [p for p in seen.points if p.label == label and p.load.mode == mode]
            mine.sort(key=lambda p: (p.load.concurrency, p.load.rate))
            both = [(p.median(throughput), p.median(p99)) for p in mine]
            known = [(x, y) for x, y in both if x is not None and y is not None]
            if known:
                axes.plot(*zip(*known, strict=True), marker=marker, color=colour, label=name)
                tails += [y for _, y in known]
                name = "_"  # of both modes one is named
    if not tails:
        return None
    _slo_line(axes, seen)
    axes.set_xlabel("throughput, requests/s")
    axes.set_xlim(left=0)
    _in_seconds(axes, tails, "p99 latency")
    note = (
        "Right and low is good: a line that turns up stands at the most that its settings can do. Squares: closed loop."
    )
    return "Throughput against p99", note + _left_out(len(labels), MOST, "settings")


def _latency_rate(axes: Axes, seen: PlotData) -> tuple[str, str] | None:
    labels = list(dict.fromkeys(label for label in seen.labels if len(_open(seen, label)) > 1))
    values: list[float] = []
    for label, colour in zip(labels, SERIES, strict=False):
        for name, get, line in (("p99", p99, "-"), ("p50", lambda m: m.latency.p50_s, ":")):
            both = [(p.load.rate, p.median(get)) for p in _open(seen, label)]
            known = sorted((x, y) for x, y in both if y is not None)
            if known:
                text = f"{label} {name}" if len(labels) < 5 or name == "p99" else "_"
                axes.plot(*zip(*known, strict=True), line, marker="o", color=colour, label=_short(text.strip()))
                values += [y for _, y in known]
    if not values:
        return None
    _slo_line(axes, seen)
    axes.set_xlabel("offered rate, requests/s")
    axes.set_xlim(left=0)
    _in_seconds(axes, values, "latency")
    note = "Open loop, from the intended send time. Solid: p99, dotted: p50."
    return "Latency against offered rate", note + _left_out(len(labels), MOST, "settings")


def _open(seen: PlotData, label: str) -> list[LoadPoint]:
    return [p for p in seen.points if p.label == label and p.load.mode == "open"]


_AT: Final = {"p50_s": 0.5, "p75_s": 0.75, "p90_s": 0.9, "p95_s": 0.95, "p99_s": 0.99, "p999_s": 0.999}


def _percentiles(axes: Axes, seen: PlotData) -> tuple[str, str] | None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    values: list[float] = []
    for point, colour in zip(seen.few(6), SERIES, strict=False):
        if curve := _curve(point):
            axes.plot(*zip(*curve, strict=True), color=colour, label=_short(point.name))
            values += [y for _, y in curve]
    if not values:
        return None
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([2, 10, 100, 1000, 10_000, 100_000]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 - 100 / x:.6g} %"))
    axes.set_xlabel("share of requests that were at least so fast")
    _in_seconds(axes, values, "latency")
    return "Percentiles", "A line ends where samples do."


def _curve(point: LoadPoint) -> list[tuple[float, float]]:
    """(1 / (1 - q), seconds), from the histograms of all repeats, or from the percentiles that are told."""
    try:
        count = Counter[float]()
        for run in point.runs:
            count.update(dict(decode(run.histogram)) if run.histogram else {})
    except ConfigError:
        count.clear()
    if not count:
        told = ((1 / (1 - q), point.median(lambda m, name=name: getattr(m.latency, name))) for name, q in _AT.items())  # type: ignore[misc]
        return [(x, y) for x, y in told if y is not None]
    rising = sorted(count.items())
    total, below = sum(count.values()), 0
    curve = []
    for value, number in rising:
        curve.append((total / (total - below), value))
        below += number
    every = max(1, len(curve) // 200)  # a page is read, not measured
    return curve[::every] + curve[-1:]


def _batches(axes: Axes, seen: PlotData) -> tuple[str, str] | None:
    told = [p for p in seen.points if any(sum(side(run).batches.values()) for run in p.runs)]
    shown = PlotData(told, seen.slo, seen.verdict).few(4)
    sizes = sorted({int(size) for p in shown for run in p.runs for size in side(run).batches})
    width = 0.8 / max(1, len(shown))
    for number, (point, colour) in enumerate(zip(shown, SERIES, strict=False)):
        count = Counter[int]()
        for run in point.runs:
            count.update({int(size): n for size, n in side(run).batches.items()})
        shares = [100 * count[size] / count.total() for size in sizes]
        places = [n + (number - (len(shown) - 1) / 2) * width for n in range(len(sizes))]
        axes.bar(places, shares, width, color=colour, label=_short(point.name))
    if not shown:
        return None
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("rows in a batch, up to")
    axes.set_ylabel("% of the batches")
    return "Batch sizes", "How full the batches were that the model ran."


def _split(axes: Axes, seen: PlotData) -> tuple[str, str] | None:
    from matplotlib.ticker import EngFormatter

    told = [p for p in seen.points if any(p.median(get) is not None for get in SPLIT.values())]
    shown = PlotData(told, seen.slo, seen.verdict).few(6)[::-1]
    if not shown:
        return None
    left = [0.0] * len(shown)
    for (name, get), colour in zip(SPLIT.items(), SERIES, strict=False):
        values = [point.median(get) or 0.0 for point in shown]
        axes.barh(range(len(shown)), values, 0.6, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(shown)), ["\n".join(filter(None, (_short(p.label, 24), p.load.label))) for p in shown])
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_xlabel("mean time")
    return "Where the time goes", "Of a request in the queue, and of the batch that it was in: as the server counts."


def _trajectory(axes: Axes, seen: PlotData) -> tuple[str, str] | None:
    steps = [step for step in (seen.verdict.trajectory if seen.verdict else []) if step.goodput is not None]
    if not steps:
        return None
    for met, marker, colour, name in ((True, "o", SERIES[0], "within the SLO"), (False, "x", BAD, "not within")):
        mine = [(step.elapsed_s, step.goodput) for step in steps if (step.met is True) is met]
        if mine:
            axes.plot(*zip(*mine, strict=True), marker, color=colour, label=name)
    best = list(itertools.accumulate((step.goodput or 0.0 if step.met else 0.0 for step in steps), max))
    axes.step([step.elapsed_s for step in steps], best, where="post", color=SERIES[0], label="best so far")
    axes.set_xlabel("seconds of measuring")
    axes.set_ylabel("good answers/s")
    axes.set_ylim(bottom=0)
    out = len(seen.verdict.trajectory) - len(steps) if seen.verdict else 0
    return "The search", f"{len(steps)} settings measured, {out} ruled out without."


def _heat(axes: Axes, seen: PlotData) -> tuple[str, str] | None:
    best = _best_of_cells(seen)
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
    return (
        "Batch by instances",
        "Best goodput a second within the SLO; 0: none of what was tried. Empty: not tried.",
    )


def _best_of_cells(seen: PlotData) -> dict[tuple[int, int], float]:
    """(batch, instances) -> the best goodput within the SLO, over all other knobs."""
    if seen.verdict and seen.verdict.trajectory:
        looks = [(step.settings, step.goodput if step.met else 0.0) for step in seen.verdict.trajectory]
    else:
        looks = [(p.label, (p.median(worth) if p.met is not False else 0.0)) for p in seen.points]
    best: dict[tuple[int, int], float] = {}
    for label, value in looks:
        told = knobs(label)
        if told.get("batch", "").isdigit() and told.get("instances", "").isdigit() and value is not None:
            cell = (int(told["batch"]), int(told["instances"]))
            best[cell] = max(best.get(cell, 0.0), value)
    return best


def _short(text: str, most: int = 44) -> str:
    """At most so many characters; of settings that are longer the values alone, which tell them apart."""
    text = " ".join(text.split())
    if len(text) > most and all("=" in part for part in text.split(",")):
        text = ", ".join(part.partition("=")[2] for part in text.split(","))
    return text if len(text) <= most else f"{text[: most - 1]}…"


PICTURES: Final = (_throughput_p99, _latency_rate, _percentiles, _batches, _split, _trajectory, _heat)


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


def draw(measurements: Sequence[Measurement], slo: str = "", verdict: Verdict | None = None) -> list[Plot]:
    """All plots that the measurements can fill. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots are drawn by matplotlib; install penstock[plots]") from None
    seen = PlotData([point for point in points(measurements) if point.runs], slo, verdict)
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that its own font has not: the page's has them
        drawn = [_drawn(number, plot, seen) for number, plot in enumerate(PICTURES)]
    return [plot for plot in drawn if plot is not None]


def _drawn(number: int, plot: Callable[[Axes, PlotData], tuple[str, str] | None], seen: PlotData) -> Plot | None:
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
