import math
import random
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from msgspec import structs

from penstock.perf.bench.compare import (
    INVALID,
    PASS,
    REGRESSION,
    Change,
    Comparison,
    bootstrap,
    compare,
    decide,
    difference,
    junit_xml,
    ratio,
    student_at,
    student_tails,
)
from penstock.perf.bench.measurement import Latency, Measurement
from penstock.perf.bench.results import Origin

ORIGIN = Origin(command="bench", machine={"cpu": "C", "cores": 2, "system": "Linux 6"}, versions={"python": "3.11.7"})
Make = Callable[..., Measurement]


@pytest.fixture
def side(make_measurement: Make) -> Callable[..., list[Measurement]]:
    """Three loads with ten repeats, with the noise of a small shared machine and a hiccup in one of twenty repeats."""

    def make(seed: int, *, slower: float = 1.0, repeats: int = 10, noise: float = 0.02) -> list[Measurement]:
        random_ = random.Random(seed)
        loads = ({"clients": 8}, {"clients": 64}, {"rate": 400.0})
        return [
            make_measurement(
                **load, repeat=n, noise=noise, random_=random_, slower=slower * random_.choice([1.0] * 19 + [1.5])
            )
            for n in range(repeats)
            for load in loads
        ]

    return make


def by(comparison: Comparison, metric: str, load: str = "64 clients") -> Change:
    return next(change for change in comparison.changes if (change.load, change.metric) == (load, metric))


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "same"), (1.1, "worse")])
def test_nineteen_of_twenty_comparisons_are_right(
    side: Callable[..., list[Measurement]], slower: float, verdict: str
) -> None:
    found = [compare((ORIGIN, side(n)), (ORIGIN, side(1000 + n, slower=slower))).verdict for n in range(20)]
    assert found.count(verdict) >= 19


def test_faster_is_better_with_effect_and_interval(side: Callable[..., list[Measurement]]) -> None:
    comparison = compare((ORIGIN, side(1, slower=1.25)), (ORIGIN, side(2)))
    assert comparison.verdict == "better"
    throughput, p50 = by(comparison, "throughput/s"), by(comparison, "p50")
    assert throughput.judged == p50.judged == "better"
    assert throughput.low < 0.25 < throughput.high
    assert p50.low < -0.2 < p50.high < 0


def test_a_change_below_the_tolerance_does_not_count_however_certain(make_measurement: Make) -> None:
    before, after = ([make_measurement(clients=8, base_s=b, repeat=n) for n in range(5)] for b in (0.01, 0.0103))
    assert by(compare((ORIGIN, before), (ORIGIN, after)), "p50", "8 clients").judged == "same"
    found = compare((ORIGIN, before), (ORIGIN, after), tolerance=0.02)
    assert by(found, "p50", "8 clients").judged == "worse"


def test_what_repeats_cannot_tell_is_said(side: Callable[..., list[Measurement]], make_measurement: Make) -> None:
    noisy = compare((ORIGIN, side(1, noise=0.4)), (ORIGIN, side(2, noise=0.4)))
    assert "too noisy to see a change of 10 %" in by(noisy, "p99").why
    few = compare((ORIGIN, side(1, repeats=2)), (ORIGIN, side(2, slower=3.0)))
    change = by(few, "throughput/s")
    assert (few.verdict, change.judged, change.why) == (
        "n/a", "n/a", "2 valid repeats, expected 3 or more: --repeat",
    )  # fmt: skip
    assert change.before is not None
    assert change.cells()[4:7] == ["n/a", "", "n/a"]
    runs = [make_measurement(clients=8, latency=Latency(p50_s=0.01), repeat=n) for n in range(5)]
    short = compare((ORIGIN, runs), (ORIGIN, runs))
    assert [by(short, metric, "8 clients").judged for metric in ("p99", "p50")] == ["n/a", "same"]


