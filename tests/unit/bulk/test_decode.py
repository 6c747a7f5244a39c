"""Videos as chunks: sampling, chunk sizes, memory, and how reading ends."""

from __future__ import annotations

import gc
import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk.decode import BlockPool, FrameSampler, PoolBlock, estimate, read_chunks
from penstock.bulk.pixels import FrameConverter
from penstock.bulk.types import Chunk, Pixels, Position, ReadPlan, ReadResult, Sampling, Stopped, Video
from penstock.bulk.video import VideoError, VideoProbe
from support.videos import make_clip, number_of

PIXELS = Pixels(height=48, width=80)
FRAME_BYTES = 48 * 80 * 3
COUNT = 50

Result = tuple[list[Chunk], ReadResult]


def video(path: Path) -> Video:
    return Video(str(path), path.name, 0, 0)


def chunks_of(path: Path, chunk_size: int = 8, pool: BlockPool | None = None, **options: Any) -> Result:
    """Every chunk, with its pixels copied and its block released, and the result."""
    pool = pool or BlockPool(16 * FRAME_BYTES, 8 * FRAME_BYTES)
    resume = options.pop("resume", None)
    plan = ReadPlan(chunk_size=chunk_size, **{"pixels": PIXELS, **options})
    reading = read_chunks(video(path), plan, pool, resume)
    chunks = []
    while True:
        try:
            chunk = next(reading)
        except StopIteration as stop:
            assert pool.free_blocks == pool.blocks
            return chunks, stop.value
        if isinstance(chunk.pixels, np.ndarray):
            chunk.pixels = chunk.pixels.copy()
        chunk.block.release()
        chunks.append(chunk)


def rows(chunks: list[Chunk]) -> list[tuple[int, float, int | None, bytes]]:
    return [
        (frame, time_s, pts, chunk.pixels[place].tobytes())  # type: ignore[union-attr]
        for chunk in chunks
        for place, (frame, time_s, pts) in enumerate(zip(chunk.frames, chunk.times_s, chunk.pts, strict=True))
    ]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clip(tmp_path_factory.mktemp("clip") / "a.mp4", COUNT, options={"g": "12", "bf": "3"})


def test_a_video_becomes_full_chunks_and_a_shorter_last_one(clip: Path) -> None:
    chunks, ended = chunks_of(clip)
    assert [len(chunk.frames) for chunk in chunks] == [8] * 6 + [2]
    assert [chunk.number for chunk in chunks] == list(range(7))
    assert ended == ReadResult(chunks=7, seen=COUNT)
    for chunk in chunks:
        assert isinstance(chunk.pixels, np.ndarray)
        assert chunk.pixels.shape == (len(chunk.frames), 48, 80, 3)
        assert chunk.pixels.flags.c_contiguous
        assert [number_of(pixels) for pixels in chunk.pixels] == chunk.frames
        assert chunk.times_s == pytest.approx([frame / 25 for frame in chunk.frames])


def test_a_chunk_is_no_larger_than_a_block(clip: Path) -> None:
    chunks, _ = chunks_of(clip, 64, BlockPool(30 * FRAME_BYTES, 5 * FRAME_BYTES + 100))
    assert [len(chunk.frames) for chunk in chunks] == [5] * 10


def test_chunks_of_one_frame(clip: Path) -> None:
    chunks, _ = chunks_of(clip, 1)
    assert [chunk.frames for chunk in chunks] == [[frame] for frame in range(COUNT)]


samplings = st.builds(
    Sampling,
    every=st.integers(1, 5),
    fps=st.none() | st.sampled_from([1.0, 7.0, 25.0]),
    start_s=st.sampled_from([0.0, 0.5]),
    end_s=st.none() | st.just(1.5),
    max_frames=st.none() | st.integers(1, 20),
)
keyframes = st.builds(Sampling, keyframes=st.just(True), start_s=st.sampled_from([0.0, 0.5]))


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(sampling=samplings | keyframes, size=st.integers(1, 9), again=st.integers(1, 9), data=st.data())
def test_a_resumed_run_yields_the_same_frames_as_an_uninterrupted_one(
    clip: Path, sampling: Sampling, size: int, again: int, data: st.DataObject
) -> None:
    whole, ended = chunks_of(clip, size, sampling=sampling)
    expected = rows(whole)
    place = data.draw(st.integers(0, len(expected) - 1))
    frame, _, pts, _ = expected[place]
    rest, resumed = chunks_of(clip, again, sampling=sampling, resume=Position(frame, pts, place + 1))
    assert rows(rest) == expected[place + 1 :]
    assert resumed.seen == ended.seen
    assert [chunk.number for chunk in rest] == list(range(resumed.chunks))


