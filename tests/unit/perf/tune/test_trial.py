"""Readings hold an SLO against what was measured; curves tell what batches of any size take."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.perf.bench.measurement import Latency, Load, Measurement
from penstock.perf.bench.slo import parse_slo
from penstock.perf.tune.trial import Curve, Reading


def reading(errors: int = 0, invalid: list[str] | None = None, **latency: float) -> Reading:
    load = Load(mode="open", rate=100, seconds=10)
    run = Measurement(
        load=load,
        requests=1000,
        errors={"503": errors} if errors else {},
        throughput=99.0,
        latency=Latency(**latency),
        invalid=invalid or [],
    )
    return Reading(run=run, cost_s=11.0)


SLO = parse_slo("p99<=100ms,error<=1%,throughput>=500")


def test_what_keeps_the_slo_breaks_nothing_whatever_throughput_it_asks_for() -> None:
    found = reading(p99_s=0.09, p99_high_s=0.12)
    assert found.breaks(SLO) is None
    assert (found.rate, found.p99_s, found.throughput) == (100, 0.09, 99.0)


def test_errors_and_slow_answers_are_told_with_their_numbers() -> None:
    assert reading(p99_s=0.2).breaks(SLO) == "p99 200 ms (wanted p99<=100ms)"
    assert reading(errors=40, p99_s=0.01).breaks(SLO) == "error 4 % (wanted error<=1%)"


def test_too_few_samples_count_as_the_slowest_answer() -> None:
    assert reading(max_s=0.08).breaks(SLO) is None
    assert reading(max_s=0.3).breaks(SLO) == "p99 300 ms (wanted p99<=100ms)"
    assert reading().breaks(SLO) == "p99 unknown (wanted p99<=100ms)"


def test_late_answers_are_a_share_of_all_and_of_those_that_were_given_up() -> None:
    """Of 1000 requests 20 failed, 10 were given up; of 970 answers 950 were in time. How many answers a second came,
    which counts none that came after the end, says nothing of it."""

    def late(**other: Any) -> float | None:
        errors = {"503": 20, "timeout": 10}
        run = Measurement(load=Load(mode="open"), seconds=10, requests=1000, errors=errors, throughput=95.0, **other)
        return Reading(run=run, cost_s=11.0).late_share

    assert late(answered=970, goodput=95.0) == pytest.approx(30 / 980)
    assert late(answered=0, goodput=0.0) == 1.0
    assert late(answered=970) is None


def test_an_invalid_run_keeps_no_slo() -> None:
    assert reading(p99_s=0.01, invalid=["generator too slow"]).breaks(SLO) == "invalid: generator too slow"


def test_a_curve_goes_by_lines_between_its_points_and_beyond_the_last() -> None:
    curve = Curve(points=((1, 0.010), (2, 0.012), (8, 0.018)))
    assert [curve.seconds(n) for n in (1, 2, 5, 8, 16)] == pytest.approx([0.010, 0.012, 0.015, 0.018, 0.026])
    assert curve.per_second(8) == pytest.approx(8 / 0.018)
    assert curve.per_second(8, within_s=0.012) == pytest.approx(2 / 0.012)
    assert curve.per_second(8, within_s=0.009) == 0.0
    assert Curve(points=((4, 0.1),)).seconds(1) == 0.1