def test_invalid_repeats_are_left_out_with_a_note(make_measurement: Make) -> None:
    good = [make_measurement(clients=8, repeat=n) for n in range(5)]
    bad = make_measurement(clients=8, base_s=9.0, invalid=["the generator was late"])
    comparison = compare((ORIGIN, good), (ORIGIN, [*good, bad]))
    assert comparison.verdict == "same"
    assert comparison.notes == ["8 clients: 1 INVALID repeats of the second run are left out: the generator was late"]
    (first, *_) = compare((ORIGIN, good), (ORIGIN, [bad])).changes
    assert (first.judged, first.why) == ("n/a", "all repeats of a run are INVALID: the generator was late")


def test_errors_that_come_are_worse_and_the_same_few_are_not(make_measurement: Make) -> None:
    none, some = ([make_measurement(clients=8, errors=e, repeat=n) for n in range(5)] for e in ({}, {"503": 40}))
    for before, after, judged in ((none, some, "worse"), (some, none, "better"), (some, some, "same")):
        assert by(compare((ORIGIN, before), (ORIGIN, after)), "errors", "8 clients").judged == judged


def test_a_server_without_good_responses_is_worse(make_measurement: Make) -> None:
    before = [make_measurement(clients=8, repeat=n) for n in range(3)]
    after = [
        structs.replace(m, throughput=0.0, answered=0, errors={"503": m.requests}, latency=Latency()) for m in before
    ]
    comparison = compare((ORIGIN, before), (ORIGIN, after))
    assert by(comparison, "throughput/s", "8 clients").judged == "worse"
    assert by(comparison, "errors", "8 clients").cells()[4] == "+100 %"
    assert by(comparison, "p50", "8 clients").why == "too few requests in a repeat"


def test_other_machines_versions_and_lengths_are_noted(make_measurement: Make) -> None:
    runs = [make_measurement(clients=8, repeat=n) for n in range(3)]
    longer = [structs.replace(m, load=structs.replace(m.load, seconds=60)) for m in runs]
    other = structs.replace(
        ORIGIN, machine={"cpu": "D", "cores": 2, "system": "Linux 7"}, versions={"python": "3.12.1"}, target="b"
    )
    comparison = compare((ORIGIN, runs), (other, longer))
    assert comparison.other_machine == ["cpu: C in the first run, D in the second"]
    assert comparison.notes == [
        "target:  in the first run, b in the second",
        "system: Linux 6 in the first run, Linux 7 in the second",
        "version of python: 3.11.7 in the first run, 3.12.1 in the second",
        "8 clients: 10 s in the first run, 60 s in the second",
    ]
    assert comparison.verdict == "same"
    busy = structs.replace(ORIGIN, machine={**ORIGIN.machine, "load_before": 1.5})
    comparison = compare((ORIGIN, runs), (busy, runs))
    assert comparison.notes == ["second run: the machine was busy before the run began: load 1.5 on 2 cores"]
    assert not comparison.other_machine


def test_loads_of_one_run_only_are_named(make_measurement: Make) -> None:
    comparison = compare(
        (ORIGIN, [make_measurement(clients=8), make_measurement(clients=64)]),
        (ORIGIN, [make_measurement(clients=64), make_measurement(clients=128, label="batch=2")]),
    )
    assert comparison.missing == ["8 clients"]
    assert comparison.notes == ["batch=2 at 128 clients: only in the second run"]
    assert {change.load for change in comparison.changes} == {"64 clients"}


SAME = Change(load="8 clients", metric="throughput/s", judged="same", change=0.0)
WORSE = Change(
    load="8 clients", metric="p99", judged="worse", before=0.01, after=0.012, change=0.2, low=0.15, high=0.25
)
FEW = Change(load="8 clients", metric="throughput/s", judged="n/a", why="1 valid repeats")


UNTOLD = Change(load="8 clients", metric="p99", judged="n/a", why="too few requests in a repeat")
SLOWER = "8 clients: p99 10 ms -> 12 ms, +20 % (+15 % .. +25 %)"
ELSEWHERE = ["another machine: cpu: A, B", "measure both on one machine, or use --any-machine"]


