"""Autoscaling over random loads: bounds are kept, the number does not flap, and every request is answered."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batching.autoscale import AutoscaleLimits, Autoscaler, LoadReading
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime, SimulationSettings, simulate_scaling

QUIET_S = 6.0
LIMITS = st.builds(
    lambda fewest, more, zero, spare, headroom: AutoscaleLimits(
        fewest=fewest, most=fewest + more, quiet_s=QUIET_S, slo_s=0.5, zero=zero, spare=spare, headroom=headroom
    ),
    st.integers(1, 3),
    st.integers(0, 8),
    st.booleans(),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([0.0, 0.0, 0.5]),
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


@given(
    st.dictionaries(st.integers(0, 24 * 60 - 1), st.integers(0, 9), max_size=5),
    st.integers(0, 24 * 60 * 60 - 1),
    st.integers(0, 3600),
)
def test_the_schedule_asks_for_the_most_that_is_least_until_a_start_ends(
    entries: dict[int, int], day_s: int, ahead_s: int
) -> None:
    schedule = tuple((60.0 * minute, least) for minute, least in sorted(entries.items()))
    limits = AutoscaleLimits(fewest=1, most=9, quiet_s=QUIET_S, schedule=schedule)
    if not entries:
        assert limits.least(day_s, ahead_s) == 0
        assert limits.next_s(day_s, ahead_s) == math.inf
        return

    def at(second: int) -> int:
        """The entry before a time, the last one of the day before it if there is none."""
        minute = second % 86400 // 60
        return entries[max((m for m in entries if m <= minute), default=max(entries))]

    times = [day_s, *(t for t in range(day_s, day_s + ahead_s + 1) if t % 60 == 0)]
    assert limits.least(day_s, ahead_s) == max(map(at, times))
    quiet_s = limits.next_s(day_s, ahead_s)
    if quiet_s > 1:
        assert limits.least((day_s + quiet_s - 1) % 86400, ahead_s) == limits.least(day_s + 1, ahead_s)


def test_what_remains_without_load_is_the_spare_or_what_the_schedule_asks_for() -> None:
    limits = AutoscaleLimits(
        fewest=1, most=9, quiet_s=QUIET_S, zero=True, spare=2, schedule=((0.0, 0), (3600.0, 4), (7200.0, 0))
    )
    scaler, number, kept = Autoscaler(limits), 1, {}
    for second in range(9000):
        rows = min(second, 100)
        number = kept[second] = scaler.decide(LoadReading(rows, 0, 0, number, number, 8, 0.05), second, second)
    assert [kept[t] for t in (60, 3000, 3600, 7198, 7300)] == [3, 0, 4, 4, 0]
    assert [kept[t] for t in (3598, 3599)] == [0, 4], "an instance starts in one second, and is there in time"
    lasting = Autoscaler(msgspec.structs.replace(limits, zero=False, schedule=()))
    number = 1
    for second in range(100):
        number = lasting.decide(LoadReading(0, 0, 0, number, number, 8, 0.05), second)
    assert number == lasting.floor == 2


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
