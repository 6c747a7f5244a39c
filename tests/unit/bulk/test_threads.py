"""The decoder threads and the writer."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk import spool, threads
from penstock.bulk.endpoints import NoServer
from penstock.bulk.options import JobPlan
from penstock.bulk.outputs import write_failures
from penstock.bulk.sender import Undelivered
from penstock.bulk.spool import SpoolEnd, WorkFolder
from penstock.bulk.threads import CaptionWriter, DecoderThreads, VideoTask
from penstock.bulk.types import Chunk, Gap, Pixels, ReadResult, Video
from penstock.bulk.video import VideoError
from penstock.errors import PenstockError
from support.bulk import FakeVideos, RecordingListener


class OneBlock:
    """Memory that counts its releases."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Recorder(RecordingListener):
    """A writer and what it reports."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = CaptionWriter(self)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.writer.close()


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-writer"]


def test_a_result_that_comes_while_the_writer_closes_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    made = Recorder()
    made.writer.close()
    task = VideoTask(video(), tmp_path / "spool.jsonl", None)
    made.writer.begin(task)
    made.writer.video_read(task, ReadResult(0, 5))
    made.writer.start()
    for thread in writers():
        thread.join(20)
    assert not writers()
    assert spool.scan(tmp_path / "spool.jsonl") is not None


def video(name: str = "a.mp4") -> Video:
    return Video(name, name, 1, 2)


def chunk(number: int, frames: list[int], of: Video | None = None) -> Chunk:
    rows = np.zeros((len(frames), 1, 1, 3), np.uint8)
    return Chunk(of or video(), number, rows, frames, [n / 10 for n in frames], [None] * len(frames), OneBlock())


def captions(frames: list[int]) -> list[str]:
    return [f"frame {n}" for n in frames]


@given(
    sizes=st.lists(st.integers(1, 4), max_size=8),
    seed=st.integers(0, 1000),
    failing=st.none() | st.integers(0, 7),
    ends_early=st.booleans(),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
def test_rows_are_on_disk_in_order_up_to_the_first_failure(
    tmp_path: Path, sizes: list[int], seed: int, failing: int | None, ends_early: bool
) -> None:
    path = tmp_path / "spool.jsonl"
    recorder, task, frame, chunks = Recorder(), VideoTask(video(), path, None), 0, []
    for number, size in enumerate(sizes):
        chunks.append(chunk(number, list(range(frame, frame + size))))
        frame += size
    good = [n for c in chunks for n in c.frames if failing is None or c.number < failing]
    recorder.writer.start()
    recorder.writer.begin(task)
    if ends_early:
        recorder.writer.video_read(task, ReadResult(len(chunks), frame))
    for one in random.Random(seed).sample(chunks, len(chunks)):
        bad = one.number == failing
        recorder.writer.chunk_done(one, Undelivered("no") if bad else captions(one.frames))
    if not ends_early:
        recorder.writer.video_read(task, ReadResult(len(chunks), frame))
    recorder.writer.close()
    assert [(row.frame, row.caption) for row in spool.rows(path)] == [(n, f"frame {n}") for n in good]
    assert recorder.rows == len(good)
    failed = failing is not None and failing < len(chunks)
    end = recorder.ends["a.mp4"]
    assert (end.end, end.rows) == ("failed" if failed else "complete", len(good))
    if failed:
        assert (end.stage, end.frame) == ("send", chunks[failing or 0].frames[0])
    assert all(c.block.released == 1 for c in chunks if isinstance(c.block, OneBlock))
    found = spool.scan(path)
    assert found is not None
    assert found.end == end
    assert recorder.writer.waiting_rows == 0


def test_concurrent_results_are_synced_together(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended: list[tuple[str, int]] = []
    real = spool.append

    def append(path: Path, lines: bytes, *, overwrite: bool = False) -> None:
        appended.append((path.name, lines.count(b"\n")))
        real(path, lines, overwrite=overwrite)

    monkeypatch.setattr(threads.spool, "append", append)
    tasks = [VideoTask(video(name), tmp_path / name, None) for name in ("a", "b")]
    for task in tasks:  # everything before the thread starts: one group
        recorder.writer.begin(task)
        for number in (1, 0, 2):
            frames = [2 * number, 2 * number + 1]
            recorder.writer.chunk_done(chunk(number, frames, task.video), captions(frames))
        recorder.writer.video_read(task, ReadResult(3, 6))
    recorder.writer.start()
    recorder.writer.close()
    assert sorted(appended) == [("a", 8), ("b", 8)]
    assert set(recorder.ends) == {"a", "b"}


def test_damage_is_reported_after_all_earlier_captions(tmp_path: Path, recorder: Recorder) -> None:
    task = VideoTask(video(), tmp_path / "a", None)
    recorder.writer.start()
    recorder.writer.begin(task)
    recorder.writer.video_read(task, ReadResult(2, 9, VideoError("broken", stage="decode", frame=9)))
    recorder.writer.chunk_done(chunk(1, [3, 4]), captions([3, 4]))
    assert not task.ended
    recorder.writer.chunk_done(chunk(0, [0, 1]), captions([0, 1]))
    recorder.writer.close()
    assert recorder.ends["a.mp4"] == SpoolEnd("failed", 4, 9, 1, "decode", 9, "broken")


def test_gaps_survive_an_interruption_and_are_listed_once(tmp_path: Path, recorder: Recorder) -> None:
    path = tmp_path / "spool.jsonl"
    first, second, third = Gap(1, 2, "lost", 5), Gap(8, 1, "lost", 9), Gap(20, 3, "lost")
    one, other = chunk(0, [0, 5]), chunk(0, [9])
    one.gaps, other.gaps = [first], [first, second]
    recorder.writer.start()
    recorder.writer.begin(VideoTask(video(), path, None))
    recorder.writer.chunk_done(one, captions(one.frames))
    recorder.writer.close()
    state = spool.scan(path)
    assert state is not None
    assert (state.rows, state.gaps) == (2, [first])
    again = Recorder()
    task = VideoTask(video(), path, state)
    again.writer.start()
    again.writer.begin(task)
    again.writer.chunk_done(other, captions(other.frames))
    again.writer.video_read(task, ReadResult(1, 20, gaps=[third]))
    again.writer.close()
    ended = spool.read_end(path)
    assert ended is not None
    assert (ended.rows, ended.failed, ended.gaps) == (3, False, [first, second, third])
    assert [row.frame for row in spool.rows(path)] == [0, 5, 9]
    assert write_failures(tmp_path / "failures.jsonl", [(video(), path)], WorkFolder(tmp_path / "a.work"))
    (line,) = (tmp_path / "failures.jsonl").read_text().splitlines()
    listed = json.loads(line)
    assert (listed["frame"], listed["captions"], listed["attempts"]) == (1, 3, 1)
    assert [(gap["frame"], gap["frames"]) for gap in listed["gaps"]] == [(1, 2), (8, 1), (20, 3)]
    assert "6 of its frames cannot be decoded" in listed["error"]


def test_an_error_of_the_job_leaves_the_video_unfinished(tmp_path: Path, recorder: Recorder) -> None:
    task = VideoTask(video(), tmp_path / "a", None)
    recorder.writer.start()
    recorder.writer.begin(task)
    recorder.writer.chunk_done(chunk(0, [0]), captions([0]))
    recorder.writer.chunk_done(chunk(1, [1]), NoServer("away"))
    recorder.writer.chunk_done(chunk(2, [2]), captions([2]))
    recorder.writer.video_read(task, ReadResult(3, 3))
    recorder.writer.close()
    assert [row.frame for row in spool.rows(tmp_path / "a")] == [0]
    assert not recorder.ends
    assert [str(error) for error in recorder.errors] == ["away"]


def test_nothing_is_written_after_a_disk_failure(tmp_path: Path, recorder: Recorder) -> None:
    task = VideoTask(video(), tmp_path / "no" / "folder", None)
    other = VideoTask(video("b"), tmp_path / "b", None)
    recorder.writer.start()
    for one in (task, other):
        recorder.writer.begin(one)
        recorder.writer.chunk_done(chunk(0, [0], one.video), captions([0]))
    recorder.writer.close()
    assert len(recorder.errors) == 1
    assert "No such file" in recorder.errors[0].message
    assert recorder.rows == 0


def test_an_unexpected_error_in_the_writer_ends_the_job(
    tmp_path: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.writer.start()
    recorder.writer.begin(VideoTask(video(), tmp_path / "a", None))
    recorder.writer.chunk_done(chunk(0, [0, 1]), ["one caption for two frames"])
    recorder.writer.close()
    assert "the writer failed: ValueError" in recorder.errors[0].message


def test_decoders_wait_while_too_many_rows_are_uncommitted(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "WAITING_ROWS", 4)
    passed = threading.Event()
    stop = threading.Event()

    def wait(until: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: (recorder.writer.wait_for_room(until), passed.set()))
        thread.start()
        return thread

    recorder.writer.start()
    recorder.writer.begin(VideoTask(video(), tmp_path / "a", None))
    recorder.writer.chunk_done(chunk(1, [4, 5, 6, 7]), captions([4, 5, 6, 7]))  # waits for chunk 0
    waiting = wait(stop)
    assert not passed.wait(0.1)
    recorder.writer.chunk_done(chunk(0, [0, 1, 2, 3]), captions([0, 1, 2, 3]))
    waiting.join(10)
    assert passed.is_set()
    stop.set()
    recorder.writer.chunk_done(chunk(3, [8, 9, 10, 11]), captions([8, 9, 10, 11]))
    recorder.writer.wait_for_room(stop)  # the job ends: no wait


BLOCK_BYTES = 4 * 48  # four frames


class Kept:
    """A sender that only collects chunks."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def send(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def until(self, count: int) -> None:
        end = time.monotonic() + 10
        while len(self.chunks) < count:
            assert time.monotonic() < end
            time.sleep(0.002)