@pytest.mark.parametrize(
    ("changes", "more", "code", "why"),
    [
        ([SAME], {}, PASS, []),
        ([SAME, UNTOLD], {}, PASS, []),
        ([SAME, WORSE], {}, REGRESSION, [SLOWER]),
        ([FEW], {}, INVALID, ["8 clients: 1 valid repeats"]),
        ([], {}, INVALID, ["the run and its baseline have no load in common"]),
        ([SAME], {"missing": ["8/s"]}, INVALID, ["8/s: in the baseline, but not in the run"]),
        ([WORSE], {"missing": ["8/s"]}, REGRESSION, [SLOWER, "8/s: in the baseline, but not in the run"]),
        ([WORSE], {"other_machine": ["cpu: A, B"]}, INVALID, ELSEWHERE),
        ([WORSE], {"other_machine": ["cpu: A, B"], "any_machine": True}, REGRESSION, [SLOWER]),
    ],
)
def test_the_exit_status_is_the_decision(
    changes: list[Change], more: dict[str, Any], code: int, why: list[str]
) -> None:
    anywhere = more.pop("any_machine", False)
    decision = decide(Comparison(changes=changes, **more), any_machine=anywhere)
    assert (decision.code, decision.why) == (code, why)


def test_an_invalid_run_does_not_pass(make_measurement: Make) -> None:
    good = [make_measurement(clients=8, repeat=n) for n in range(5)]
    late = [make_measurement(clients=8, repeat=n, invalid=["the generator was late"]) for n in range(5)]
    for pair in ((good, late), (late, good)):
        decision = decide(compare(*((ORIGIN, runs) for runs in pair)))
        assert decision.code == INVALID
        assert decision.why == ["8 clients: all repeats of a run are INVALID: the generator was late"]


def test_junit_has_a_case_for_each_metric_and_counts_them() -> None:
    untold = Change(load="8 clients\x00<", metric="p50", judged="n/a", why="too few")
    comparison = Comparison(changes=[SAME, WORSE, untold], missing=["64 clients"])
    suite = ElementTree.fromstring(junit_xml(comparison, decide(comparison)))
    assert suite.attrib == {"name": "penstock gate", "tests": "4", "failures": "1", "errors": "1", "skipped": "1"}
    assert [(case.get("classname"), case.get("name"), [kind.tag for kind in case]) for case in suite] == [
        ("8 clients", "throughput/s", []),
        ("8 clients", "p99", ["failure"]),
        ("8 clients <", "p50", ["skipped"]),
        ("penstock gate", "valid", ["error"]),
    ]
    messages = {kind.tag: kind.get("message") for case in suite for kind in case}
    assert (messages["failure"], messages["skipped"]) == (SLOWER, "too few")


def test_a_worse_metric_on_another_machine_is_not_a_junit_failure() -> None:
    comparison = Comparison(changes=[WORSE], other_machine=["cpu: A, B"])
    suite = ElementTree.fromstring(junit_xml(comparison, decide(comparison)))
    kinds = [(case.get("name"), [kind.tag for kind in case]) for case in suite]
    assert kinds == [("p99", ["skipped"]), ("valid", ["error"]), ("valid", ["error"])]
    anyhow = ElementTree.fromstring(junit_xml(comparison, decide(comparison, any_machine=True)))
    assert anyhow.get("failures") == "1"


def test_junit_is_valid_xml_for_any_name_of_a_load() -> None:
    odd = "".join(map(chr, (0, 8, 0x1B, 0x85, 0xD800, 0xFFFE, 0xFFFF))) + "<&\"'>]]> é 速"
    few = Change(load=odd, metric="throughput/s", judged="n/a", why=odd)
    (case, error) = ElementTree.fromstring(junit_xml(comparison := Comparison(changes=[few]), decide(comparison)))
    assert str(case.get("classname")).split() == ["<&\"'>]]>", "é", "速"]
    assert str(error[0].get("message")).endswith("<&\"'>]]> é 速")


# ---- statistics


