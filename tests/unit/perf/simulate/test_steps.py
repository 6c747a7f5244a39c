"""Continuous batching in virtual time."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, SimulationSettings, simulate
from support.simulated_steps import StepLoad, StepSimulation, simulate_steps

EXACT = ServiceTime(0.004, 0.0001, jitter=0.0, tail=0.0)


def test_a_lone_request_takes_its_steps() -> None:
    result = simulate_steps(EXACT, 4, StepLoad([1.0], steps=[10]), SimulationSettings(handover_s=0.002))
    assert [round(t, 6) for t in result.latencies_s] == [0.042]
    assert [round(t, 6) for t in result.first_parts_s] == [0.0051]


def test_a_later_request_joins_at_the_next_step_and_none_runs_twice() -> None:
    load = StepLoad([0.0, 0.001], steps=[3, 1])
    result = simulate_steps(EXACT, 4, load, SimulationSettings())
    assert [round(t, 6) for t in result.first_parts_s] == [0.0073]  # of the second: a step of one, then one of two


def test_continuous_batching_beats_whole_batches_where_lengths_differ() -> None:
    rng = random.Random(3)
    arrivals, now = [], 0.0
    for _ in range(3000):
        arrivals.append(now := now + rng.expovariate(45))
    lengths = [rng.randint(8, 128) for _ in arrivals]
    result = simulate_steps(EXACT, 32, StepLoad(arrivals, steps=lengths), SimulationSettings())
    # a batch takes as long as its longest answer, with a step of 32 each time
    whole = ServiceTime(128 * 0.004, 128 * 0.0001, jitter=0.0, tail=0.0)
    batches = simulate(whole, Adaptive(), OpenLoop(arrivals), SimulationSettings(max_batch_size=32))
    middle, of_batches = (found[len(found) // 2] for found in (result.latencies_s, batches.latencies_s))
    assert middle < 0.6 * of_batches
    assert result.first_parts_s[int(0.95 * len(result.first_parts_s))] < 0.02
    assert 8 < result.mean_active < 32


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 30)), min_size=1, max_size=60),
    st.integers(2, 9),
    st.integers(1, 3),
)
def test_each_request_steps_until_it_ends_and_none_overtakes_or_starves(
    requests: list[tuple[float, int]], max_active: int, slots: int
) -> None:
    requests.sort()
    lengths = [steps for _, steps in requests]
    simulation = StepSimulation(EXACT, SimulationSettings(slots=slots), max_active, lengths)
    end = simulation.run(OpenLoop([at for at, _ in requests]))
    assert not simulation.arrived
    assert not simulation.sent
    assert len(simulation.done) == len(simulation.first) == len(requests)
    assert len(simulation.parts) == sum(lengths)
    assert sum(active for _, active, _ in simulation.batches) == sum(lengths), "each advances once a step"
    assert all(1 <= active <= max_active for _, active, _ in simulation.batches)
    firsts = [t for _, t in sorted(simulation.first.items())]
    if slots == 1:
        assert firsts == sorted(firsts)
    slowest = EXACT.t(max_active) * (sum(lengths) + 1)
    assert all(t <= requests[id - 1][0] + slowest for id, (_, t) in simulation.first.items())
    assert end <= requests[-1][0] + slowest
