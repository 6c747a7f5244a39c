"""The threads that read videos: each takes the next video, and hands its chunks to the sender until it ends."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from penstock.bulk import spool
from penstock.bulk.blocks import BlockPool
from penstock.bulk.options import ROUND, Plan
from penstock.bulk.types import Chunk, Ended, Pixels, Position, Sampling, Sending, Stop, Stopped, Video
from penstock.bulk.writer import Task, Writer
from penstock.errors import PenstockError, describe

_logger = logging.getLogger("penstock.bulk")


class ReadChunks(Protocol):
    """`decode.read_chunks`, or what stands for it."""

    def __call__(
        self,
        video: Video,
        sampling: Sampling,
        pixels: Pixels,
        chunk_size: int,
        pool: BlockPool,
        resume: Position | None = None,
        threads: int = 1,
    ) -> Generator[Chunk, None, Ended]: ...


class ReadingFailed(PenstockError):
    """A decoder met what nobody expected; its video fails, the job goes on."""

    code = "reading_failed"


class Decoders:
    """`plan.decoders` threads over the videos. `began` is told how many rows of a video were there already.

    With `rounds` a thread decodes `ROUND` chunks, sends them, and decodes on when all of them are answered.
    """

    def __init__(
        self,
        videos: Iterable[Video],
        place: Callable[[Video], Path],
        *,
        plan: Plan,
        sampling: Sampling,
        read_chunks: ReadChunks,
        writer: Writer,
        began: Callable[[Video, int], None],
        fatal: Callable[[PenstockError], None],
        rounds: bool = False,
    ) -> None:
        self._videos = deque(videos)
        self._place, self._plan, self._sampling, self._read_chunks = place, plan, sampling, read_chunks
        self._writer, self._began, self._fatal = writer, began, fatal
        self._rounds = Round() if rounds else None
        self.pool = BlockPool(plan.pool_bytes, plan.block_bytes)
        self.stop = Stop()
        self._threads = [
            threading.Thread(target=self._run, name=f"penstock-decoder-{n}", daemon=True) for n in range(plan.decoders)
        ]

    def start(self, sender: Sending) -> None:
        """Called once."""
        self._sender = sender
        for thread in self._threads:
            thread.start()

    def answered(self, chunk: Chunk, answer: list[str] | PenstockError) -> None:
        """The sender's callback, before the writer's."""
        if self._rounds is not None:
            self._rounds.answered()

    def close(self) -> None:
        """No more chunks are made; returns when the threads have ended, at the latest after the frame at hand."""
        self.stop.set()
        self.pool.stop()
        if self._rounds is not None:
            self._rounds.stop()
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
                self._video(video)
            except PenstockError as e:  # of the spool: the disk refuses
                self._fatal(e)
                return
            except Exception as e:  # whatever it is, the job must hear of it rather than wait for ever
                _logger.exception("a decoder failed")
                self._fatal(ReadingFailed(f"a decoder failed: {describe(e)}"))
                return

    def _video(self, video: Video) -> None:
        path = self._place(video)
        found = spool.scan(path)
        if found is not None and not found.is_of(video):
            _logger.warning("video=%s changed since a part of it was captioned: it begins anew", video.name)
            found = None
        task = Task(video, path, found)
        self._began(video, task.rows)
        self._writer.begin(task)
        ended = self._send_all(task, found.last if found else None)
        if ended is not None:
            self._writer.ended(task, ended)

    def _send_all(self, task: Task, resume: Position | None) -> Ended | None:
        """How the video ended; None if nobody wants its rest."""
        plan = self._plan
        chunks = self._read_chunks(
            task.video, self._sampling, plan.pixels, plan.chunk_size, self.pool, resume, plan.threads
        )
        sent = 0
        with closing(chunks):
            while not (task.dropped or self.stop.is_set()):
                ready, ended = self._next(task.video, chunks, sent)
                sent += len(ready)
                self._writer.room(self.stop)
                if self._rounds is not None:
                    self._rounds.begin(len(ready))
                for chunk in ready:
                    self._sender.send(chunk)
                if self._rounds is not None:
                    self._rounds.wait()
                if ended is not None:
                    return ended
        return None

    def _next(self, video: Video, chunks: Generator[Chunk, None, Ended], sent: int) -> tuple[list[Chunk], Ended | None]:
        """The next chunk, or the next round of them, and how the video ended if it did."""
        ready: list[Chunk] = []
        try:
            ready.append(next(chunks))
            while self._rounds is not None and len(ready) < ROUND and self._fits(ready[-1]):
                ready.append(next(chunks))
        except StopIteration as over:
            ended: Ended = over.value
            return ready, ended
        except Stopped:
            pass
        except Exception as e:  # one video, whatever is wrong with it, does not end the job
            _logger.exception("video=%s cannot be read", video.name)
            return ready, Ended(sent + len(ready), 0, ReadingFailed(f"cannot be read: {describe(e)}"))
        return ready, None

    def _fits(self, chunk: Chunk) -> bool:
        """Whether there is memory for another such chunk: in a round nobody gives any back."""
        pixels = chunk.pixels
        return isinstance(pixels, list) or self.pool.free_blocks * self.pool.block_bytes >= 2 * pixels.nbytes


class Round:
    """How many chunks are still to be answered before the next is decoded."""

    def __init__(self) -> None:
        self._left = 0
        self._stopped = False
        self._changed = threading.Condition()

    def begin(self, chunks: int) -> None:
        """So many are about to be sent."""
        with self._changed:
            self._left = chunks

    def answered(self) -> None:
        """One was."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns when all were, or when the job ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._left <= 0 or self._stopped)

    def stop(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
