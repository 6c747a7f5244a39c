from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.simulate.effects import MOST, REQUESTS, effect
from penstock.perf.simulate.simulator import Simulation
from penstock.serving.observe.causes import Scenario, Setup


def scenario(now: Setup, in_flight: int, rate: float, instances: int = 0, limit: int = 0) -> Scenario:
    then = Setup(instances or now.instances, limit or now.max_batch_size, now.fixed_s, now.row_s)
    return Scenario(now, then, in_flight, rate)


def test_a_larger_batch_brings_what_its_fixed_cost_allows() -> None:
    found = effect(scenario(Setup(1, 4, 0.02, 0.0005), 64, 180.0, limit=8))
    assert found.gain == pytest.approx(2 * 0.022 / 0.024, rel=0.05)
    assert (found.now.capacity, found.then.capacity) == pytest.approx((4 / 0.022, 8 / 0.024))


def test_few_callers_do_not_fill_larger_batches_or_more_instances() -> None:
    full = Setup(1, 4, 0.0, 0.01)
    assert effect(scenario(full, 4, 90.0, limit=8)).gain == pytest.approx(1.0, abs=0.05)
    assert effect(scenario(full, 64, 90.0, instances=2)).gain == pytest.approx(2.0, rel=0.05)
    assert effect(scenario(Setup(1, 4, 0.01, 0.0), 1, 90.0, instances=2)).gain == pytest.approx(1.0, abs=0.05)


def test_the_latency_falls_with_more_instances_and_is_unknown_where_the_queue_grows() -> None:
    more = effect(scenario(Setup(2, 1, 0.01, 0.0), 10, 180.0, instances=4))
    assert more.now.p99_s is not None
    assert more.then.p99_s is not None
    assert more.now.p99_s > 2 * more.then.p99_s > 0.01
    assert (more.now.busy, more.then.busy) == pytest.approx((0.9, 0.45), rel=0.1)
    fewer = effect(scenario(Setup(2, 1, 0.01, 0.0), 10, 180.0, instances=1))
    assert (fewer.then.p99_s, fewer.then.busy) == (None, 1.0)
    idle = effect(scenario(Setup(2, 1, 0.01, 0.0), 0, 0.0, instances=1))
    assert (idle.now.p99_s, idle.now.busy) == (None, 0.0)


@settings(max_examples=6)
@given(
    st.integers(1, 32), st.sampled_from([1, 8, 256, 1024]), st.floats(0.0, 1.0), st.floats(1e-6, 0.1),
    st.integers(0, 10**6), st.floats(0.0, 1e5), st.integers(1, 999),
)  # fmt: skip
def test_any_change_takes_bounded_time(
    instances: int, limit: int, fixed_s: float, row_s: float, in_flight: int, rate: float, then: int
) -> None:
    with patch.object(Simulation, "arrive", autospec=True, side_effect=Simulation.arrive) as arrive:
        found = effect(scenario(Setup(instances, limit, fixed_s, row_s), in_flight, rate, instances=then))
    assert found.gain > 0
    assert arrive.call_count <= 2 * (1.5 * MOST + REQUESTS)
