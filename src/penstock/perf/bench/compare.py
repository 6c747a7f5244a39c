"""Two results folders compared load by load, and the decision of a gate for builds. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final, Literal
from xml.etree import ElementTree

import numpy as np
from msgspec import Struct, field, structs

from penstock.perf.bench.document import UNKNOWN, number, percent, seconds
from penstock.perf.bench.measurement import Figure, Load, LoadPoint, Measurement, group_by_load, p99, throughput
from penstock.perf.bench.results import MACHINE, Origin
from penstock.values import printable

# ---- statistics: no seed, no clock. The unit is the repeat, because the requests of one run are not independent

# Dropped at each end, so that one disturbed repeat does not decide; the usual share for Yuen's test.
TRIM: Final = 0.2
LEAST: Final = 3  # repeats per side: fewer have no variance worth the name
_ROUNDS: Final = 4000  # the tails of a 95 % interval then rest on 100 draws each


class Difference(Struct, frozen=True):
    """The change from the first side to the second, within [low, high], and its p-value."""

    change: float
    low: float
    high: float
    chance: float


def difference(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Difference | None:
    """The difference of the trimmed means by Yuen's test (Biometrika 61, 1974): Welch's without the outermost fifths.

    None with fewer than 3 values on a side. Without any spread every difference is certain.
    """
    if min(len(first), len(second)) < LEAST:
        return None
    (mean_1, error_1, free_1), (mean_2, error_2, free_2) = _trimmed(first), _trimmed(second)
    change, error = mean_2 - mean_1, error_1 + error_2
    if error <= 0:
        return Difference(change, change, change, 0.0 if change else 1.0)
    free = error**2 / (error_1**2 / free_1 + error_2**2 / free_2)
    width = student_at(1 - confidence, free) * math.sqrt(error)
    return Difference(change, change - width, change + width, student_tails(change / math.sqrt(error), free))


def ratio(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Difference | None:
    """Like `difference`, as a share of the first side: 0.1 is 10 % more. Values are at least 0."""
    logs = [[math.log(max(value, 1e-12)) for value in side] for side in (first, second)]
    found = difference(*logs, confidence=confidence)
    return found and Difference(_share(found.change), _share(found.low), _share(found.high), found.chance)


def _share(log: float) -> float:
    return math.expm1(min(log, 700.0))


def _trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """The trimmed mean, its squared standard error from the winsorised variance, and its degrees of freedom."""
    ordered = sorted(values)
    cut = int(TRIM * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    left = len(kept)
    error = (len(ordered) - 1) * statistics.variance(winsorised) / (left * (left - 1))
    return statistics.fmean(kept), error, left - 1


def bootstrap(
    sides: Sequence[Sequence[float]], statistic: Callable[..., np.ndarray], *, seed: int
) -> tuple[float, float]:
    """The 95 % interval of a statistic by the expanded percentile bootstrap (Hesterberg 2015, section 3.3).

    `statistic` receives an array [rounds, n] per side and returns [rounds]. The expansion widens the interval for few
    values; with a single value on a side it is infinite.
    """
    least = min(len(side) for side in sides)
    if least < 2:
        return -math.inf, math.inf
    random = np.random.default_rng(seed)
    drawn = [np.asarray(side, float)[random.integers(0, len(side), (_ROUNDS, len(side)))] for side in sides]
    reach = math.sqrt(least / (least - 1)) * student_at(0.05, least - 1)
    tail = statistics.NormalDist().cdf(-reach)
    low, high = np.quantile(statistic(*drawn), [tail, 1 - tail])
    return float(low), float(high)


def student_tails(t: float, free: float) -> float:
    """The two-sided p-value of Student's t with `free` degrees of freedom."""
    return _beta(free / (free + t * t), free / 2, 0.5) if t else 1.0


def student_at(chance: float, free: float) -> float:
    """The inverse of `student_tails`."""
    low, high = 0.0, 2.0
    while student_tails(high, free) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tails(middle, free) > chance else (low, middle)
    return high


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    fraction = 1.0
    for m in range(20 + int(4 * math.sqrt(a + b)), 0, -1):  # backwards; about sqrt(a + b) terms suffice
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        fraction = 1 + odd / (1 + even / fraction)
    return front / fraction


# ---- the comparison

RunResults = tuple[Origin, Sequence[Measurement]]
Judged = Literal["better", "worse", "same", "n/a"]

TOLERANCE: Final = 0.05  # a choice: smaller changes are rarely worth an action
CONFIDENCE: Final = 0.95  # for all changes of a comparison together
VISIBLE: Final = 0.10  # an interval that reaches beyond this would hide a relevant change

PASS, REGRESSION, INVALID, USAGE = 0, 1, 2, 3  # exit statuses of the gate
HEADER: Final = ["load", "metric", "before", "after", "change", "95 % interval", "", "note"]


