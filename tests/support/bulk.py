"""Fakes around a bulk job: videos without files, a server without a network."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bulk.decode import BlockPool
from penstock.bulk.endpoints import NotSent
from penstock.bulk.job import JobParts
from penstock.bulk.options import JobOptions
from penstock.bulk.outputs import OutputPaths
from penstock.bulk.progress import Progress, ProgressReporter
from penstock.bulk.servers import ServerInfo
from penstock.bulk.spool import SpoolEnd
from penstock.bulk.types import Chunk, OnResult, Position, ReadPlan, ReadResult, SendOptions, SendStats, Video
from penstock.bulk.video import VideoError, VideoProbe
from penstock.client.endpoint import Endpoint
from penstock.errors import PenstockError

Answer = list[str] | PenstockError


def caption_of(video: Video, frame: int) -> str:
    """The fake server's caption of a frame."""
    return f"{Path(video.name).name} frame {frame}"


def server_info(**changed: Any) -> ServerInfo:
    """A captioner's description, with some fields changed."""
    parameters = {"model": "fake", "revision": "r1", "prompt": "", "max_new_tokens": 8, "precision": "fp32"}
    fields: dict[str, Any] = {
        "address": Endpoint("127.0.0.1", 1), "model": "captioner", "revision": "r1", "height": 4, "width": 4,
        "inputs": frozenset({"frames", "jpeg"}), "max_batch_size": 4, "parameters": parameters, **changed,
    }  # fmt: skip
    return ServerInfo(**fields)


class FakeVideos:
    """`read_chunks` and `probe` for files that contain their number of frames: `12`, or `12 damaged`."""

    def __init__(self) -> None:
        self.read: list[tuple[str, Position | None]] = []
        self.open_at_once = 0
        self._open = 0

    @staticmethod
    def make(path: Path, frames: int, *, damaged: bool = False) -> Path:
        """Writes such a file."""
        path.write_text(f"{frames}{' damaged' if damaged else ''}")
        return path

    def probe(self, path: str, stream: int | None = None) -> VideoProbe:
        return VideoProbe(int(Path(path).read_text().split()[0]), None, 4, 4, "fake")

    def read_chunks(
        self, video: Video, plan: ReadPlan, pool: BlockPool, resume: Position | None = None
    ) -> Generator[Chunk, None, ReadResult]:
        """Like `decode.read_chunks`; a frame's time is a tenth of its number."""
        sampling, chunk_size = plan.sampling, plan.chunk_size
        self.read.append((video.name, resume))
        count, *damaged = Path(video.path).read_text().split()
        frames = [n for n in range(0, int(count), sampling.every) if resume is None or n > resume.frame]
        frames = [n for n in frames if plan.again is None or plan.again.asks(n)]
        self._open += 1
        self.open_at_once = max(self.open_at_once, self._open)
        try:
            groups = [frames[n : n + chunk_size] for n in range(0, len(frames), chunk_size)]
            for number, group in enumerate(groups):
                block = pool.take(len(group) * 48)
                rows = np.zeros((len(group), 4, 4, 3), np.uint8)
                yield Chunk(video, number, rows, group, [n / 10 for n in group], [n * 100 for n in group], block)
        finally:
            self._open -= 1
        error = VideoError("its end is missing", frame=int(count)) if damaged else None
        return ReadResult(len(groups), int(count), error)


class FakeSender:
    """Reports results in its own thread and in random order; `answer` may replace a chunk's result."""

    def __init__(
        self, answered: OnResult, answer: Callable[[Chunk], Answer | None] = lambda chunk: None, seed: int = 0
    ) -> None:
        self._answered, self._answer = answered, answer
        self._random = random.Random(seed)
        self._waiting: list[Chunk] = []
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent: list[tuple[str, list[int]]] = []

    def start(self) -> None:
        self._thread.start()

    def send(self, chunk: Chunk) -> None:
        with self._changed:
            self.sent.append((chunk.video.name, list(chunk.frames)))
            self._waiting.append(chunk)
            self._changed.notify()

    def close(self, drain_s: float) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        for chunk in self._waiting:
            self._answered(chunk, NotSent("the job ends"))

    def stats(self) -> SendStats:
        return SendStats(0, 1, 0, len(self.sent), 0, 0, ())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if self._ending:
                    return
                chunk = self._waiting.pop(self._random.randrange(len(self._waiting)))
            found = self._answer(chunk)
            self._answered(chunk, [caption_of(chunk.video, n) for n in chunk.frames] if found is None else found)


class FakeParts:
    """The parts of a job over `videos`; `sender` is its FakeSender once the job runs."""

    def __init__(self, answer: Callable[[Chunk], Answer | None] = lambda chunk: None, **server: Any) -> None:
        self.videos = FakeVideos()
        self.sender: FakeSender | None = None
        self._answer, self._server = answer, server

    def parts(self) -> JobParts:
        return JobParts(
            ask=lambda *_, **__: server_info(**self._server),
            read_chunks=self.videos.read_chunks,
            probe=self.videos.probe,
            sender=self._make,
        )

    def _make(self, servers: list[ServerInfo], options: SendOptions, answered: OnResult) -> FakeSender:
        self.sender = FakeSender(answered, self._answer)
        return self.sender


class RecordingListener:
    """Records what decoders and writer report."""

    def __init__(self) -> None:
        self.rows = 0
        self.ends: dict[str, SpoolEnd] = {}
        self.errors: list[PenstockError] = []

    def resumed(self, video: Video, rows: int) -> None: ...

    def committed(self, video: Video, rows: int, errors: list[str]) -> None:
        self.rows += rows

    def closed(self, video: Video, end: SpoolEnd) -> None:
        self.ends[video.name] = end

    def fatal(self, error: PenstockError) -> None:
        self.errors.append(error)


class RecordingReporter(ProgressReporter):
    """Records progress and notes."""

    every_s = 0.05

    def __init__(self) -> None:
        self.shown: list[Progress] = []
        self.notes: list[str] = []

    def show(self, now: Progress) -> None:
        self.shown.append(now)

    def note(self, line: str) -> None:
        self.notes.append(line)


def job_options(folder: Path, *inputs: Path | str, **changed: Any) -> JobOptions:
    """The options of a job that writes captions.jsonl into the folder."""
    fields: dict[str, Any] = {
        "inputs": tuple(str(i) for i in inputs), "outputs": OutputPaths((folder / "captions.jsonl",)),
        "work": folder / "captions.jsonl.work", "failures": folder / "failures.jsonl", "servers": ("http://x",),
        "decoders": 2, "memory_bytes": 4096, **changed,
    }  # fmt: skip
    return JobOptions(**fields)
