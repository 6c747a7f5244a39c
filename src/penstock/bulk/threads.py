"""The threads around the sender: decoders read videos and send chunks, one writer commits the results.

Results arrive in any order and reach the disk in frame order. Everything that arrived meanwhile is committed together:
each spool with new rows is written and synced once.
"""

import copy
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from penstock.bulk import spool
from penstock.bulk.decode import BlockPool
from penstock.bulk.endpoints import ENDS_THE_JOB, NOT_THE_VIDEOS_FAULT
from penstock.bulk.options import ROUND, JobPlan
from penstock.bulk.sender import ChunkSender
from penstock.bulk.spool import SpoolEnd, SpoolState, Tally, plus
from penstock.bulk.types import (
    Again,
    Answer,
    CaptionRow,
    Chunk,
    ChunkResult,
    Gap,
    Position,
    ReadResult,
    Sample,
    Stopped,
    Video,
)
from penstock.errors import PenstockError, describe

_logger = logging.getLogger("penstock.bulk")

SYNCS = 16  # files that are synced at the same time
WAITING_ROWS = 32_768  # not on disk yet, a few MB: beyond this, decoders wait


class JobListener(Protocol):
    """Receives the reports of the decoders and the writer, each in its own thread."""

    def resumed(self, video: Video, rows: int) -> None:
        """A video is being read; `rows` of it are on disk from earlier runs."""

    def committed(self, video: Video, rows: int, errors: list[str]) -> None:
        """New rows are on disk, among them those with these errors."""

    def closed(self, video: Video, end: SpoolEnd) -> None:
        """A video has ended."""

    def fatal(self, error: PenstockError) -> None:
        """The job cannot continue."""


class VideoTask:
    """One video in this run. Its fields belong to the writer; decoders read `ended`."""

    def __init__(
        self, video: Video, path: Path, state: SpoolState | None, again: dict[int, list[CaptionRow]] | None = None
    ) -> None:
        """`again` are rows whose requests are repeated, by their frame."""
        self.video = video
        self.again = again or {}
        self.path = path
        self.rows = state.rows if state else 0
        self.attempts = state.attempts if state else 0
        self.valid_bytes = state.bytes if state else 0  # of the spool; 0: this run starts it
        self.next = 0  # number of the chunk whose rows come next
        self.waiting: dict[int, tuple[Chunk, ChunkResult]] = {}
        self.gaps = list(state.gaps) if state else []
        self.similar = state.similar if state else 0
        self.answer = state.answer if state else Answer()  # of the last row
        self.seen = state.seen if state else 0
        self.tally = copy.copy(state.tally) if state else Tally()
        if again:
            self.tally = Tally(tokens=self.tally.tokens)
            for first, *_ in again.values():
                self.tally.tokens = plus(self.tally.tokens, first.tokens, -1)
        self.read: ReadResult | None = None
        self.end: SpoolEnd | None = None
        self.lines: list[bytes] = []  # to be committed with the current group
        self.new_rows = 0  # among them
        self.new_errors: list[str] = []  # of these rows

    @property
    def ended(self) -> bool:
        """Whether further chunks of it are useless."""
        return self.end is not None

    def add_similar(self, found: list[Sample], *, carry: bool) -> int:
        """Adds rows with the last caption if it is carried to these frames; the number of frames without a row."""
        self.similar += len(found)
        for sample in found if carry else ():
            self.add_row(sample, carried=True)
        return 0 if carry else len(found)

    def add_row(self, sample: Sample, gaps: Sequence[Gap] = (), similar: int = 0, *, carried: bool = False) -> None:
        """Adds a row with the last caption."""
        answer, tokens = self.answer, None if carried else self.answer.tokens
        row = CaptionRow(
            sample.frame, round(sample.time_s, 6), sample.pts, answer.caption, answer.error, tokens, self.rows, [*gaps],
            similar, carried,
        )  # fmt: skip
        self._add(row, write=True)
        self.rows += 1

    def replace_rows(self, rows: list[CaptionRow]) -> None:
        """Replaces rows by the last caption: one whose request was repeated, and those that carry its caption."""
        for row in rows:
            self._add(replace(spool.with_answer(row, self.answer), gaps=[], similar=0), write=not row.carried)

    def _add(self, row: CaptionRow, *, write: bool) -> None:
        if row.error or row.tokens is not None:
            self.tally.add(row)
            self.new_errors += [row.error] if row.error else []
        if write:
            self.lines.append(spool.line_of(row))
        self.new_rows += 1

    def add_gaps(self, found: list[Gap]) -> list[Gap]:
        """Keeps gaps and returns those that are new; after a resume, known ones are found again."""
        new = [gap for gap in found if not any(known.covers(gap) for known in self.gaps)]
        self.gaps += new
        return new