class ComparedMetric(Struct, frozen=True):
    """A `relative` metric changes by a share of its old value, others (shares themselves) by their difference.
    `tolerance` is the smallest relevant change; None: the comparison's."""

    name: str
    figure: Figure
    show: Callable[[float | None], str]
    more_is_better: bool = False
    relative: bool = True
    tolerance: float | None = None


METRICS: Final = (
    ComparedMetric("throughput/s", throughput, number, more_is_better=True),
    ComparedMetric("p50", lambda m: m.latency.p50_s, seconds),
    ComparedMetric("p99", p99, seconds),
    ComparedMetric("errors", lambda m: m.error_share, percent, relative=False, tolerance=0.001),
)


class Change(Struct, frozen=True, kw_only=True):
    """The change of one metric under one load; `before` and `after` are medians of the repeats.

    `change` is a share of `before` (for errors a difference of shares) within [low, high]; None if unknown. `why` says
    why it is unknown or uncertain.
    """

    load: str
    metric: str
    judged: Judged
    before: float | None = None
    after: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""

    def cells(self) -> list[str]:
        show = next(metric.show for metric in METRICS if metric.name == self.metric)
        between = ""
        if self.low is not None and self.high is not None:
            between = f"{percent(self.low, signed=True)} .. {percent(self.high, signed=True)}"
        change = UNKNOWN if self.change is None else percent(self.change, signed=True)
        return [self.load, self.metric, show(self.before), show(self.after), change, between, self.judged, self.why]

    @property
    def sentence(self) -> str:
        load, metric, before, after, by, between, *_ = self.cells()
        return f"{load}: {metric} {before} -> {after}, {by} ({between})"


class Comparison(Struct, frozen=True, kw_only=True):
    """`other_machine` and `notes` list differences besides the code, `missing` the loads of the first run only."""

    changes: list[Change] = field(default_factory=list)
    other_machine: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Judged:
        """Worse if any change is, else better if any change is, else the same; n/a if no change is known."""
        found = {change.judged for change in self.changes}
        order: tuple[Judged, ...] = ("worse", "better", "same")
        return next((judged for judged in order if judged in found), "n/a")


def compare(before: RunResults, after: RunResults, *, tolerance: float = TOLERANCE) -> Comparison:
    """The changes from `before` to `after` under their common loads.

    A change counts as better or worse if it is at least `tolerance` and significant. The intervals hold for all changes
    together (Bonferroni), so a comparison of equal runs reports a change in at most 5 % of cases.
    """
    pairs, missing, notes = _pairs(group_by_load(before[1]), group_by_load(after[1]))
    sides = [(a, b, metric, (_values(a, metric), _values(b, metric))) for a, b in pairs for metric in METRICS]
    tests = sum(
        min(map(len, values)) >= LEAST and (metric.relative or any(values[0] + values[1]))
        for _, _, metric, values in sides
    )
    confidence = 1 - (1 - CONFIDENCE) / max(1, tests)
    machines = [(name, before[0].machine.get(name), after[0].machine.get(name)) for name in MACHINE]
    return Comparison(
        changes=[_change((a, b), metric, values, confidence, tolerance) for a, b, metric, values in sides],
        other_machine=_differences(machines),
        notes=[*_origins(before[0], after[0]), *notes],
        missing=missing,
    )


def _values(point: LoadPoint, metric: ComparedMetric) -> list[float]:
    """The metric of each repeat; empty unless all of them have it."""
    return [] if point.median(metric.figure) is None else point.values(metric.figure)


def _change(
    sides: tuple[LoadPoint, LoadPoint],
    metric: ComparedMetric,
    values: tuple[list[float], list[float]],
    confidence: float,
    tolerance: float,
) -> Change:
    before, after = (side.median(metric.figure) for side in sides)
    change = Change(load=sides[0].name, metric=metric.name, judged="n/a", before=before, after=after)
    if why := _why_not(sides, *values):
        return structs.replace(change, why=why)
    if not any(values[0] + values[1]) and not metric.relative:
        return structs.replace(change, judged="same", change=0.0, low=0.0, high=0.0)
    found = (ratio if metric.relative else difference)(*values, confidence=confidence)
    assert found is not None
    judged = _judge(found, metric, 1 - confidence, metric.tolerance or tolerance)
    wide = judged == "same" and metric.relative and not (found.low > -VISIBLE and found.high < VISIBLE)
    why = f"too noisy to see a change of {percent(VISIBLE)}: more or longer repeats" if wide else ""
    return structs.replace(change, judged=judged, change=found.change, low=found.low, high=found.high, why=why)


