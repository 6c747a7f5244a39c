"""The busiest part of arrivals, their holes, and what a plan does over all of them."""

from __future__ import annotations

import random
from array import array

import pytest

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.perf.bench.measurement import parse_slo
from penstock.perf.bench.workload import parse_arrival, times
from penstock.perf.simulate.planner import BINS, PlanOptions, busiest, holes, profile, resampled, scaled
from penstock.perf.simulate.simulator import WARM, OpenLoop, ServiceTime, SimulationSettings, simulated

EXACT = ServiceTime(0.02, 0.002, jitter=0.0, tail=0.0)


def waves(seconds: int = 600) -> array[float]:
    """10 requests/s, and 100/s from second 300 to 360."""
    rng = random.Random(3)
    rates = ((10, 0, seconds), (90, 300, 360))
    return array("d", sorted(rng.uniform(a, b) for rate, a, b in rates for _ in range(rate * (b - a))))


def test_the_busiest_part_is_the_one_with_the_most_rows_per_second() -> None:
    arrivals = waves()
    found = busiest(OpenLoop(arrivals), 4000)
    assert len(found.arrivals) == pytest.approx(4000, rel=0.02)
    assert found.arrivals[0] == 0
    begin = next(k for k in range(len(arrivals)) if arrivals[k + 1] - arrivals[k] == found.arrivals[1])
    assert 295 < arrivals[begin] < 325
    rows = [1] * len(arrivals)
    rows[1000:1200] = [50] * 200  # at 10 requests/s, but 500 rows/s
    heavy = busiest(OpenLoop(arrivals, rows), 200)
    assert list(heavy.rows).count(50) > 150
    assert busiest(OpenLoop(arrivals), len(arrivals)).arrivals is arrivals


def test_the_warm_up_of_a_simulation_precedes_the_busiest_part() -> None:
    arrivals = array("d", [k * 0.1 for k in range(2000)] + [200 + k * 0.01 for k in range(1000)])
    found = busiest(OpenLoop(arrivals), 1000)
    counted = [t for t in found.arrivals if t >= WARM * found.arrivals[-1]]
    assert len(counted) == pytest.approx(850, abs=10)
    assert counted[-1] - counted[0] == pytest.approx(8.5, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_resampled_arrivals_are_others_with_the_same_waves_and_rows(seed: int) -> None:
    arrivals = waves()
    load = OpenLoop(arrivals, [1 + (270 < t < 390) for t in arrivals])
    found = resampled(load, 5.0, seed)
    assert found.arrivals == sorted(found.arrivals)
    assert list(found.arrivals) != list(arrivals)
    assert len(found.rows) == len(found.arrivals) == pytest.approx(len(arrivals), rel=0.1)
    for begin, end, rate in ((0, 290, 10), (310, 350, 100), (370, 600, 10)):
        counted = [rows for t, rows in zip(found.arrivals, found.rows, strict=True) if begin < t < end]
        assert len(counted) / (end - begin) == pytest.approx(rate, rel=0.2)
        assert set(counted) <= ({2} if rate == 100 else {1, 2})
    assert list(resampled(OpenLoop([0.0, 1.0]), 5.0, seed).arrivals) == [0.0, 1.0], "one block has no neighbour"


def test_a_hole_is_a_gap_that_chance_does_not_explain() -> None:
    poisson, bursts = (times(parse_arrival(kind), 100.0, 60.0, 1) for kind in ("poisson", "gamma:4"))
    assert holes(poisson)[2] == holes(bursts)[2] == 0
    cut = array("d", [t if t < 20 else t + 30 for t in poisson])
    gap_s, at_s, many = holes(cut)
    assert gap_s == pytest.approx(30, abs=0.2)
    assert at_s == pytest.approx(20, abs=0.2)
    assert many == 1
    assert holes([0.0]) == holes([0.0, 0.0]) == (0.0, 0.0, 0)


def test_the_profile_counts_each_request_and_each_busy_second_once() -> None:
    load = OpenLoop(waves())
    simulation = simulated(EXACT, Adaptive(), load, SimulationSettings(slots=3, max_batch_size=16, slo_s=0.2))
    found = profile(simulation)
    assert found.requests == len(load.arrivals)
    assert len(found.rates) == len(found.busy) == len(found.p99_s) == BINS
    assert sum(found.rates) * found.bin_s == pytest.approx(found.requests)
    busy_s = sum(seconds for _, _, seconds in simulation.batches)
    assert sum(found.busy) * found.bin_s * 3 == pytest.approx(busy_s, rel=0.01)
    assert max(found.rates) == pytest.approx(100, rel=0.3)
    assert found.rates.index(max(found.rates)) * found.bin_s == pytest.approx(330, abs=35)
    assert None in found.p99_s, "times with few requests have no p99"
    assert found.latency.p99_s is not None


def test_autoscaling_needs_fewer_instance_seconds_than_the_peak() -> None:
    load = OpenLoop(waves())
    settings = SimulationSettings(slots=4, max_batch_size=1, slo_s=0.5)
    found = scaled(load, EXACT, settings, PlanOptions(slo=parse_slo("p99<=500ms"), start_s=2.0))
    assert (found.fewest, found.most, found.start_s) == (1, 5, 2.0)
    assert found.fixed_s == pytest.approx(4 * load.arrivals[-1])
    assert 600 < found.instance_s < 0.7 * found.fixed_s
    assert 0 <= found.late < 0.2
    assert found.numbers[0] == (0.0, 4)
    assert max(number for _, number in found.numbers[1:]) > min(number for _, number in found.numbers)
