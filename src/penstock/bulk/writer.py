"""Answers in the order in which they come -> rows on disk in the order of the frames, by one thread.

What has come together is committed together: each spool that has new rows is written and synced once. A commit takes as
long as the disk takes, and meanwhile the next group gathers.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.bulk import spool
from penstock.bulk.spool import End, Spooled
from penstock.bulk.types import Chunk, Ended, Row, Stop, Video
from penstock.errors import PenstockError, describe

_logger = logging.getLogger("penstock.bulk")

WAITING_ROWS = 32_768  # rows that are not on disk yet, a few MB: decoders wait beyond it

Answer = list[str] | PenstockError


class Task:
    """One video in the work of this run. Its fields are the writer's; decoders look at `dropped`."""

    def __init__(self, video: Video, path: Path, found: Spooled | None) -> None:
        self.video = video
        self.path = path
        self.rows = found.rows if found else 0
        self.attempts = found.attempts if found else 0
        self.size = found.bytes if found else 0  # what of the spool holds; 0: it begins with this run
        self.next = 0  # the chunk whose rows come next
        self.waiting: dict[int, tuple[Chunk, Answer]] = {}
        self.ended: Ended | None = None
        self.end: End | None = None
        self.lines: list[bytes] = []  # of the group that is being committed
        self.new_rows = 0  # among them

    @property
    def dropped(self) -> bool:
        """Whether no more chunks of it are of use."""
        return self.end is not None


class Writer:
    """Takes chunks' answers and videos' ends from any thread; `committed` and `closed` are called in its own thread.

    `stops(error)` says whether an error is the job's rather than the video's: then nothing of the answer is kept, the
    video stays unfinished, and `fatal` is told.
    """

    def __init__(
        self,
        *,
        committed: Callable[[Video, int], None],
        closed: Callable[[Video, End], None],
        fatal: Callable[[PenstockError], None],
        stops: Callable[[PenstockError], bool],
    ) -> None:
        self._committed, self._closed, self._fatal, self._stops = committed, closed, fatal, stops
        self._queue: queue.SimpleQueue[Callable[[], Task | None] | None] = queue.SimpleQueue()
        self._tasks: dict[str, Task] = {}
        self._waiting_rows = 0
        self._room = threading.Condition()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="penstock-writer", daemon=True)

    def start(self) -> None:
        """Called once."""
        self._thread.start()

    def begin(self, task: Task) -> None:
        """A decoder begins with a video: its spool is mended, or made. Called before any of its chunks is sent."""
        self._queue.put(lambda: self._begin(task))

    def room(self, stop: Stop) -> None:
        """Returns when rows may be added; at once when the job ends."""
        with self._room:
            while self._waiting_rows >= WAITING_ROWS and not stop.is_set():
                self._room.wait(1.0)

    def answered(self, chunk: Chunk, answer: Answer) -> None:
        """The sender's callback."""
        chunk.block.release()
        chunk.pixels = []
        with self._room:
            self._waiting_rows += len(chunk.frames)
        self._queue.put(lambda: self._answered(chunk, answer))

    def ended(self, task: Task, ended: Ended) -> None:
        """A video was read to its end, or to its damage."""
        self._queue.put(lambda: self._ended(task, ended))

    def close(self) -> None:
        """Returns when all that was handed over is on disk."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            group = [self._queue.get()]
            while not self._queue.empty():
                group.append(self._queue.get())
            going = group[-1] is not None
            try:
                self._group([step for step in group if step is not None])
            except Exception as e:  # whatever it is, the job must hear of it rather than wait for ever
                _logger.exception("the writer failed")
                self._break(spool.SpoolError(f"the writer failed: {describe(e)}"))

    def _group(self, steps: list[Callable[[], Task | None]]) -> None:
        touched = {task.video.name: task for step in steps if (task := step()) is not None}
        for task in touched.values():
            self._commit(task)

    def _begin(self, task: Task) -> Task | None:
        self._tasks[task.video.name] = task
        if not task.size:
            task.lines.append(spool.head_line(task.video))
            return task
        try:
            spool.cut(task.path, task.size)
        except PenstockError as e:
            self._break(e)
        return None

    def _answered(self, chunk: Chunk, answer: Answer) -> Task | None:
        task = self._tasks.get(chunk.video.name)
        if isinstance(answer, PenstockError) and self._stops(answer):
            self._fatal(answer)
            task = None
        if task is None or task.dropped:
            self._leave(chunk)
            return None
        task.waiting[chunk.number] = chunk, answer
        while not task.dropped and (found := task.waiting.pop(task.next, None)) is not None:
            self._take(task, *found)
        return self._finish(task)

    def _take(self, task: Task, chunk: Chunk, answer: Answer) -> None:
        """The next chunk's rows become lines, or its error the end of the video."""
        self._leave(chunk)
        task.next += 1
        if isinstance(answer, PenstockError):
            self._fail(task, "send", chunk.frames[0], answer)
            return
        for frame, time_s, pts, caption in zip(chunk.frames, chunk.times_s, chunk.pts, answer, strict=True):
            task.lines.append(spool.row_line(task.rows, Row(frame, round(time_s, 6), pts, caption)))
            task.rows += 1
        task.new_rows += len(answer)

    def _leave(self, chunk: Chunk) -> None:
        """The chunk's rows wait no longer."""
        with self._room:
            self._waiting_rows -= len(chunk.frames)
            self._room.notify_all()

    def _ended(self, task: Task, ended: Ended) -> Task | None:
        task.ended = ended
        return self._finish(task)

    def _finish(self, task: Task) -> Task:
        """Ends the video if nothing of it is missing."""
        ended = task.ended
        if ended is None or task.dropped or task.next < ended.chunks:
            return task
        if ended.error is None:
            self._close(task, End("complete", task.rows, ended.seen))
        else:
            stage = getattr(ended.error, "stage", "decode")
            self._fail(task, stage, getattr(ended.error, "frame", None), ended.error)
        return task

    def _fail(self, task: Task, stage: str, frame: int | None, error: PenstockError) -> None:
        seen = task.ended.seen if task.ended else 0
        self._close(task, End("failed", task.rows, seen, task.attempts + 1, stage, frame, error.message))

    def _close(self, task: Task, end: End) -> None:
        for chunk, _ in task.waiting.values():
            self._leave(chunk)
        task.waiting.clear()
        task.lines.append(spool.end_line(end))
        task.end = end

    def _commit(self, task: Task) -> None:
        lines, rows, task.lines, task.new_rows = task.lines, task.new_rows, [], 0
        if not lines or self._broken:
            return
        try:
            spool.append(task.path, b"".join(lines), anew=not task.size)
        except PenstockError as e:
            self._break(e)
            return
        task.size = 1
        self._committed(task.video, rows)
        if task.end is not None:
            del self._tasks[task.video.name]
            self._closed(task.video, task.end)

    def _break(self, error: PenstockError) -> None:
        """The disk refuses: nothing is written any more."""
        if not self._broken:
            self._broken = True
            self._fatal(error)
