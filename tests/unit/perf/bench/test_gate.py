from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from penstock.perf.bench.compare import Change, Comparison, compare
from penstock.perf.bench.gate import INVALID, PASS, REGRESSION, decide, junit
from penstock.perf.bench.measurement import Measurement
from penstock.perf.bench.results import Origin

Make = Callable[..., Measurement]
ORIGIN = Origin(command="bench")
SAME = Change(load="8 clients", metric="throughput/s", judged="same", change=0.0)
WORSE = Change(
    load="8 clients", metric="p99", judged="worse", before=0.01, after=0.012, change=0.2, low=0.15, high=0.25
)
FEW = Change(load="8 clients", metric="throughput/s", judged="n/a", why="1 valid repeats")


@pytest.mark.parametrize(
    ("comparison", "code", "why"),
    [
        (Comparison(changes=[SAME]), PASS, []),
        (Comparison(changes=[SAME, WORSE]), REGRESSION, ["8 clients: p99 10 ms -> 12 ms, +20 % (+15 % .. +25 %)"]),
        (Comparison(changes=[FEW]), INVALID, ["8 clients: 1 valid repeats"]),
        (Comparison(changes=[]), INVALID, ["the run and its baseline have no load in common"]),
        (Comparison(changes=[SAME], missing=["8/s"]), INVALID, ["8/s: in the baseline, but not in the run"]),
        (
            Comparison(changes=[SAME, WORSE], missing=["64 clients"]),
            REGRESSION,
            [
                "8 clients: p99 10 ms -> 12 ms, +20 % (+15 % .. +25 %)",
                "64 clients: in the baseline, but not in the run",
            ],
        ),
        (
            Comparison(changes=[WORSE], other_machine=["cpu: A, B"]),
            INVALID,
            ["another machine: cpu: A, B", "measure both on one machine, or say --any-machine"],
        ),
    ],
)  # fmt: skip
def test_the_status_tells_what_was_found(comparison: Comparison, code: int, why: list[str]) -> None:
    decision = decide(comparison)
    assert (decision.code, decision.why) == (code, why)


def test_another_machine_can_be_allowed() -> None:
    comparison = Comparison(changes=[SAME, WORSE], other_machine=["cpu: A, B"])
    assert decide(comparison, any_machine=True).code == REGRESSION


def test_a_percentile_that_cannot_be_told_does_not_make_the_answer_invalid() -> None:
    untold = Change(load="8 clients", metric="p99", judged="n/a", why="too few requests in a repeat")
    assert decide(Comparison(changes=[SAME, untold])).code == PASS


def test_a_run_marked_invalid_is_no_pass(make_measurement: Make) -> None:
    good = [make_measurement(clients=8, repeat=n) for n in range(5)]
    late = [make_measurement(clients=8, repeat=n, invalid=["the generator was late"]) for n in range(5)]
    for pair in ((good, late), (late, good)):
        decision = decide(compare(*((ORIGIN, runs) for runs in pair)))
        assert decision.code == INVALID
        assert decision.why == ["8 clients: all repeats of a run are INVALID: the generator was late"]


def test_junit_has_a_case_for_each_metric_and_counts_them() -> None:
    untold = Change(load="8 clients\x00<", metric="p50", judged="n/a", why="too few")
    comparison = Comparison(changes=[SAME, WORSE, untold], missing=["64 clients"])
    suite = ElementTree.fromstring(junit(comparison, decide(comparison)))
    assert suite.attrib == {"name": "penstock gate", "tests": "4", "failures": "1", "errors": "1", "skipped": "1"}
    assert [(case.get("classname"), case.get("name"), [kind.tag for kind in case]) for case in suite] == [
        ("8 clients", "throughput/s", []),
        ("8 clients", "p99", ["failure"]),
        ("8 clients <", "p50", ["skipped"]),
        ("penstock gate", "valid", ["error"]),
    ]
    failure, skipped = suite.find(".//failure"), suite.find(".//skipped")
    assert skipped is not None
    assert skipped.get("message") == "too few"
    assert failure is not None
    assert failure.get("message") == "8 clients: p99 10 ms -> 12 ms, +20 % (+15 % .. +25 %)"


def test_on_another_machine_what_is_worse_is_no_failure_in_junit_either() -> None:
    comparison = Comparison(changes=[WORSE], other_machine=["cpu: A, B"])
    suite = ElementTree.fromstring(junit(comparison, decide(comparison)))
    assert [(case.get("name"), [kind.tag for kind in case]) for case in suite] == [
        ("p99", ["skipped"]),
        ("valid", ["error"]),
        ("valid", ["error"]),
    ]
    anyhow = ElementTree.fromstring(junit(comparison, decide(comparison, any_machine=True)))
    assert anyhow.get("failures") == "1"


def test_junit_is_xml_whatever_loads_are_called() -> None:
    odd = "".join(map(chr, (0, 8, 0x1B, 0x85, 0xD800, 0xFFFE, 0xFFFF))) + "<&\"'>]]> é 速"
    few = Change(load=odd, metric="throughput/s", judged="n/a", why=odd)
    (case, error) = ElementTree.fromstring(junit(told := Comparison(changes=[few]), decide(told)))
    assert str(case.get("classname")).split() == ["<&\"'>]]>", "é", "速"]
    assert str(error[0].get("message")).endswith("<&\"'>]]> é 速")
