"""The captioning of one run, by four kinds of threads.

Decoders read and send, the sender talks with the servers, the writer commits, a prober counts what is ahead; the
caller's thread waits for what they tell, and shows how far the job is.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable

from penstock.bulk import spool
from penstock.bulk.folder import WorkFolder
from penstock.bulk.options import Options, Plan
from penstock.bulk.parts import Parts
from penstock.bulk.progress import Now, Rates, Server, Teller
from penstock.bulk.reading import Decoders
from penstock.bulk.report import Summary
from penstock.bulk.sampling import estimate
from penstock.bulk.sending import ENDS_THE_JOB, NotSent, SendOptions
from penstock.bulk.servers import ServerInfo
from penstock.bulk.spool import End
from penstock.bulk.types import Chunk, Video
from penstock.bulk.writer import Writer
from penstock.errors import PenstockError

_logger = logging.getLogger("penstock.bulk")

DRAIN_S = 60.0  # for what is in flight when the job is interrupted: longer than a batch of a slow model takes
IN_A_ROW = 10  # videos that fail at the servers and no caption between them: the job would fail all the others, too
PROBE_S = 5.0  # for the header that is being looked at when all is done

Told = queue.SimpleQueue[str | PenstockError]
"""What ends the waiting: "done", "interrupt", or an error of the whole job. Its `put` is safe in signal handlers."""


class AllRefused(PenstockError):
    """The servers answer, but caption nothing."""

    code = "all_refused"


class Totals:
    """About how many frames there are in all, from the videos that were looked at so far."""

    def __init__(self, videos: int) -> None:
        self._videos = videos
        self._expected: dict[str, int] = {}
        self._sum = 0

    def set(self, video: Video, frames: int, *, known: bool) -> None:
        """What one video has. What is known is not guessed again."""
        if video.name in self._expected and not known:
            return
        self._sum += frames - self._expected.get(video.name, 0)
        self._expected[video.name] = frames

    def frames(self) -> int | None:
        """The sum, those that nobody looked at counted as the mean of the others; None before the first."""
        seen = len(self._expected)
        return round(self._sum * self._videos / seen) if seen else None


class Run:
    """The captioning of one run. Counters change under a lock; who shows them may read them a moment apart."""

    def __init__(
        self,
        options: Options,
        parts: Parts,
        *,
        folder: WorkFolder,
        videos: list[Video],
        servers: list[ServerInfo],
        how: Plan,
        mark: str,
        told: Told,
        show: Teller,
    ) -> None:
        self._options, self._parts, self._told, self._show = options, parts, told, show
        self._totals = Totals(len(videos))
        self._frames = self._new = self._videos_done = self._failed = self._refused = 0
        self._videos = len(videos)
        self._lock = threading.Lock()
        self._todo = self._survey(videos, folder)
        self._left = len(self._todo)
        self._writer = Writer(committed=self._committed, closed=self._closed, fatal=self._fatal, stops=_stops)
        self._decoders = Decoders(
            self._todo,
            folder.spool,
            plan=how,
            sampling=options.sampling,
            read_chunks=parts.read_chunks,
            writer=self._writer,
            began=self._began,
            fatal=self._fatal,
            rounds=options.mode == "single",
        )
        sending = SendOptions(mode=options.mode, fingerprint=mark, rows=how.chunk_size, give_up_s=options.give_up_s)
        self._sender = parts.sender(servers, sending, self._answered)

    def _survey(self, videos: Iterable[Video], folder: WorkFolder) -> list[Video]:
        """The videos that this run has to do with; the others are counted."""
        todo = []
        for video in videos:
            found = spool.glance(folder.spool(video))
            if found is not None and not found.is_of(video):
                self._show.say(f"changed since it was captioned, begins anew: {video.name}")
                found = None
            if found is None or found.end is None or (found.end.end == "failed" and self._options.retry_failed):
                todo.append(video)
                continue
            self._frames += found.rows
            self._videos_done += 1
            self._failed += found.end.end == "failed"
            self._totals.set(video, found.rows, known=True)
        return todo

    def caption(self) -> Summary:
        """Everything that is to do, until it is done, interrupted or cannot go on."""
        start_s = self._parts.clock()
        summary = Summary()
        if self._todo:
            prober = threading.Thread(target=self._probe, name="penstock-prober", daemon=True)
            self._writer.start()
            self._sender.start()
            self._decoders.start(self._sender)
            prober.start()
            try:
                self._wait(summary, start_s)
            finally:
                self._end(summary)
                prober.join(PROBE_S)
        stats = self._sender.stats()
        summary.seconds = self._parts.clock() - start_s
        summary.new_frames, summary.retries, summary.sent_bytes = self._new, stats.retries, stats.sent_bytes
        return summary

    def _wait(self, summary: Summary, start_s: float) -> None:
        rates = Rates()
        rates.add(start_s, 0, 0)
        while True:
            try:
                event = self._told.get(timeout=self._show.every_s)
            except queue.Empty:
                self._show.show(self.now(rates, start_s))
                continue
            if isinstance(event, PenstockError):
                summary.stopped = event
            elif event == "interrupt":
                summary.interrupted = True
                in_flight = self._sender.stats().in_flight
                self._show.say(f"interrupted: waiting for {in_flight} requests in flight; once more stops at once")
            self._show.show(self.now(rates, start_s))
            return

    def _end(self, summary: Summary) -> None:
        """What is in flight is kept if the job was interrupted; the threads end in the order of the frames' way."""
        self._decoders.close()
        self._sender.close(DRAIN_S if summary.interrupted else 0.0)
        self._writer.close()

    def now(self, rates: Rates, start_s: float) -> Now:
        """How far it is."""
        stats = self._sender.stats()
        now_s = self._parts.clock()
        frames_per_s, bytes_per_s = rates.add(now_s, self._new, stats.sent_bytes)
        total = self._totals.frames()
        left = max(0, total - self._frames) if total is not None else None
        return Now(
            elapsed_s=round(now_s - start_s, 3),
            frames=self._frames,
            frames_total=total,
            videos=self._videos_done,
            videos_total=self._videos,
            failed=self._failed,
            frames_per_s=round(frames_per_s, 2),
            bytes_per_s=round(bytes_per_s),
            eta_s=round(left / frames_per_s, 1) if left is not None and frames_per_s > 0 else None,
            in_flight=stats.in_flight,
            retries=stats.retries,
            servers=tuple(Server(s.url, s.state, s.in_flight, s.window, s.answered) for s in stats.servers),
        )

    def _probe(self) -> None:
        for video in self._todo:
            if self._decoders.stop.is_set():
                return
            try:
                found = self._parts.probe(video.path)
                frames = estimate(self._options.sampling, found.frames, found.duration_s)
            except Exception:  # its decoder will tell why; this is only an estimate
                frames = 0
            with self._lock:
                self._totals.set(video, frames, known=False)

    # ---- called in the threads of decoders, sender and writer

    def _began(self, video: Video, rows: int) -> None:
        with self._lock:
            self._frames += rows

    def _answered(self, chunk: Chunk, answer: list[str] | PenstockError) -> None:
        self._decoders.answered(chunk, answer)
        self._writer.answered(chunk, answer)

    def _committed(self, video: Video, rows: int) -> None:
        with self._lock:
            self._frames += rows
            self._new += rows
            self._refused = 0 if rows else self._refused

    def _closed(self, video: Video, end: End) -> None:
        if end.end == "failed":
            _logger.info("video=%s stage=%s frame=%s captions=%d", video.name, end.stage, end.frame, end.rows)
        with self._lock:
            self._videos_done += 1
            self._failed += end.end == "failed"
            self._totals.set(video, end.rows, known=True)
            self._refused += end.stage == "send"
            self._left -= 1
            if self._left == 0:
                self._told.put("done")
            elif self._refused == IN_A_ROW:
                self._fatal(AllRefused(f"{IN_A_ROW} videos in a row failed at the servers, the last: {end.error}"))

    def _fatal(self, error: PenstockError) -> None:
        if not isinstance(error, NotSent):
            self._decoders.stop.set()  # at once: who waits hears of it a moment later
            self._told.put(error)


def _stops(error: PenstockError) -> bool:
    """Whether every other chunk would meet the same, or the job ends anyway: the video is not to blame."""
    return isinstance(error, (*ENDS_THE_JOB, NotSent))