class Fixture(RecordingListener):
    """Decoder threads over fake videos with a running writer, and what both report."""

    def __init__(self, folder: Path, *frames: int, blocks: int = 100, chunk: int = 4, **more: Any) -> None:
        super().__init__()
        self.fake, self.sender = FakeVideos(), Kept()
        self.writer = CaptionWriter(self)
        videos = []
        for n, count in enumerate(frames):
            path = FakeVideos.make(folder / f"{n}.mp4", count)
            videos.append(Video(str(path), path.name, 1, 1))
        plan = JobPlan(
            pixels=Pixels(height=4, width=4), chunk_size=chunk, frame_bytes=48, pool_bytes=blocks * BLOCK_BYTES,
            block_bytes=BLOCK_BYTES, threads=1, **{"decoders": 1, **more},
        )  # fmt: skip
        self.decoders = DecoderThreads(
            videos,
            lambda video: folder / f"{video.name}.spool",
            plan,
            self.fake.read_chunks,
            self.writer,
            self,
        )
        self.writer.start()
        self.decoders.start(self.sender)

    def answer(self, chunk: Chunk, error: PenstockError | None = None) -> None:
        answer = error or [str(n) for n in chunk.frames]
        self.decoders.chunk_done()
        self.writer.chunk_done(chunk, answer)

    def close(self) -> None:
        self.decoders.close()
        self.writer.close()


