"""The autoscaler over kept traces, in virtual time: against a plan that knows the future, and a bound of the cost."""

from typing import Any

import msgspec
import pytest
from tests.support.load_traces import CAPACITY, Clairvoyant, least_worker_s, too_many, trace

from penstock.core.batching.autoscale import AutoscaleLimits, Autoscaler, LoadReading
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, SimulationSettings, simulate_scaling

SLO_S, START_S, SECONDS = 1.0, 0.5, 600.0
SERVICE = ServiceTime(0.05, 0.0125)  # 16 rows take 0.25 s
LIMITS = AutoscaleLimits(fewest=1, most=64, quiet_s=8.0, slo_s=SLO_S)
SETTINGS = SimulationSettings(slots=1, depth=2, max_batch_size=16, handover_s=0.0005)


@pytest.mark.slow
def test_the_slo_holds_for_little_more_than_the_least_cost() -> None:
    """Five loads and five pauses; `benchmarks/autoscale.py` has more traces."""
    arrivals = trace("on-off", SECONDS)
    least_s = least_worker_s(arrivals, CAPACITY, LIMITS)
    plan = Clairvoyant(arrivals, CAPACITY, LIMITS, START_S)
    best = simulate_scaling(SERVICE, OpenLoop(arrivals), SETTINGS, LIMITS, start_s=START_S, policy=plan)
    found = simulate_scaling(SERVICE, OpenLoop(arrivals), SETTINGS, LIMITS, start_s=START_S)
    assert best.late(SLO_S) <= 0.001
    assert len(found.latencies_s) == len(arrivals)
    assert found.late(SLO_S) <= 0.01
    assert least_s < best.worker_s
    assert found.worker_s <= 1.25 * least_s
    assert too_many(found, best, LIMITS.quiet_s) <= 1


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("steps of one", {"spare": 1}),
        ("steps of one", {"headroom": 0.25}),
        ("step", {"schedule": ((0.0, 4), (SECONDS / 3, 13), (2 * SECONDS / 3, 0))}),
    ],
)
def test_few_requests_are_late_in_steps_although_starts_are_slow(name: str, more: dict[str, Any]) -> None:
    arrivals = trace(name, SECONDS)

    def late(limits: AutoscaleLimits) -> float:
        return simulate_scaling(SERVICE, OpenLoop(arrivals), SETTINGS, limits, start_s=3.0).late(SLO_S)

    limits = AutoscaleLimits(fewest=1, most=64, quiet_s=10.0, slo_s=SLO_S)
    better, before = late(msgspec.structs.replace(limits, **more)), late(limits)
    assert better <= 0.03, better
    assert better <= 0.3 * before, (better, before)


def test_a_load_without_changes_is_left_alone() -> None:
    arrivals = [k / 100 for k in range(12_000)]
    found = simulate_scaling(SERVICE, OpenLoop(arrivals), SETTINGS, LIMITS, start_s=START_S)
    assert [number for t, number in found.numbers if t > 20.0] == []


def test_a_slow_start_is_learned_and_begun_earlier() -> None:
    """A rising load: with long starts, instances are wanted at lower rates."""

    limits = AutoscaleLimits(fewest=1, most=64, quiet_s=30.0, slo_s=SLO_S)

    def wanted(start_s: float) -> list[int]:
        scaler, rows, numbers = Autoscaler(limits), 0.0, list[int]()
        for _ in range(4):
            scaler.started(start_s)
        for k in range(400):
            now = k * 0.1
            rows += (10 + 20 * now) * 0.1
            number = numbers[-1] if numbers else 1
            numbers.append(scaler.decide(LoadReading(int(rows), 0, 16, number, number, 16, 0.25), now))
        return numbers

    soon, late = wanted(0.1), wanted(5.0)
    assert sum(late) > sum(soon)


def test_nothing_is_left_after_a_quiet_window_if_zero_is_allowed() -> None:
    scaler = Autoscaler(AutoscaleLimits(fewest=2, most=4, quiet_s=5.0, slo_s=1.0, zero=True))
    assert scaler.decide(LoadReading(0, 0, 0, 2, 2, 8, 0.1), 0.0) == 2
    assert scaler.decide(LoadReading(8, 0, 8, 2, 2, 8, 0.1), 1.0) == 2
    assert scaler.decide(LoadReading(8, 0, 0, 2, 2, 8, 0.1), 5.9) == 2
    assert scaler.decide(LoadReading(8, 0, 0, 2, 2, 8, 0.1), 12.0) == 0
    assert scaler.decide(LoadReading(9, 1, 0, 0, 0, 8, 0.1), 13.0) == 2