def test_only_sampled_frames_are_converted(clip: Path) -> None:
    chunks, ended = chunks_of(clip, sampling=Sampling(every=7, start_s=0.2, max_frames=4))
    assert [frame for chunk in chunks for frame in chunk.frames] == [7, 14, 21, 28]
    assert ended.seen == 29  # no frame after the last sample is decoded


def test_an_empty_sample_is_not_an_error(clip: Path) -> None:
    assert chunks_of(clip, sampling=Sampling(start_s=100.0)) == ([], ReadResult(0, COUNT))


def test_a_resume_after_the_last_frame_finds_the_end(clip: Path) -> None:
    (*_, last), _ = chunks_of(clip)
    resumed = chunks_of(clip, resume=Position(last.frames[-1], last.pts[-1], COUNT))
    assert resumed == ([], ReadResult(0, COUNT))


def test_jpeg_chunks_hold_jpeg_files(clip: Path) -> None:
    chunks, ended = chunks_of(clip, pixels=Pixels("jpeg", height=48, width=80))
    assert ended.error is None
    numbers = []
    for chunk in chunks:
        assert isinstance(chunk.pixels, list)
        for file in chunk.pixels:
            image = PIL.Image.open(io.BytesIO(file))
            assert image.size == (80, 48)
            numbers.append(number_of(np.asarray(image)))
    assert numbers == list(range(COUNT))


