"""Whether a run is as good as its baseline: the answer for a build, as an exit status and as JUnit XML. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal
from xml.etree import ElementTree

from msgspec import Struct, field, structs

from penstock.perf.bench.document import UNKNOWN, number, percent, seconds
from penstock.perf.bench.measurement import Figure, Load, LoadPoint, Measurement, group_by_load, p99, throughput
from penstock.perf.bench.origin import MACHINE, Origin
from penstock.perf.bench.stats import LEAST, Difference, difference, ratio

RunResults = tuple[Origin, Sequence[Measurement]]
Judged = Literal["better", "worse", "same", "n/a"]

TOLERANCE: Final = 0.05
CONFIDENCE: Final = 0.95  # for all changes of a comparison together
SEES: Final = 0.10  # an interval wider than that on either side would hide a change that matters


class ComparedMetric(Struct, frozen=True):
    """`counted` metrics change by a share of what they were, others (shares themselves) by their difference, of which
    `tolerance` is the least that matters; None: that of the comparison."""

    name: str
    get: Figure
    show: Callable[[float | None], str]
    more_is_better: bool = False
    counted: bool = True
    tolerance: float | None = None


METRICS: Final = (
    ComparedMetric("throughput/s", throughput, number, more_is_better=True),
    ComparedMetric("p50", lambda m: m.latency.p50_s, seconds),
    ComparedMetric("p99", p99, seconds),
    ComparedMetric("errors", lambda m: m.error_share, percent, counted=False, tolerance=0.001),
)


class Change(Struct, frozen=True, kw_only=True):
    """What became of one metric under one load; `before` and `after` are medians of the repeats.

    `change` is a share of `before` (a difference of shares for errors), within [low, high]: None if it cannot be told,
    and `why` says why not, or what keeps it from being sure.
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
        """As a row of a table."""
        show = next(metric.show for metric in METRICS if metric.name == self.metric)
        between = ""
        if self.low is not None and self.high is not None:
            between = f"{percent(self.low, signed=True)} .. {percent(self.high, signed=True)}"
        change = UNKNOWN if self.change is None else percent(self.change, signed=True)
        return [self.load, self.metric, show(self.before), show(self.after), change, between, self.judged, self.why]


HEADER: Final = ["load", "metric", "before", "after", "change", "95 % interval", "", "to be known"]


class Comparison(Struct, frozen=True, kw_only=True):
    """`other_machine` and `notes` tell what differs but the code, `missing` are loads that only the first run has."""

    changes: list[Change] = field(default_factory=list)
    other_machine: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Judged:
        """Of all: worse if anything is, else better if anything is, else the same; n/a if nothing can be told."""
        found = {change.judged for change in self.changes}
        order: tuple[Judged, ...] = ("worse", "better", "same")
        return next((judged for judged in order if judged in found), "n/a")


def compare(before: RunResults, after: RunResults, *, tolerance: float = TOLERANCE) -> Comparison:
    """How `after` differs from `before`, under the loads that both have.

    Better or worse is what changed by `tolerance` at least, and surely: the intervals hold for all changes of the
    comparison together (Bonferroni), so that a comparison of equal runs cries out in 5 % of cases at most.
    """
    pairs, missing, notes = _paired(group_by_load(before[1]), group_by_load(after[1]))
    sides = [(a, b, metric, _values(a, b, metric)) for a, b in pairs for metric in METRICS]
    tests = sum(_testable(metric, *values) for _, _, metric, values in sides)
    confidence = 1 - (1 - CONFIDENCE) / max(1, tests)
    return Comparison(
        changes=[_change(a, b, metric, values, confidence, tolerance) for a, b, metric, values in sides],
        other_machine=_machines(before[0], after[0]),
        notes=[*_origins(before[0], after[0]), *notes],
        missing=missing,
    )


_Values = tuple[list[float], list[float]]


def _values(a: LoadPoint, b: LoadPoint, metric: ComparedMetric) -> _Values:
    """Of the repeats; empty for a side of which not all can tell it."""
    first, second = ([] if p.median(metric.get) is None else p.values(metric.get) for p in (a, b))
    return first, second


def _testable(metric: ComparedMetric, first: list[float], second: list[float]) -> bool:
    return min(len(first), len(second)) >= LEAST and (metric.counted or any(first + second))


def _change(
    a: LoadPoint, b: LoadPoint, metric: ComparedMetric, values: _Values, confidence: float, tolerance: float
) -> Change:
    told = Change(
        load=a.name, metric=metric.name, judged="n/a", before=a.median(metric.get), after=b.median(metric.get)
    )
    first, second = values
    if why := _why_not(a, b, first, second):
        return structs.replace(told, why=why)
    if not any(first + second) and not metric.counted:
        return structs.replace(told, judged="same", change=0.0, low=0.0, high=0.0)
    found = (ratio if metric.counted else difference)(first, second, confidence=confidence)
    assert found is not None
    judged = _judge(found, metric, 1 - confidence, metric.tolerance or tolerance)
    wide = judged == "same" and metric.counted and not (found.low > -SEES and found.high < SEES)
    why = f"too noisy to see a change of {percent(SEES)}: more or longer repeats" if wide else ""
    return structs.replace(told, judged=judged, change=found.change, low=found.low, high=found.high, why=why)


