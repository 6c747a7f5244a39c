"""Whether a run is as good as its baseline: the answer for a build, as an exit status and as JUnit XML. Pure."""

from __future__ import annotations

from typing import Final
from xml.etree import ElementTree

from msgspec import Struct

from penstock.perf.bench.compare import Change, Comparison

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


def junit(comparison: Comparison, decision: Decision) -> bytes:
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