def _why_not(sides: tuple[LoadPoint, LoadPoint], first: list[float], second: list[float]) -> str:
    """Why the two sides cannot be compared; "" if they can."""
    if lost := next((point for point in sides if not point.runs), None):
        return f"all repeats of a run are INVALID: {lost.invalid[0].invalid[0]}"
    if not first or not second:
        return "too few requests in a repeat" if first or second else "in neither run"
    if (least := min(len(first), len(second))) < LEAST:
        return f"{least} valid repeat{'s' * (least != 1)}, expected {LEAST} or more: --repeat"
    return ""


def _judge(found: Difference, metric: ComparedMetric, chance: float, tolerance: float) -> Judged:
    if found.chance > chance or abs(found.change) < tolerance:
        return "same"
    return "better" if (found.change > 0) == metric.more_is_better else "worse"


def _pairs(
    before: list[LoadPoint], after: list[LoadPoint]
) -> tuple[list[tuple[LoadPoint, LoadPoint]], list[str], list[str]]:
    """(the common loads, the names of loads in `before` only, notes)."""
    there = {point.name: point for point in after}
    pairs = [(point, there[point.name]) for point in before if point.name in there]
    both = {a.name for a, _ in pairs}
    notes = [f"{p.name}: only in the second run" for p in after if p.name not in both]
    for a, b in pairs:
        if _length(a.load) != _length(b.load):
            notes.append(f"{a.name}: {_length(a.load)} in the first run, {_length(b.load)} in the second")
        for which, point in (("first", a), ("second", b)):
            if point.invalid:
                left_out = f"{len(point.invalid)} INVALID repeats of the {which} run are left out"
                notes.append(f"{a.name}: {left_out}: {point.invalid[0].invalid[0]}")
    return pairs, [point.name for point in before if point.name not in both], notes


def _length(load: Load) -> str:
    return f"{load.requests:,} requests" if load.requests else f"{load.seconds:g} s"


def _differences(facts: Sequence[tuple[str, object, object]]) -> list[str]:
    return [f"{name}: {old} in the first run, {new} in the second" for name, old, new in facts if old != new]


def _origins(before: Origin, after: Origin) -> list[str]:
    facts = [
        ("target", before.target, after.target),
        ("system", before.machine.get("system"), after.machine.get("system")),
    ]
    names = sorted(before.versions.keys() | after.versions.keys())
    facts += [(f"version of {name}", before.versions.get(name), after.versions.get(name)) for name in names]
    busy = [f"{which} run: {o.busy}" for which, o in (("first", before), ("second", after)) if o.busy]
    return _differences(facts) + busy


# ---- the gate


class GateDecision(Struct, frozen=True):
    """An exit status; `why` has a line for each regression and for each reason why there is no decision."""

    code: int
    why: list[str]


def decide(comparison: Comparison, *, any_machine: bool = False) -> GateDecision:
    """REGRESSION if any load is significantly worse. INVALID if the runs do not allow a decision: another machine, a
    load of the baseline missing, runs marked INVALID, too few repeats. A regression takes precedence, except on another
    machine."""
    if comparison.other_machine and not any_machine:
        why = [f"another machine: {text}" for text in comparison.other_machine]
        return GateDecision(INVALID, [*why, "measure both on one machine, or use --any-machine"])
    invalid = [f"{load}: in the baseline, but not in the run" for load in comparison.missing]
    # A percentile may need more samples than there are; the throughput is always known.
    unknown = [change for change in comparison.changes if change.metric == "throughput/s" and change.judged == "n/a"]
    invalid += [f"{change.load}: {change.why}" for change in unknown]
    if not comparison.changes:
        invalid.append("the run and its baseline have no load in common")
    worse = [change.sentence for change in comparison.changes if change.judged == "worse"]
    return GateDecision(REGRESSION if worse else INVALID if invalid else PASS, worse + invalid)


def junit_xml(comparison: Comparison, decision: GateDecision) -> bytes:
    """The decision as a test suite: a case for each load and metric, and one for each reason of INVALID.

    A worse metric is a failure only if the decision is REGRESSION: not on another machine.
    """
    suite = ElementTree.Element("testsuite", name="penstock gate")
    counts = {"failure": 0, "error": 0, "skipped": 0}

    def case(load: str, name: str, kind: str = "", message: str = "") -> None:
        found = ElementTree.SubElement(suite, "testcase", classname=printable(load), name=name)
        if kind:
            ElementTree.SubElement(found, kind, message=printable(message))
            counts[kind] += 1

    kinds = {"worse": "failure" if decision.code == REGRESSION else "skipped", "n/a": "skipped"}
    for change in comparison.changes:
        text = change.why if change.judged == "n/a" else change.sentence
        case(change.load, change.metric, kinds.get(change.judged, ""), text)
    regressions = [change.sentence for change in comparison.changes if change.judged == "worse"]
    for text in decision.why:
        if text not in regressions:
            case("penstock gate", "valid", "error", text)
    for name, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(counts[kind]))
    suite.set("tests", str(len(suite)))
    found: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return found
