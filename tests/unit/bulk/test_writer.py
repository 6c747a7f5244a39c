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
from penstock.bulk.sending import NoServer, Undelivered
from penstock.bulk.spool import End
from penstock.bulk.types import Chunk, Ended, Stop, Video
from penstock.bulk.video import VideoError
from penstock.bulk.writer import Task, Writer
from penstock.errors import PenstockError


class OneBlock:
    """Memory that knows how often it was given back."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Books:
    """A writer with what it told."""

    def __init__(self) -> None:
        self.committed = 0
        self.ends: dict[str, End] = {}
        self.fatal: list[PenstockError] = []
        self.writer = Writer(
            committed=self._count,
            closed=lambda video, end: self.ends.update({video.name: end}),
            fatal=self.fatal.append,
            stops=lambda error: isinstance(error, NoServer),
        )

    def _count(self, video: Video, rows: int) -> None:
        self.committed += rows


@pytest.fixture
def books() -> Iterator[Books]:
    made = Books()
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
def test_rows_are_on_disk_in_order_up_to_the_first_failure_whatever_came_when(
    tmp_path: Path, sizes: list[int], seed: int, failing: int | None, ends_early: bool
) -> None:
    path = tmp_path / "spool.jsonl"
    books, task, frame, chunks = Books(), Task(video(), path, None), 0, []
    for number, size in enumerate(sizes):
        chunks.append(chunk(number, list(range(frame, frame + size))))
        frame += size
    good = [n for c in chunks for n in c.frames if failing is None or c.number < failing]
    books.writer.start()
    books.writer.begin(task)
    if ends_early:
        books.writer.ended(task, Ended(len(chunks), frame))
    for one in random.Random(seed).sample(chunks, len(chunks)):
        bad = one.number == failing
        books.writer.answered(one, Undelivered("no", attempts=8) if bad else captions(one.frames))
    if not ends_early:
        books.writer.ended(task, Ended(len(chunks), frame))
    books.writer.close()
    assert [(row.frame, row.caption) for row in spool.rows(path)] == [(n, f"frame {n}") for n in good]
    assert books.committed == len(good)
    failed = failing is not None and failing < len(chunks)
    end = books.ends["a.mp4"]
    assert (end.end, end.rows) == ("failed" if failed else "complete", len(good))
    if failed:
        assert (end.stage, end.frame) == ("send", chunks[failing or 0].frames[0])
    assert all(c.block.released == 1 for c in chunks if isinstance(c.block, OneBlock))
    found = spool.scan(path)
    assert found is not None
    assert found.end == end
    assert books.writer._waiting_rows == 0


def test_what_came_together_is_synced_together(tmp_path: Path, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    appended: list[tuple[str, int]] = []
    real = spool.append

    def append(path: Path, lines: bytes, *, anew: bool = False) -> None:
        appended.append((path.name, lines.count(b"\n")))
        real(path, lines, anew=anew)

    monkeypatch.setattr(writer.spool, "append", append)
    tasks = [Task(video(name), tmp_path / name, None) for name in ("a", "b")]
    for task in tasks:  # all of it before the thread starts: one group
        books.writer.begin(task)
        for number in (1, 0, 2):
            frames = [2 * number, 2 * number + 1]
            books.writer.answered(chunk(number, frames, task.video), captions(frames))
        books.writer.ended(task, Ended(3, 6))
    books.writer.start()
    books.writer.close()
    assert sorted(appended) == [("a", 8), ("b", 8)]
    assert set(books.ends) == {"a", "b"}


def test_damage_of_the_video_is_told_when_all_before_it_is_there(tmp_path: Path, books: Books) -> None:
    task = Task(video(), tmp_path / "a", None)
    books.writer.start()
    books.writer.begin(task)
    books.writer.ended(task, Ended(2, 9, VideoError("broken", stage="decode", frame=9)))
    books.writer.answered(chunk(1, [3, 4]), captions([3, 4]))
    assert not task.dropped
    books.writer.answered(chunk(0, [0, 1]), captions([0, 1]))
    books.writer.close()
    assert books.ends["a.mp4"] == End("failed", 4, 9, 1, "decode", 9, "broken")


def test_an_error_of_the_job_leaves_the_video_unfinished(tmp_path: Path, books: Books) -> None:
    task = Task(video(), tmp_path / "a", None)
    books.writer.start()
    books.writer.begin(task)
    books.writer.answered(chunk(0, [0]), captions([0]))
    books.writer.answered(chunk(1, [1]), NoServer("away"))
    books.writer.answered(chunk(2, [2]), captions([2]))
    books.writer.ended(task, Ended(3, 3))
    books.writer.close()
    assert [row.frame for row in spool.rows(tmp_path / "a")] == [0]
    assert not books.ends
    assert [str(error) for error in books.fatal] == ["away"]


def test_after_a_disk_that_refused_nothing_is_written_any_more(tmp_path: Path, books: Books) -> None:
    task = Task(video(), tmp_path / "no" / "folder", None)
    other = Task(video("b"), tmp_path / "b", None)
    books.writer.start()
    for one in (task, other):
        books.writer.begin(one)
        books.writer.answered(chunk(0, [0], one.video), captions([0]))
    books.writer.close()
    assert len(books.fatal) == 1
    assert "No such file" in books.fatal[0].message
    assert books.committed == 0


def test_what_nobody_expected_in_the_writer_ends_the_job(
    tmp_path: Path, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    books.writer.start()
    books.writer.begin(Task(video(), tmp_path / "a", None))
    books.writer.answered(chunk(0, [0, 1]), ["one caption for two frames"])
    books.writer.close()
    assert "the writer failed: ValueError" in books.fatal[0].message


def test_decoders_wait_while_too_many_rows_are_not_on_disk(
    tmp_path: Path, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAITING_ROWS", 4)
    passed = threading.Event()
    stop = Stop()

    def wait(until: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: (books.writer.room(until), passed.set()))
        thread.start()
        return thread

    books.writer.start()
    books.writer.begin(Task(video(), tmp_path / "a", None))
    books.writer.answered(chunk(1, [4, 5, 6, 7]), captions([4, 5, 6, 7]))  # waits for chunk 0
    waiting = wait(stop)
    assert not passed.wait(0.1)
    books.writer.answered(chunk(0, [0, 1, 2, 3]), captions([0, 1, 2, 3]))
    waiting.join(10)
    assert passed.is_set()
    stop.set()
    books.writer.answered(chunk(3, [8, 9, 10, 11]), captions([8, 9, 10, 11]))
    books.writer.room(stop)  # the job ends: nobody waits
