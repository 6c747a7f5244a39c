from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk import spool, writer
from penstock.bulk.endpoints import NoServer
from penstock.bulk.sender import Undelivered
from penstock.bulk.spool import SpoolEnd
from penstock.bulk.types import Chunk, ReadResult, Video
from penstock.bulk.video import VideoError
from penstock.bulk.writer import CaptionWriter, VideoTask
from support.bulk import RecordingListener


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
    assert recorder.writer._waiting_rows == 0


def test_concurrent_results_are_synced_together(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended: list[tuple[str, int]] = []
    real = spool.append

    def append(path: Path, lines: bytes, *, overwrite: bool = False) -> None:
        appended.append((path.name, lines.count(b"\n")))
        real(path, lines, overwrite=overwrite)

    monkeypatch.setattr(writer.spool, "append", append)
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
    monkeypatch.setattr(writer, "WAITING_ROWS", 4)
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