def test_decoders_wait_for_memory_and_end_with_the_job(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 400, blocks=3)
    made.sender.until(3)
    time.sleep(0.02)
    assert len(made.sender.chunks) == 3
    made.answer(made.sender.chunks[0])
    made.sender.until(4)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 2
    assert not made.ends


def test_an_unanswered_round_does_not_block_the_end_of_the_job(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 120, chunk=1, rounds=True)
    made.sender.until(50)
    time.sleep(0.02)
    assert len(made.sender.chunks) == 50
    for chunk in made.sender.chunks[:49]:
        made.answer(chunk)
    time.sleep(0.02)
    assert len(made.sender.chunks) == 50
    made.answer(made.sender.chunks[49])
    made.sender.until(100)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 2


def test_a_round_that_does_not_fit_into_memory_is_sent_before_it_is_full(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 120, chunk=1, blocks=20, rounds=True)
    made.sender.until(19)
    time.sleep(0.02)
    assert len(made.sender.chunks) <= 20
    done = 0
    end = time.monotonic() + 10
    while not made.ends:
        assert time.monotonic() < end
        while done < len(made.sender.chunks):
            made.answer(made.sender.chunks[done])
            done += 1
        time.sleep(0.001)
    made.close()
    assert made.ends["0.mp4"].rows == 120


def test_a_failed_video_is_read_no_further(tmp_path: Path) -> None:
    made = Fixture(tmp_path, 4000, 8, blocks=2)
    made.sender.until(1)
    made.answer(made.sender.chunks[0], PenstockError("no"))
    done = 1
    end = time.monotonic() + 10
    while "1.mp4" not in made.ends:
        assert time.monotonic() < end
        while done < len(made.sender.chunks):
            made.answer(made.sender.chunks[done])
            done += 1
        time.sleep(0.001)
    made.close()
    assert made.ends["0.mp4"].end == "failed"
    assert made.ends["1.mp4"].end == "complete"
    assert len([c for c in made.sender.chunks if c.video.name == "0.mp4"]) < 500
    assert made.decoders.pool.free_blocks == made.decoders.pool.blocks


def test_each_decoder_reads_one_video_at_a_time(tmp_path: Path) -> None:
    made = Fixture(tmp_path, *[80] * 6, decoders=3, blocks=3)
    made.sender.until(3)
    end = time.monotonic() + 10
    while made.fake.open_at_once < 3:
        assert time.monotonic() < end
        time.sleep(0.002)
    time.sleep(0.02)
    assert {name for name, _ in made.fake.read} == {"0.mp4", "1.mp4", "2.mp4"}
    made.close()


def test_an_unexpected_error_of_a_decoder_thread_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, **how: Any) -> None:
        raise RuntimeError("of no kind that is known")

    monkeypatch.setattr("penstock.bulk.threads.spool.scan", fail)
    made = Fixture(tmp_path, 8)
    end = time.monotonic() + 10
    while not made.errors:
        assert time.monotonic() < end
        time.sleep(0.002)
    made.close()
    assert "RuntimeError" in made.errors[0].message


def test_a_spool_that_cannot_be_read_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "0.mp4.spool").mkdir()
    made = Fixture(tmp_path, 8)
    end = time.monotonic() + 10
    while not made.errors:
        assert time.monotonic() < end
        time.sleep(0.002)
    made.close()
    assert "cannot read" in made.errors[0].message
