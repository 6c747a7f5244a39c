"""Measured runs are judged by the SLO; curves give the time of a batch of any size."""

from typing import Any

import pytest

from penstock.perf.bench.measurement import Latency, Load, Measurement, parse_slo
from penstock.perf.tune.runner import BatchCurve, MeasuredRun


def measured(errors: int = 0, invalid: list[str] | None = None, **latency: float) -> MeasuredRun:
    load = Load(mode="open", rate=100, seconds=10)
    run = Measurement(
        load=load,
        requests=1000,
        errors={"503": errors} if errors else {},
        throughput=99.0,
        latency=Latency(**latency),
        invalid=invalid or [],
    )
    return MeasuredRun(run=run, cost_s=11.0)


SLO = parse_slo("p99<=100ms,error<=1%,throughput>=500")


def test_a_run_that_keeps_the_latency_has_no_violation_whatever_the_throughput() -> None:
    found = measured(p99_s=0.09, p99_high_s=0.12)
    assert found.violation(SLO) is None
    assert (found.rate, found.run.latency.p99_s, found.throughput) == (100, 0.09, 99.0)


@pytest.mark.parametrize(
    ("run", "violation"),
    [
        (measured(p99_s=0.2), "p99 200 ms (wanted p99<=100ms)"),
        (measured(errors=40, p99_s=0.01), "error 4.0 % (wanted error<=1%)"),
        (measured(max_s=0.08), None),  # too few samples: they count as the slowest response
        (measured(max_s=0.3), "p99 300 ms (wanted p99<=100ms)"),
        (measured(), "p99 n/a (wanted p99<=100ms)"),
        (measured(p99_s=0.01, invalid=["generator too slow"]), "invalid: generator too slow"),
    ],
)
def test_a_violation_names_its_figures(run: MeasuredRun, violation: str | None) -> None:
    assert run.violation(SLO) == violation


def test_the_late_share_counts_responses_and_timed_out_requests() -> None:
    """Of 1000 requests 20 failed and 10 timed out; of 970 answers 950 were in time. Rates do not matter: they exclude
    the responses after the end."""

    def late(**other: Any) -> float | None:
        errors = {"503": 20, "timeout": 10}
        run = Measurement(load=Load(mode="open"), seconds=10, requests=1000, errors=errors, goodput=90.0, **other)
        return MeasuredRun(run=run, cost_s=11.0).late_share

    assert late(answered=970, too_slow=20) == pytest.approx(30 / 980)
    assert late(answered=0, too_slow=0) == 1.0
    assert late(answered=970) is None


def test_a_curve_is_linear_between_its_points_and_beyond_the_last() -> None:
    curve = BatchCurve(points=((1, 0.010), (2, 0.012), (8, 0.018)))
    assert [curve.seconds(n) for n in (1, 2, 5, 8, 16)] == pytest.approx([0.010, 0.012, 0.015, 0.018, 0.026])
    assert curve.per_second(8) == pytest.approx(8 / 0.018)
    assert curve.per_second(8, within_s=0.012) == pytest.approx(2 / 0.012)
    assert curve.per_second(8, within_s=0.009) == 0.0
    assert BatchCurve(points=((4, 0.1),)).seconds(1) == 0.1