def test_students_distribution_matches_the_tables() -> None:
    for free, t in ((1, 12.706), (4, 2.776), (10, 2.228), (30, 2.042), (120, 1.980)):
        assert student_at(0.05, free) == pytest.approx(t, abs=6e-4)
        assert student_tails(t, free) == pytest.approx(0.05, abs=5e-5)
    assert student_tails(0.0, 5) == 1.0
    assert student_tails(1e9, 5) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (5, 5), (10, 7), (40, 12)])
def test_differences_equal_those_of_scipy(n: int, m: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    random_ = random.Random(n)
    first, second = ([random_.gauss(mean, 0.2) for _ in range(size)] for mean, size in ((1.0, n), (1.2, m)))
    found = difference(first, second, confidence=0.9)
    truth = stats.ttest_ind(second, first, equal_var=False, trim=0.2)
    interval = truth.confidence_interval(0.9)
    assert found is not None
    assert found.chance == pytest.approx(truth.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6)


def test_fewer_than_three_values_have_no_difference() -> None:
    assert difference([1.0, 1.1], [2.0, 2.1, 2.2]) is None
    assert ratio([1.0, 1.1, 1.2], []) is None


@pytest.mark.parametrize(
    ("first", "second", "change", "least", "most"),
    [
        ([5.0] * 3, [5.0] * 4, 0.0, 1.0, 1.0),  # without spread, a difference is certain
        ([5.0] * 3, [6.0] * 4, 1.0, 0.0, 0.0),
        ([1.0, 1.01, 0.99, 1.0, 1.02], [1.0, 1.01, 0.99, 1.0, 3.0], None, 0.3, 1.0),  # one hiccup decides nothing
        ([1.0, 1.01, 0.99, 1.0, 3.0], [1.1, 1.11, 1.09, 1.1, 1.12], None, 0.0, 0.01),
    ],
)
def test_a_difference_is_as_likely_as_its_spread_allows(
    first: list[float], second: list[float], change: float | None, least: float, most: float
) -> None:
    found = difference(first, second)
    assert found is not None
    assert least <= found.chance <= most
    assert change is None or (found.change, found.low, found.high) == (change,) * 3


def test_a_ratio_is_a_share_of_the_first_side() -> None:
    found = ratio([1.0, 1.01, 0.99] * 3, [1.1, 1.111, 1.089] * 3)
    assert found is not None
    assert found.change == pytest.approx(0.1, abs=1e-3)
    assert 0.08 < found.low < 0.1 < found.high < 0.12


def test_nothing_at_all_on_one_side_is_a_ratio_too() -> None:
    gone, mixed = ratio([100.0, 101.0, 99.0], [0.0, 0.0, 0.0]), ratio([0.0, 0.0, 100.0], [100.0, 0.0, 1.0])
    assert gone is not None
    assert mixed is not None
    assert (gone.change, gone.chance) == (pytest.approx(-1.0), pytest.approx(0, abs=1e-6))
    assert math.isfinite(mixed.high)
    assert mixed.chance > 0.1


def test_bootstrap_intervals_of_five_values_have_their_coverage() -> None:
    held = 0
    for seed in range(200):
        values = np.random.default_rng(seed).normal(1.0, 0.1, 5)
        low, high = bootstrap([values], lambda drawn: drawn.mean(axis=1), seed=seed)
        held += low <= 1.0 <= high
    assert held >= 180  # 190 expected; the plain percentile bootstrap reaches about 165


def test_bootstrap_of_two_sides_and_again_with_the_same_seed() -> None:
    sides = [[100.0, 102.0, 98.0, 101.0], [140.0, 139.0, 143.0, 141.0]]

    def gain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.median(b, axis=1) / np.median(a, axis=1) - 1

    low, high = bootstrap(sides, gain, seed=3)
    assert (low, high) == bootstrap(sides, gain, seed=3)
    assert 0.33 < low < 0.4 < high < 0.47


def test_one_value_has_an_infinite_interval() -> None:
    assert bootstrap([[5.0], [6.0, 7.0]], lambda a, b: a[:, 0] - b[:, 0], seed=1) == (-math.inf, math.inf)
