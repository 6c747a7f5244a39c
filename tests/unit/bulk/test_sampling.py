"""Which frames are chosen: against what the words say, for any times; and the same after a resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bulk.sampling import Sampler, estimate
from penstock.bulk.types import Sampling

TICK_S = 0.001


def taken(sampling: Sampling, times: list[float], tick_s: float = 0.0) -> list[int]:
    sampler = Sampler(sampling, tick_s)
    chosen = []
    for frame, time_s in enumerate(times):
        verdict = sampler.tell(frame, time_s)
        if verdict == "over":
            break
        if verdict == "take":
            chosen.append(frame)
    return chosen


def steps(draw: st.DrawFn) -> list[float]:
    """Times in whole milliseconds, growing, as of a recording of variable rate."""
    gaps = draw(st.lists(st.integers(1, 400), max_size=60))
    times, now = [0.0], 0
    for gap in gaps:
        now += gap
        times.append(now / 1000)
    return times


videos = st.composite(steps)()
samplings = st.builds(
    Sampling,
    every=st.integers(1, 7),
    fps=st.none() | st.sampled_from([0.5, 1.0, 2.5, 10.0, 24.0, 30.0, 1000.0]),
    start_s=st.sampled_from([0.0, 0.04, 1.0]),
    end_s=st.none() | st.sampled_from([0.5, 2.0, 100.0]),
    max_frames=st.none() | st.integers(0, 12),
)


@given(videos, samplings)
def test_frames_lie_in_the_window_in_order_and_not_too_many(times: list[float], sampling: Sampling) -> None:
    chosen = taken(sampling, times, TICK_S)
    assert chosen == sorted(set(chosen))
    assert sampling.max_frames is None or len(chosen) <= sampling.max_frames
    for frame in chosen:
        assert times[frame] >= sampling.start_s - 1e-6
        assert sampling.end_s is None or times[frame] < sampling.end_s


@given(videos, st.integers(1, 7))
def test_every_nth_frame_counts_from_the_videos_first(times: list[float], every: int) -> None:
    assert taken(Sampling(every=every), times) == list(range(0, len(times), every))


@given(videos, st.sampled_from([0.5, 1.0, 2.5, 10.0, 24.0, 1000.0]))
def test_fps_takes_the_first_frame_at_or_after_each_point_of_the_grid(times: list[float], fps: float) -> None:
    slack_s = TICK_S / 2 * 1.01
    expected, point = [], 0
    for frame, time_s in enumerate(times):
        if time_s + slack_s >= point / fps:
            expected.append(frame)
            while time_s + slack_s >= point / fps:
                point += 1
    assert taken(Sampling(fps=fps), times, TICK_S) == expected


@given(videos, samplings, st.data())
def test_a_resumed_sampler_goes_on_as_if_it_had_never_stopped(
    times: list[float], sampling: Sampling, data: st.DataObject
) -> None:
    whole = taken(sampling, times, TICK_S)
    if not whole:
        return
    count = data.draw(st.integers(1, len(whole)))
    last = whole[count - 1]
    sampler = Sampler(sampling, TICK_S)
    sampler.resume(times[last], count)
    rest = []
    for frame in range(last + 1, len(times)):
        verdict = sampler.tell(frame, times[frame])
        if verdict == "over":
            break
        if verdict == "take":
            rest.append(frame)
    assert rest == whole[count:]


@pytest.mark.parametrize("fps", [24, 25, 30, 50, 60])
def test_a_videos_own_rate_takes_every_frame_though_times_are_rounded_to_milliseconds(fps: int) -> None:
    times = [round(frame / fps, 3) for frame in range(1000)]
    assert taken(Sampling(fps=float(fps)), times, TICK_S) == list(range(1000))


def test_exact_times_on_the_grid_are_not_missed_for_floats() -> None:
    assert taken(Sampling(fps=10.0), [frame / 30 for frame in range(3000)]) == list(range(0, 3000, 3))


def test_a_sampler_that_is_full_says_so_before_another_frame_is_decoded() -> None:
    sampler = Sampler(Sampling(max_frames=1))
    assert not sampler.full
    assert sampler.tell(0, 0.0) == "take"
    assert sampler.full
    assert sampler.tell(1, 0.04) == "over"


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        (Sampling(), 100),
        (Sampling(every=3), 34),
        (Sampling(fps=1.0), 4),
        (Sampling(fps=100.0), 100),
        (Sampling(start_s=1.0, end_s=3.0), 50),
        (Sampling(start_s=5.0), 0),
        (Sampling(max_frames=7), 7),
    ],
)
def test_the_estimate_of_a_regular_video_is_what_is_taken(sampling: Sampling, count: int) -> None:
    assert estimate(sampling, 100, 4.0) == count
    assert len(taken(sampling, [frame / 25 for frame in range(100)])) == count
