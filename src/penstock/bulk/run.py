"""One run of a job: decoder threads read and send, the sender talks to the servers, the writer commits.

A prober counts the frames ahead, and the caller's thread waits for the end and reports progress.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from penstock.bulk import spool
from penstock.bulk.decode import estimate, read_chunks
from penstock.bulk.endpoints import NotSent
from penstock.bulk.folder import WorkFolder
from penstock.bulk.options import JobOptions, JobPlan
from penstock.bulk.progress import JobSummary, Progress, ProgressReporter, RateWindow
from penstock.bulk.reading import DecoderThreads, ReadChunks
from penstock.bulk.sender import ChunkSender
from penstock.bulk.servers import ServerInfo, ask
from penstock.bulk.spool import SpoolEnd
from penstock.bulk.types import Chunk, ChunkResult, OnResult, SendOptions, Video
from penstock.bulk.video import VideoProbe, probe
from penstock.bulk.writer import CaptionWriter
from penstock.errors import PenstockError

_logger = logging.getLogger("penstock.bulk")

DRAIN_S = 60.0  # for requests in flight at an interrupt: longer than a batch of a slow model takes
MAX_REFUSED = 10  # videos in a row that fail at the servers, without a caption between: the others would fail too
PROBE_S = 5.0  # for the header that is being probed at the end

JobEvents = queue.SimpleQueue[str | PenstockError]
"""What ends the run: "done", "interrupt", or an error of the whole job. Its `put` is safe in signal handlers."""


class AllRefused(PenstockError):
    """The servers answer, but caption nothing."""

    code = "all_refused"


class JobParts(Struct, frozen=True):
    """The parts of a job that tests replace."""

    ask: Callable[..., ServerInfo] = ask
    read_chunks: ReadChunks = read_chunks
    probe: Callable[[str], VideoProbe] = probe
    sender: Callable[[list[ServerInfo], SendOptions, OnResult], ChunkSender] = ChunkSender


class RunSpec(Struct, frozen=True):
    """What a run works on. `digest` identifies the configuration."""

    options: JobOptions
    plan: JobPlan
    servers: list[ServerInfo]
    videos: list[Video]
    folder: WorkFolder
    digest: str


class FrameTotals:
    """An estimate of the number of frames in all videos, from those whose headers were read."""

    def __init__(self, videos: int) -> None:
        self._videos = videos
        self._expected: dict[str, int] = {}
        self._sum = 0

    def set(self, video: Video, frames: int, *, known: bool) -> None:
        """Sets the number of one video; an estimate never replaces an earlier number."""
        if video.name in self._expected and not known:
            return
        self._sum += frames - self._expected.get(video.name, 0)
        self._expected[video.name] = frames

    def frames(self) -> int | None:
        """The estimated sum, with the mean for the other videos; None before the first."""
        seen = len(self._expected)
        return round(self._sum * self._videos / seen) if seen else None


class RunCounters:
    """What the threads of a run count. Changes hold `lock`; a reader may see values from a moment apart."""

    def __init__(self, videos: int) -> None:
        self.lock = threading.Lock()
        self.totals = FrameTotals(videos)
        self.videos = videos
        self.frames = self.new_frames = self.ended = self.failed = 0
        self.left = 0  # videos of this run that have not ended
        self.refused = 0  # videos in a row that failed at the servers


class JobRun:
    """`caption` once; implements `JobListener` for the threads that it starts."""

    def __init__(self, spec: RunSpec, parts: JobParts, events: JobEvents, reporter: ProgressReporter) -> None:
        options, plan = spec.options, spec.plan
        self._parts, self._events, self._reporter = parts, events, reporter
        self._counters = RunCounters(len(spec.videos))
        self._videos = self._remaining(spec)
        self._counters.left = len(self._videos)
        self._writer = CaptionWriter(self)
        self._decoders = DecoderThreads(self._videos, spec.folder.spool, plan, parts.read_chunks, self._writer, self)
        sending = SendOptions(
            mode=options.mode, fingerprint=spec.digest, rows=plan.chunk_size, give_up_s=options.give_up_s
        )
        self._sampling = options.sampling
        self._sender = parts.sender(spec.servers, sending, self._chunk_done)

    def _remaining(self, spec: RunSpec) -> list[Video]:
        """The videos of this run; counts the others."""
        remaining, counters = [], self._counters
        for video in spec.videos:
            state = spool.read_end(spec.folder.spool(video))
            if state is not None and not state.is_of(video):
                self._reporter.note(f"changed since it was captioned, begins anew: {video.name}")
                state = None
            if state is None or (state.failed and spec.options.retry_failed):
                remaining.append(video)
                continue
            counters.frames += state.rows
            counters.ended += 1
            counters.failed += state.failed
            counters.totals.set(video, state.rows, known=True)
        return remaining

    def caption(self) -> JobSummary:
        """Captions until everything is done, interrupted, or cannot continue."""
        start_s = time.monotonic()
        summary = JobSummary()
        if self._videos:
            prober = threading.Thread(target=self._probe, name="penstock-prober", daemon=True)
            self._writer.start()
            self._sender.start()
            self._decoders.start(self._sender)
            prober.start()
            try:
                self._wait(summary, start_s)
            finally:
                self._close(summary)
                prober.join(PROBE_S)
        stats = self._sender.stats()
        summary.seconds = time.monotonic() - start_s
        summary.new_frames = self._counters.new_frames
        summary.retries, summary.sent_bytes = stats.retries, stats.sent_bytes
        return summary

    def _wait(self, summary: JobSummary, start_s: float) -> None:
        rates = RateWindow()
        rates.add(start_s, 0, 0)
        while True:
            try:
                event = self._events.get(timeout=self._reporter.every_s)
            except queue.Empty:
                self._reporter.show(self._progress(rates, start_s))
                continue
            if isinstance(event, PenstockError):
                summary.stopped = event
            elif event == "interrupt":
                summary.interrupted = True
                in_flight = self._sender.stats().in_flight
                self._reporter.note(
                    f"interrupted: waiting for {in_flight} requests in flight; interrupt again to stop at once"
                )
            self._reporter.show(self._progress(rates, start_s))
            return

    def _close(self, summary: JobSummary) -> None:
        """Ends the threads in the order in which frames pass them. An interrupt keeps what is in flight."""
        self._decoders.close()
        self._sender.close(DRAIN_S if summary.interrupted else 0.0)
        self._writer.close()

    def _progress(self, rates: RateWindow, start_s: float) -> Progress:
        stats, counters = self._sender.stats(), self._counters
        now_s = time.monotonic()
        frames_per_s, bytes_per_s = rates.add(now_s, counters.new_frames, stats.sent_bytes)
        total = counters.totals.frames()
        left = max(0, total - counters.frames) if total is not None else None
        return Progress(
            elapsed_s=round(now_s - start_s, 3),
            frames=counters.frames,
            frames_total=total,
            videos=counters.ended,
            videos_total=counters.videos,
            failed=counters.failed,
            frames_per_s=round(frames_per_s, 2),
            bytes_per_s=round(bytes_per_s),
            eta_s=round(left / frames_per_s, 1) if left is not None and frames_per_s > 0 else None,
            in_flight=stats.in_flight,
            retries=stats.retries,
            servers=stats.servers,
        )

    def _probe(self) -> None:
        for video in self._videos:
            if self._decoders.stop.is_set():
                return
            try:
                found = self._parts.probe(video.path)
                frames = estimate(self._sampling, found.frames, found.duration_s)
            except Exception:  # only an estimate: the video's decoder reports the error
                frames = 0
            with self._counters.lock:
                self._counters.totals.set(video, frames, known=False)

    # ---- called in the threads of decoders, sender and writer

    def _chunk_done(self, chunk: Chunk, result: ChunkResult) -> None:
        self._decoders.chunk_done()
        self._writer.chunk_done(chunk, result)

    def resumed(self, video: Video, rows: int) -> None:
        with self._counters.lock:
            self._counters.frames += rows

    def committed(self, video: Video, rows: int) -> None:
        counters = self._counters
        with counters.lock:
            counters.frames += rows
            counters.new_frames += rows
            counters.refused = 0 if rows else counters.refused

    def closed(self, video: Video, end: SpoolEnd) -> None:
        if end.end == "failed":
            _logger.info("video=%s stage=%s frame=%s captions=%d", video.name, end.stage, end.frame, end.rows)
        counters = self._counters
        with counters.lock:
            counters.ended += 1
            counters.failed += end.end == "failed"
            counters.totals.set(video, end.rows, known=True)
            counters.refused += end.stage == "send"
            counters.left -= 1
            if counters.left == 0:
                self._events.put("done")
            elif counters.refused == MAX_REFUSED:
                self.fatal(AllRefused(f"{MAX_REFUSED} videos in a row failed at the servers, the last: {end.error}"))

    def fatal(self, error: PenstockError) -> None:
        if not isinstance(error, NotSent):
            self._decoders.stop.set()  # at once; the waiting thread learns of it a moment later
            self._events.put(error)