def _why_not(a: LoadPoint, b: LoadPoint, first: list[float], second: list[float]) -> str:
    """Why the two sides cannot be compared; "" when they can."""
    if lost := next((point for point in (a, b) if not point.runs), None):
        return f"all repeats of a run are INVALID: {lost.invalid[0].invalid[0]}"
    if not first or not second:
        return "too few requests in a repeat" if first or second else "not told by either run"
    if (least := min(len(first), len(second))) < LEAST:
        return f"{least} valid repeat{'s' * (least != 1)}, expected {LEAST} or more: --repeat"
    return ""


def _judge(found: Difference, metric: ComparedMetric, chance: float, tolerance: float) -> Judged:
    if found.chance > chance or abs(found.change) < tolerance:
        return "same"
    return "better" if (found.change > 0) == metric.more_is_better else "worse"


def _paired(
    before: list[LoadPoint], after: list[LoadPoint]
) -> tuple[list[tuple[LoadPoint, LoadPoint]], list[str], list[str]]:
    """The loads that both have, the names of those that only `before` has, and what is to be said of all."""
    there = {point.name: point for point in after}
    pairs = [(point, there[point.name]) for point in before if point.name in there]
    both = {a.name for a, _ in pairs}
    notes = [f"{p.name}: only in the second run" for p in after if p.name not in both]
    for a, b in pairs:
        if _length(a.load) != _length(b.load):
            notes.append(f"{a.name}: {_length(a.load)} in the first run, {_length(b.load)} in the second")
        for which, point in (("first", a), ("second", b)):
            if point.invalid:
                told = f"{len(point.invalid)} INVALID repeats of the {which} run are left out"
                notes.append(f"{a.name}: {told}: {point.invalid[0].invalid[0]}")
    return pairs, [point.name for point in before if point.name not in both], notes


def _length(load: Load) -> str:
    return f"{load.requests:,} requests" if load.requests else f"{load.seconds:g} s"


def _machines(before: Origin, after: Origin) -> list[str]:
    sides = [(name, before.machine.get(name), after.machine.get(name)) for name in MACHINE]
    return [f"{name}: {old} in the first run, {new} in the second" for name, old, new in sides if old != new]


def _origins(before: Origin, after: Origin) -> list[str]:
    facts = [("target", before.target, after.target), ("system", *(o.machine.get("system") for o in (before, after)))]
    for name in sorted(before.versions.keys() | after.versions.keys()):
        facts.append((f"version of {name}", before.versions.get(name), after.versions.get(name)))
    found = [f"{name}: {old} in the first run, {new} in the second" for name, old, new in facts if old != new]
    return found + [f"{which} run: {o.busy}" for which, o in (("first", before), ("second", after)) if o.busy]


PASS: Final = 0
REGRESSION: Final = 1
INVALID: Final = 2
USAGE: Final = 3


class Decision(Struct, frozen=True):
    """`why` has a line for each regression, and for all that makes the answer invalid."""

    code: int
    why: list[str]


def decide(comparison: Comparison, *, any_machine: bool = False) -> Decision:
    """A regression is what is surely worse under a load. Invalid is what cannot be told: other machines, loads of the
    baseline that the run has not, runs marked INVALID, too few repeats. A regression counts more, except on another
    machine, where nothing counts."""
    invalid = [] if any_machine else [f"another machine: {text}" for text in comparison.other_machine]
    if invalid:
        return Decision(INVALID, [*invalid, "measure both on one machine, or say --any-machine"])
    invalid += [f"{load}: in the baseline, but not in the run" for load in comparison.missing]
    invalid += _untold(comparison)
    if not comparison.changes:
        invalid.append("the run and its baseline have no load in common")
    worse = [_sentence(change) for change in comparison.changes if change.judged == "worse"]
    return Decision(REGRESSION if worse else INVALID if invalid else PASS, worse + invalid)


def _untold(comparison: Comparison) -> list[str]:
    """Loads of which not even the throughput can be told. A percentile may need more samples than there are."""
    return [
        f"{change.load}: {change.why}"
        for change in comparison.changes
        if change.metric == "throughput/s" and change.judged == "n/a"
    ]


def _sentence(change: Change) -> str:
    load, metric, before, after, by, between, *_ = change.cells()
    return f"{load}: {metric} {before} -> {after}, {by} ({between})"


def junit_xml(comparison: Comparison, decision: Decision) -> bytes:
    """The decision as a test suite: a case for each load and metric, and one for what makes it invalid as a whole.

    What is worse is a failure where it counts: not on another machine.
    """
    suite = ElementTree.Element("testsuite", name="penstock gate")
    counts = {"failure": 0, "error": 0, "skipped": 0}

    def case(load: str, name: str, kind: str = "", message: str = "") -> None:
        found = ElementTree.SubElement(suite, "testcase", classname=_printable(load), name=name)
        if kind:
            ElementTree.SubElement(found, kind, message=_printable(message))
            counts[kind] += 1

    kinds = {"worse": "failure" if decision.code == REGRESSION else "skipped", "n/a": "skipped"}
    for change in comparison.changes:
        told = change.why if change.judged == "n/a" else _sentence(change)
        case(change.load, change.metric, kinds.get(change.judged, ""), told)
    regressions = [_sentence(change) for change in comparison.changes if change.judged == "worse"]
    for text in decision.why:
        if text not in regressions:
            case("penstock gate", "valid", "error", text)
    for name, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(counts[kind]))
    suite.set("tests", str(len(suite)))
    found: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return found


def _printable(text: str) -> str:
    """What XML can carry: it has no place for control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
