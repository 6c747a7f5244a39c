"""The decoder threads: each reads one video after another and sends its chunks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from pathlib import Path

from penstock.bulk import spool
from penstock.bulk.decode import BlockPool
from penstock.bulk.options import ROUND, JobPlan
from penstock.bulk.sender import ChunkSender
from penstock.bulk.types import Chunk, Position, ReadResult, Stopped, Video
from penstock.bulk.writer import CaptionWriter, JobListener, VideoTask
from penstock.errors import PenstockError, describe

_logger = logging.getLogger("penstock.bulk")


ReadChunks = Callable[..., Generator[Chunk, None, ReadResult]]
"""The type of `decode.read_chunks`."""


class ReadingFailed(PenstockError):
    """Reading a video raised an unexpected error; the video fails, the job continues."""

    code = "reading_failed"


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
    ) -> None:
        self._videos = deque(videos)
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
        task = VideoTask(video, path, state)
        self._listener.resumed(video, task.rows)
        self._writer.begin(task)
        result = self._send_all(task, state.last if state else None)
        if result is not None:
            self._writer.video_read(task, result)

    def _send_all(self, task: VideoTask, resume: Position | None) -> ReadResult | None:
        """How reading ended; None if the rest is no longer needed."""
        plan = self._plan
        chunks = self._read_chunks(
            task.video, plan.sampling, plan.pixels, plan.chunk_size, self.pool, resume, plan.threads
        )
        sent = 0
        with closing(chunks):
            while not (task.ended or self.stop.is_set()):
                ready, result = self._next(task.video, chunks, sent)
                sent += len(ready)
                self._writer.wait_for_room(self.stop)
                for chunk in ready:
                    self._sender.send(chunk)
                for _ in ready if plan.rounds else ():
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
        except Exception as e:  # one video never ends the job
            _logger.exception("video=%s cannot be read", video.name)
            return ready, ReadResult(sent + len(ready), 0, ReadingFailed(f"cannot be read: {describe(e)}"))
        return ready, None

    def _has_room_after(self, chunk: Chunk) -> bool:
        """Whether memory for another such chunk is free: during a round nothing returns to the pool."""
        pixels = chunk.pixels
        return isinstance(pixels, list) or self.pool.free_blocks * self.pool.block_bytes >= 2 * pixels.nbytes
