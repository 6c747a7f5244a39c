"""Autoscaling over random loads: bounds are kept, the number does not flap, and every request is answered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batching.autoscale import AutoscaleLimits, Autoscaler, LoadReading
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, SimulationSettings, simulate_scaling

QUIET_S = 6.0
LIMITS = st.builds(
    lambda fewest, more, zero: AutoscaleLimits(
        fewest=fewest, most=fewest + more, quiet_s=QUIET_S, slo_s=0.5, zero=zero
    ),
    st.integers(1, 3),
    st.integers(0, 8),
    st.booleans(),
)
STEPS = st.lists(
    st.tuples(
        st.floats(0.01, 3.0),  # time since the last reading
        st.integers(0, 500),  # rows that arrived in it
        st.integers(0, 300),  # rows that wait
        st.integers(0, 100),  # rows that run
    ),
    max_size=120,
)


def check_changes(changes: Sequence[tuple[float, int]], limits: AutoscaleLimits) -> None:
    """`changes`: (time, number) with the first number. Bounds are kept; between moves in a window, at most one pair
    has opposite directions."""
    assert all(number == 0 if number < limits.fewest else number <= limits.most for _, number in changes)
    assert limits.zero or all(number for _, number in changes)
    moves = [(t, after > before) for (_, before), (t, after) in pairwise(changes)]
    turns = [t for (_, up), (t, up_again) in pairwise(moves) if up != up_again]
    for k, (first, _) in enumerate(moves):
        inside = [up for t, up in moves[k:] if t < first + limits.quiet_s]
        assert sum(a != b for a, b in pairwise(inside)) <= 1, (moves, turns)


@given(LIMITS, STEPS, st.sampled_from([0.0, 0.05]), st.booleans())
def test_the_number_keeps_its_bounds_and_turns_once_in_a_window(
    limits: AutoscaleLimits, steps: list[tuple[float, int, int, int]], full_s: float, concurrent: bool
) -> None:
    scaler, now, arrived, number = Autoscaler(limits), 0.0, 0, limits.fewest
    changes = [(0.0, number)]
    for seconds, rows, queued, running in steps:
        now, arrived = now + seconds, arrived + rows
        reading = LoadReading(arrived, min(queued, arrived), running, number, number, 8, full_s, concurrent)
        decided = scaler.decide(reading, now)
        if decided != number:
            changes.append((now, decided))
        number = decided
        assert number or (not queued and not running), "work is left without an instance"
    check_changes(changes, limits)


@given(LIMITS, STEPS, st.integers(0, 119), st.floats(-1e6, 1e6))
def test_a_clock_that_jumps_breaks_nothing(
    limits: AutoscaleLimits, steps: list[tuple[float, int, int, int]], at: int, jump_s: float
) -> None:
    scaler, now, arrived, number = Autoscaler(limits), 0.0, 0, limits.fewest
    for k, (seconds, rows, queued, running) in enumerate(steps):
        now, arrived = now + seconds + (jump_s if k == at else 0.0), arrived + rows
        number = scaler.decide(LoadReading(arrived, queued, running, number, number, 8, 0.05), now)
        assert number == 0 if number < limits.fewest else number <= limits.most


@settings(max_examples=25)
@given(
    LIMITS,
    st.lists(st.tuples(st.floats(0.5, 6.0), st.sampled_from([0, 5, 80, 300])), min_size=1, max_size=8),
    st.floats(0.1, 2.0),
    st.integers(0, 99),
)
def test_every_request_is_answered_whatever_the_load_does(
    limits: AutoscaleLimits, phases: list[tuple[float, int]], start_s: float, seed: int
) -> None:
    rng, arrivals, begin = random.Random(seed), [0.0], 0.0
    for seconds, rate in phases:
        while rate and (t := max(begin, arrivals[-1]) + rng.expovariate(rate)) < begin + seconds:
            arrivals.append(t)
        begin += seconds
    settings = SimulationSettings(slots=limits.fewest, depth=2, max_batch_size=8, handover_s=0.0005, slo_s=0.5)
    result = simulate_scaling(ServiceTime(0.02, 0.01), OpenLoop(arrivals), settings, limits, start_s=start_s)
    assert len(result.latencies_s) == len(arrivals)
    check_changes(result.numbers, limits)