def test_source_chunks_hold_the_frames_that_fit_or_one_larger_frame(clip: Path) -> None:
    source = 160 * 96 * 3
    chunks, _ = chunks_of(clip, 8, BlockPool(9 * source, 3 * source), pixels=Pixels("source"))
    assert [len(chunk.frames) for chunk in chunks] == [3] * 16 + [2]
    chunks, ended = chunks_of(clip, 8, BlockPool(2 * source, source // 4), pixels=Pixels("source"))
    assert [len(chunk.frames) for chunk in chunks] == [1] * COUNT
    assert ended.error is None


def test_a_frame_larger_than_the_pool_fails_its_video(clip: Path) -> None:
    chunks, ended = chunks_of(clip, pool=BlockPool(1000, 1000), pixels=Pixels("source"))
    assert chunks == []
    assert isinstance(ended.error, VideoError)
    assert "a frame of 160x96 takes 46080 bytes" in ended.error.message


def test_a_change_of_frame_size_begins_another_chunk(tmp_path: Path) -> None:
    parts = [make_clip(tmp_path / f"{w}.h264", 5, size=(w, 96)).read_bytes() for w in (160, 128)]
    path = tmp_path / "both.h264"
    path.write_bytes(b"".join(parts))
    chunks, ended = chunks_of(path, 8, BlockPool(1 << 20, 1 << 19), pixels=Pixels("source"))
    assert ended == ReadResult(2, 10)
    assert [chunk.pixels.shape for chunk in chunks] == [(5, 96, 160, 3), (5, 96, 128, 3)]  # type: ignore[union-attr]
    chunks, _ = chunks_of(path)
    assert [len(chunk.frames) for chunk in chunks] == [8, 2]


@pytest.mark.parametrize(("make", "stage", "text"), [
    (lambda path: path, "open", "cannot be opened: No such file"),
    (lambda path: path.write_bytes(b"nothing"), "open", "cannot be opened as a video"),
    (lambda path: make_clip(path, 0), "open", "no video stream"),
    (lambda path: make_clip(path.with_suffix(".avi"), 0, codec="mpeg4").rename(path), "decode", "contains no frames"),
])  # fmt: skip
def test_an_unreadable_file_ends_before_the_first_chunk(
    tmp_path: Path, make: Callable[[Path], object], stage: str, text: str
) -> None:
    path = tmp_path / "a.mp4"
    make(path)
    chunks, ended = chunks_of(path)
    assert (chunks, ended.chunks, ended.seen) == ([], 0, 0)
    assert isinstance(ended.error, VideoError)
    assert ended.error.stage == stage
    assert text in ended.error.message


def test_the_frames_before_damage_are_yielded(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4", COUNT, options={"g": "10"}, container_options={"movflags": "faststart"})
    with av.open(str(path)) as container:
        keyframes = [packet.pos for packet in container.demux(video=0) if packet.is_keyframe]
    path.write_bytes(path.read_bytes()[: keyframes[3] + 20])  # elsewhere, frames before it miss references
    chunks, ended = chunks_of(path)
    frames = [frame for chunk in chunks for frame in chunk.frames]
    assert frames == list(range(ended.seen)) == list(range(30))
    assert isinstance(ended.error, VideoError)
    assert (ended.error.stage, ended.error.frame) == ("decode", ended.seen)
    assert ended.chunks == len(chunks) > 1


def test_stopping_the_pool_ends_a_decoder_that_waits_for_memory(clip: Path) -> None:
    pool = BlockPool(2 * 8 * FRAME_BYTES, 8 * FRAME_BYTES)
    held: list[Chunk] = []
    met: list[type] = []

    def decode() -> None:
        try:
            held.extend(read_chunks(video(clip), ReadPlan(pixels=PIXELS, chunk_size=8), pool))
        except Stopped:
            met.append(Stopped)

    job = threading.Thread(target=decode)
    job.start()
    while pool.free_blocks or not pool.waiting:
        assert job.is_alive()
    assert not held or len(held) <= 2
    pool.stop()
    job.join(10)
    assert met == [Stopped]


def test_closing_the_generator_leaves_yielded_chunks_to_their_receiver(clip: Path) -> None:
    pool = BlockPool(2 * 8 * FRAME_BYTES, 8 * FRAME_BYTES)
    reading = read_chunks(video(clip), ReadPlan(pixels=PIXELS, chunk_size=8), pool)
    first = next(reading)
    reading.close()
    assert pool.free_blocks == 1
    first.block.release()
    assert pool.free_blocks == 2


@pytest.mark.parametrize(("bad", "kept"), [(0, 0), (3, 3), (8, 8), (11, 11)])
def test_a_frame_that_cannot_be_converted_counts_as_damage(
    clip: Path, monkeypatch: pytest.MonkeyPatch, bad: int, kept: int
) -> None:
    convert = FrameConverter.convert

    def sometimes(self: FrameConverter, picture: Any, into: Any) -> None:
        if picture.pts == bad * 512:
            raise VideoError("its pixels cannot be converted")
        convert(self, picture, into)

    monkeypatch.setattr(FrameConverter, "convert", sometimes)
    chunks, ended = chunks_of(clip)
    assert sum(len(chunk.frames) for chunk in chunks) == kept
    assert isinstance(ended.error, VideoError)
    assert ended.error.frame == bad


def test_no_decoded_frame_waits_for_the_garbage_collector(tmp_path: Path) -> None:
    clip = make_clip(tmp_path / "turned.mp4", 5, rotate=90)
    gc.collect()
    gc.disable()
    try:
        for chunk in read_chunks(video(clip), ReadPlan(pixels=PIXELS, chunk_size=8), BlockPool(1 << 20, 1 << 18)):
            chunk.block.release()
        # isinstance reads __class__, and some objects of torch warn about that
        left = [one for one in gc.get_objects() if type(one) is av.VideoFrame and one.width > 16]
    finally:
        gc.enable()
    assert not left


TICK_S = 0.001


def taken(sampling: Sampling, times: list[float], tick_s: float = 0.0) -> list[int]:
    sampler = FrameSampler(sampling, tick_s)
    chosen = []
    for frame, time_s in enumerate(times):
        verdict = sampler.decide(frame, time_s)
        if verdict == "end":
            break
        if verdict == "take":
            chosen.append(frame)
    return chosen


def steps(draw: st.DrawFn) -> list[float]:
    """Increasing times in whole milliseconds, as in a recording of variable rate."""
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
def test_samples_are_ordered_inside_the_window_and_bounded(times: list[float], sampling: Sampling) -> None:
    chosen = taken(sampling, times, TICK_S)
    assert chosen == sorted(set(chosen))
    assert sampling.max_frames is None or len(chosen) <= sampling.max_frames
    for frame in chosen:
        assert times[frame] >= sampling.start_s - 1e-6
        assert sampling.end_s is None or times[frame] < sampling.end_s


@given(videos, st.integers(1, 7))
def test_every_nth_frame_counts_from_the_first_frame_of_the_video(times: list[float], every: int) -> None:
    assert taken(Sampling(every=every), times) == list(range(0, len(times), every))


@given(videos, st.sampled_from([0.5, 1.0, 2.5, 10.0, 24.0, 1000.0]))
def test_fps_takes_the_first_frame_at_or_after_each_grid_point(times: list[float], fps: float) -> None:
    slack_s = TICK_S / 2 * 1.01
    expected, point = [], 0
    for frame, time_s in enumerate(times):
        if time_s + slack_s >= point / fps:
            expected.append(frame)
            while time_s + slack_s >= point / fps:
                point += 1
    assert taken(Sampling(fps=fps), times, TICK_S) == expected


@given(videos, samplings, st.data())
def test_a_resumed_sampler_continues_as_if_uninterrupted(
    times: list[float], sampling: Sampling, data: st.DataObject
) -> None:
    whole = taken(sampling, times, TICK_S)
    if not whole:
        return
    count = data.draw(st.integers(1, len(whole)))
    last = whole[count - 1]
    sampler = FrameSampler(sampling, TICK_S)
    sampler.resume(times[last], count)
    rest = []
    for frame in range(last + 1, len(times)):
        verdict = sampler.decide(frame, times[frame])
        if verdict == "end":
            break
        if verdict == "take":
            rest.append(frame)
    assert rest == whole[count:]


@pytest.mark.parametrize("fps", [24, 25, 30, 50, 60])
def test_the_videos_own_rate_takes_every_frame_despite_rounded_times(fps: int) -> None:
    times = [round(frame / fps, 3) for frame in range(1000)]
    assert taken(Sampling(fps=float(fps)), times, TICK_S) == list(range(1000))


def test_exact_times_on_the_grid_survive_float_rounding() -> None:
    assert taken(Sampling(fps=10.0), [frame / 30 for frame in range(3000)]) == list(range(0, 3000, 3))


def test_a_full_sampler_reports_it_before_another_frame_is_decoded() -> None:
    sampler = FrameSampler(Sampling(max_frames=1))
    assert not sampler.full
    assert sampler.decide(0, 0.0) == "take"
    assert sampler.full
    assert sampler.decide(1, 0.04) == "end"


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
def test_the_estimate_for_a_regular_video_is_exact(sampling: Sampling, count: int) -> None:
    assert estimate(sampling, VideoProbe(100, 4.0, 0, 0, "")) == count
    assert len(taken(sampling, [frame / 25 for frame in range(100)])) == count


def test_a_clip_counts_once_where_it_gets_one_caption() -> None:
    sampling, found = Sampling(fps=4.0, clip_frames=6), VideoProbe(100, 4.0, 0, 0, "")
    assert (estimate(sampling, found), estimate(sampling, found, by_clip=True)) == (16, 3)


def started(job: threading.Thread, pool: BlockPool, waiting: int = 1) -> None:
    """Starts a thread; returns when `waiting` threads wait for the pool."""
    job.start()
    while pool.waiting < waiting:
        time.sleep(0.001)


def test_blocks_do_not_overlap_and_are_bounded() -> None:
    pool = BlockPool(1000, 300)
    assert (pool.blocks, pool.total_bytes, pool.free_blocks) == (3, 900, 3)
    held = [pool.take() for _ in range(3)]
    for number, block in enumerate(held):
        assert block.memory.shape == (300,)
        block.memory[:] = number
    assert [int(block.memory[0]) for block in held] == [0, 1, 2]
    assert pool.free_blocks == 0


def test_taking_from_an_empty_pool_waits_for_a_returned_block() -> None:
    pool = BlockPool(100, 100)
    first = pool.take()
    got: list[PoolBlock] = []
    job = threading.Thread(target=lambda: got.append(pool.take()))
    started(job, pool)
    assert not got
    first.release()
    job.join(10)
    assert len(got) == 1


def test_a_large_request_gets_adjacent_blocks_before_later_small_ones() -> None:
    pool = BlockPool(400, 100)
    held = [pool.take() for _ in range(4)]
    order: list[str] = []

    def take(name: str, size: int) -> None:
        block = pool.take(size)
        order.append(f"{name} {len(block.memory)}")
        block.release()

    large = threading.Thread(target=take, args=("large", 250))
    small = threading.Thread(target=take, args=("small", 1))
    started(large, pool)
    started(small, pool, waiting=2)
    for place in (0, 3, 1):  # three free blocks, but only two adjacent ones
        held[place].release()
    large.join(0.05)
    assert order == []
    held[2].release()
    large.join(10)
    small.join(10)
    assert order == ["large 300", "small 100"]


def test_stop_wakes_waiting_threads_and_rejects_later_ones() -> None:
    pool = BlockPool(100, 100)
    block = pool.take()
    met: list[type] = []

    def wait() -> None:
        try:
            pool.take()
        except Stopped:
            met.append(Stopped)

    job = threading.Thread(target=wait)
    started(job, pool)
    pool.stop()
    job.join(10)
    assert met == [Stopped]
    block.release()
    with pytest.raises(Stopped):
        pool.take()


def test_a_block_released_twice_is_not_given_to_two_chunks() -> None:
    pool = BlockPool(200, 100)
    first, second = pool.take(), pool.take()
    first.release()
    third = pool.take()
    first.release()
    assert pool.free_blocks == 0
    assert not np.shares_memory(second.memory, third.memory)


def test_a_request_larger_than_the_pool_is_rejected_at_once() -> None:
    with pytest.raises(ValueError, match="301 bytes were requested; the pool has 300"):
        BlockPool(300, 100).take(301)
    with pytest.raises(ValueError, match="block_bytes is 0"):
        BlockPool(300, 0)