class CaptionWriter:
    """Accepts results of chunks and ends of videos from any thread; calls `listener` in its own thread.

    An error that is not the video's fault leaves the video unfinished and goes to `listener.fatal`.
    """

    def __init__(self, listener: JobListener, *, carry: bool = False) -> None:
        """With `carry`, near-duplicates get a row with the caption of the frame that they resemble."""
        self._listener, self._carry = listener, carry
        self._queue: queue.SimpleQueue[Callable[[], VideoTask | None] | None] = queue.SimpleQueue()
        self._tasks: dict[str, VideoTask] = {}
        self.waiting_rows = 0  # accepted, and not lines yet
        self._room = threading.Condition()
        self._broken = False
        self._syncs = ThreadPoolExecutor(SYNCS, "penstock-sync")
        self._thread = threading.Thread(target=self._run, name="penstock-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, task: VideoTask) -> None:
        """Repairs or starts the video's spool. Called before any of its chunks is sent."""
        self._queue.put(lambda: self._begin(task))

    def wait_for_room(self, stop: threading.Event) -> None:
        """Returns when more rows may be added, or when the job ends."""
        with self._room:
            while self.waiting_rows >= WAITING_ROWS and not stop.is_set():
                self._room.wait(1.0)

    def chunk_done(self, chunk: Chunk, result: ChunkResult) -> None:
        """Releases the chunk's memory and writes its rows."""
        chunk.block.release()
        chunk.pixels = []
        with self._room:
            self.waiting_rows += len(chunk.frames)
        self._queue.put(lambda: self._accept(chunk, result))

    def video_read(self, task: VideoTask, result: ReadResult) -> None:
        """All chunks of the video were sent."""
        self._queue.put(lambda: self._read(task, result))

    def close(self) -> None:
        """Returns when everything is on disk."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._syncs.shutdown()

    def _run(self) -> None:
        running = True
        while running:
            group = [self._queue.get()]
            while not self._queue.empty():
                group.append(self._queue.get())
            running = None not in group  # also if a result came while it was closed
            try:
                changed = {task.video.name: task for step in group if step is not None and (task := step()) is not None}
                # a head alone waits for the first row: a spool without rows is like none
                ready = [task for task in changed.values() if task.new_rows or (task.lines and task.ended)]
                self._commit([] if self._broken else ready)
            except Exception as e:  # the job must learn of any error rather than wait for ever
                _logger.exception("the writer failed")
                self._break(spool.SpoolError(f"the writer failed: {describe(e)}"))

    def _begin(self, task: VideoTask) -> VideoTask | None:
        self._tasks[task.video.name] = task
        if not task.valid_bytes:
            task.lines.append(spool.head_line(task.video))
            return task
        try:
            spool.truncate(task.path, task.valid_bytes)
        except PenstockError as e:
            self._break(e)
        return None

    def _accept(self, chunk: Chunk, result: ChunkResult) -> VideoTask | None:
        task = self._tasks.get(chunk.video.name)
        if isinstance(result, NOT_THE_VIDEOS_FAULT):
            self._listener.fatal(result)
            task = None
        if task is None or task.ended:
            self._forget(chunk)
            return None
        task.waiting[chunk.number] = chunk, result
        while not task.ended and (found := task.waiting.pop(task.next, None)) is not None:
            self._append(task, *found)
        return self._finish(task)

    def _append(self, task: VideoTask, chunk: Chunk, result: ChunkResult) -> None:
        """Turns the rows of the next chunk into lines; its error ends the video."""
        self._forget(chunk)
        task.next += 1
        if isinstance(result, PenstockError):
            self._fail(task, "send", chunk.frames[0], result)
            return
        gaps = task.add_gaps(chunk.gaps)
        last = -1
        for sample, answer in zip(chunk.captioned, result, strict=True):
            before = [found for found in chunk.similar if last < found.frame < sample.frame]
            dropped, last = task.add_similar(before, carry=self._carry), sample.frame
            before_it, task.answer = task.answer, answer if isinstance(answer, Answer) else Answer(answer)
            if (rows := task.again.pop(sample.frame, None)) is not None:
                task.replace_rows(rows)
                task.answer = task.answer if rows[-1].row == task.rows - 1 else before_it
                continue
            task.add_row(sample, gaps, dropped)
            gaps = []

    def _forget(self, chunk: Chunk) -> None:
        """The chunk's rows no longer wait."""
        with self._room:
            self.waiting_rows -= len(chunk.frames)
            self._room.notify_all()

    def _read(self, task: VideoTask, result: ReadResult) -> VideoTask | None:
        task.read = result
        return self._finish(task)

    def _finish(self, task: VideoTask) -> VideoTask:
        """Ends the video once nothing of it is missing."""
        read = task.read
        if read is None or task.ended or task.next < read.chunks:
            return task
        task.add_gaps(read.gaps)
        if self._carry or read.error is None:  # otherwise the next attempt finds them again
            task.add_similar(read.similar, carry=self._carry)
        if read.error is None:
            seen = max(read.seen, task.seen)
            end = SpoolEnd("complete", task.rows, seen, gaps=task.gaps, similar=task.similar, tally=task.tally)
            self._end(task, end)
        else:
            stage = getattr(read.error, "stage", "decode")
            self._fail(task, stage, getattr(read.error, "frame", None), read.error)
        return task

    def _fail(self, task: VideoTask, stage: str, frame: int | None, error: PenstockError) -> None:
        seen = max(task.seen, task.read.seen if task.read else 0)
        attempts = task.attempts + 1
        end = SpoolEnd(
            "failed", task.rows, seen, attempts, stage, frame, error.message, task.gaps, task.similar, task.tally
        )
        self._end(task, end)

    def _end(self, task: VideoTask, end: SpoolEnd) -> None:
        for row in itertools.chain(*task.again.values()):  # which still have an error
            task.tally.add(row)
        for chunk, _ in task.waiting.values():
            self._forget(chunk)
        task.waiting.clear()
        task.lines.append(spool.line_of(end))
        task.end = end

    def _commit(self, tasks: list[VideoTask]) -> None:
        """Writes the lines of videos. A disk syncs several files, such as one an image, almost as fast as one."""
        written = map(_append_lines, tasks) if len(tasks) < 2 else self._syncs.map(_append_lines, tasks)
        for task, error in zip(tasks, written, strict=True):
            if error is not None:
                self._break(error)
            if self._broken:
                continue
            rows, errors = task.new_rows, task.new_errors
            task.lines, task.new_rows, task.new_errors, task.valid_bytes = [], 0, [], 1
            self._listener.committed(task.video, rows, errors)
            if task.end is not None:
                del self._tasks[task.video.name]
                self._listener.closed(task.video, task.end)

    def _break(self, error: PenstockError) -> None:
        """Writes nothing more after the disk has failed."""
        if not self._broken:
            self._broken = True
            self._listener.fatal(error)


def _append_lines(task: VideoTask) -> PenstockError | None:
    """The error of the disk, if there is one."""
    try:
        spool.append(task.path, b"".join(task.lines), overwrite=not task.valid_bytes)
    except PenstockError as e:
        return e
    return None


ReadChunks = Callable[..., Generator[Chunk, None, ReadResult]]
"""The type of `decode.read_chunks`."""


class ReadingFailed(PenstockError, code="reading_failed"):
    """Reading a video raised an unexpected error; the video fails, the job continues."""


class DecoderThreads:
    """`plan.decoders` threads over the videos, whose spools are at `spool_path`.

    With `plan.rounds`, a thread decodes `ROUND` chunks, sends them, and continues once all of them have results.
    """

    def __init__(
        self,
        videos: Iterable[Video],
        spool_path: Callable[[Video], Path],
        plan: JobPlan,
        read_chunks: ReadChunks,
        writer: CaptionWriter,
        listener: JobListener,
        *,
        retry: bool = False,
    ) -> None:
        """`retry` repeats the requests of rows with an error."""
        self._videos, self._retry = deque(videos), retry
        self._spool_path, self._plan, self._read_chunks = spool_path, plan, read_chunks
        self._writer, self._listener = writer, listener
        self._results = threading.Semaphore(0)  # of the current round
        self.pool = BlockPool(plan.pool_bytes, plan.block_bytes)
        self.stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"penstock-decoder-{n}", daemon=True) for n in range(plan.decoders)
        ]

    def start(self, sender: ChunkSender) -> None:
        self._sender = sender
        for thread in self._threads:
            thread.start()

    def chunk_done(self) -> None:
        """A chunk has its result."""
        if self._plan.rounds:
            self._results.release()

    def close(self) -> None:
        """Ends the threads, at the latest after the current frame."""
        self.stop.set()
        self.pool.stop()
        self._results.release(ROUND)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                video = self._videos.popleft()
            except IndexError:
                return
            try:
                self._read_video(video)
            except PenstockError as e:  # from the spool: the disk fails
                self._listener.fatal(e)
                return
            except Exception as e:  # the job must learn of any error rather than wait for ever
                _logger.exception("a decoder failed")
                self._listener.fatal(ReadingFailed(f"a decoder failed: {describe(e)}"))
                return

    def _read_video(self, video: Video) -> None:
        path = self._spool_path(video)
        state = spool.scan(path)
        if state is not None and not state.is_of(video):
            _logger.warning("video=%s changed since a part of it was captioned: it begins anew", video.name)
            state = None
        again = state.failed_requests() if self._retry and state is not None else {}
        plan, resume = self._plan, state.last if state else None
        if state is not None and state.last is not None and (again or state.complete):
            known_to = None if state.complete else max(state.last.frame, state.last.carried_to)
            plan = replace(plan, again=Again(frozenset(again), known_to))
            resume = state.before if again else resume
        task = VideoTask(video, path, state, again)
        self._listener.resumed(video, task.rows - sum(map(len, again.values())))
        self._writer.begin(task)
        result = self._send_all(task, plan, resume)
        if result is not None:
            self._writer.video_read(task, result)

    def _send_all(self, task: VideoTask, plan: JobPlan, resume: Position | None) -> ReadResult | None:
        """How reading ended; None if the rest is no longer needed."""
        chunks = self._read_chunks(task.video, plan, self.pool, resume)
        sent = 0
        with closing(chunks):
            while not (task.ended or self.stop.is_set()):
                ready, result = self._next(task.video, chunks, sent)
                sent += len(ready)
                self._writer.wait_for_room(self.stop)
                for chunk in ready:
                    self._sender.send(chunk)
                for _ in ready if self._plan.rounds else ():
                    self._results.acquire()
                if result is not None:
                    return result
        return None

    def _next(
        self, video: Video, chunks: Generator[Chunk, None, ReadResult], sent: int
    ) -> tuple[list[Chunk], ReadResult | None]:
        """The next chunk, or the next round of them, and how reading ended if it did."""
        ready: list[Chunk] = []
        try:
            ready.append(next(chunks))
            while self._plan.rounds and len(ready) < ROUND and self._has_room_after(ready[-1]):
                ready.append(next(chunks))
        except StopIteration as end:
            result: ReadResult = end.value
            return ready, result
        except Stopped:
            pass
        except ENDS_THE_JOB:
            raise
        except Exception as e:  # one video never ends the job
            _logger.exception("video=%s cannot be read", video.name)
            return ready, ReadResult(sent + len(ready), 0, ReadingFailed(f"cannot be read: {describe(e)}"))
        return ready, None

    def _has_room_after(self, chunk: Chunk) -> bool:
        """Whether memory for another such chunk is free: during a round nothing returns to the pool."""
        pixels = chunk.pixels
        return isinstance(pixels, list) or self.pool.free_blocks * self.pool.block_bytes >= 2 * pixels.nbytes
