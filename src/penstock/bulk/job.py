"""One bulk job: videos -> captions on disk, resumed where an earlier run of it ended.

Threads: decoders read and send, the sender talks with the servers, the writer commits, a prober counts what is ahead;
the caller's thread waits for what they tell, and shows how far the job is.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
from msgspec import Struct

from penstock.bulk import outputs, pixels, report, spool
from penstock.bulk.decode import read_chunks
from penstock.bulk.fingerprint import fingerprint, short
from penstock.bulk.folder import WorkFolder
from penstock.bulk.inputs import expand, valid_text
from penstock.bulk.options import Options, Plan, plan
from penstock.bulk.progress import Now, Rates, Server, Teller
from penstock.bulk.reading import Decoders, ReadChunks
from penstock.bulk.report import Summary
from penstock.bulk.sampling import estimate
from penstock.bulk.send import Sender
from penstock.bulk.sending import ENDS_THE_JOB, NotSent, SendOptions, SendStats
from penstock.bulk.servers import ServerInfo, agree, ask
from penstock.bulk.spool import End
from penstock.bulk.types import Answered, Chunk, Sending, Video
from penstock.bulk.video import Probe, library, probe
from penstock.bulk.writer import Writer
from penstock.client.endpoint import parse_url, tls_context
from penstock.client.errors import ConnectionLost, Unreachable
from penstock.errors import ConfigError, DeadlineExceeded, ModelNotReady, PenstockError

_logger = logging.getLogger("penstock.bulk")

NOT_THERE = (Unreachable, ConnectionLost, DeadlineExceeded, ModelNotReady)  # a later run may find the server
DRAIN_S = 60.0  # for what is in flight when the job is interrupted: longer than a batch of a slow model takes


class SenderLike(Sending, Protocol):
    """`send.Sender`, or what stands for it."""

    def start(self) -> None: ...

    def close(self, drain_s: float) -> None: ...

    def stats(self) -> SendStats: ...


class Parts(Struct, frozen=True):
    """What a job is made of; tests put their own in place of some."""

    ask: Callable[..., ServerInfo] = ask
    read_chunks: ReadChunks = read_chunks
    probe: Callable[[str], Probe] = probe
    sender: Callable[[list[ServerInfo], SendOptions, Answered], SenderLike] = Sender
    clock: Callable[[], float] = time.monotonic


class Job:
    """`run` once, in the main thread; `interrupt` from a signal handler or another thread."""

    def __init__(self, options: Options, teller: Teller, parts: Parts | None = None) -> None:
        self.options = options
        self.parts = parts or Parts()
        self.running = False  # else nothing is in flight that an interrupt could wait for
        self._teller = teller
        self._told: queue.SimpleQueue[str | PenstockError] = queue.SimpleQueue()  # its put is safe in signal handlers

    def interrupt(self) -> None:
        """The job takes nothing new, keeps what is in flight, and ends."""
        self._told.put("interrupt")

    def run(self) -> Summary:
        """Raises what is wrong before anything was captioned; later errors are in the summary."""
        outputs.check(self.options.wanted)
        videos = self.videos() if self.options.inputs else None
        folder = WorkFolder(self.options.work)
        try:
            return self._run(folder, folder.videos() if videos is None else videos)
        finally:
            folder.close()

    def _run(self, folder: WorkFolder, videos: list[Video]) -> Summary:
        options = self.options
        servers = self.servers()
        run: _Run | None = None
        if servers:
            how = plan(options, servers, len(videos))
            check_libraries(how)
            print_of = fingerprint(servers[0].parameters, options.sampling, how.pixels)
            folder.agree(print_of, restart=options.restart)
            folder.keep(videos)
            run = _Run(self, folder, videos, servers, how, short(print_of))
        elif folder.fingerprint() is None:
            raise ConfigError(f"no --server is given, and {folder.path} has no captions to write outputs from")
        self.running = True
        summary = run.caption(self._told, self._teller) if run is not None else Summary()
        self.running = False
        self._finish(folder, videos, summary)
        return summary

    def videos(self) -> list[Video]:
        """Those that are named. Raises InputError, ConfigError."""
        videos, notes = expand(self.options.inputs, stdin=sys.stdin.buffer, from0=self.options.from0)
        if notes.skipped:
            self._teller.say(f"{notes.skipped:,} files that are no videos were skipped")
        for name in notes.duplicates[:5]:
            self._teller.say(f"named twice, captioned once: {name}")
        if not videos:
            raise ConfigError(f"there is no video in {', '.join(map(valid_text, self.options.inputs))}")
        return videos

    def servers(self) -> list[ServerInfo]:
        """What the servers say of themselves, which must agree. Raises what `servers.ask` does, ServersDiffer.

        One that is not there is taken to be as the others are: the sender asks it before it gets a chunk again.
        """
        options, ask = self.options, self.parts.ask
        tls = tls_context(options.ca) if options.ca is not None else None
        found: list[ServerInfo] = []
        absent: dict[str, PenstockError] = {}
        for url in dict.fromkeys(options.servers):
            try:
                found.append(ask(url, options.model, token=options.token, tls=tls, patience_s=options.wait_s))
            except NOT_THERE as e:
                absent[url] = e
        if absent and not found:
            raise next(iter(absent.values()))
        for url, error in absent.items():
            self._teller.say(f"goes on without a server until it is there: {error.message}")
            found.append(msgspec.structs.replace(found[0], endpoint=parse_url(url, tls)))
        if found:
            agree(found)
        return found

    def _finish(self, folder: WorkFolder, videos: list[Video], summary: Summary) -> None:
        """Sums up, and writes outputs if every video has ended, or if that is all that was asked."""
        spools = [(video, folder.spool(video)) for video in videos]
        try:
            report.count(summary, spools)
            if report.write_failures(self.options.failures, spools):
                summary.failures = str(self.options.failures)
            if summary.unfinished == 0 or not self.options.servers:
                outputs.write(self.options.wanted, spools)
                summary.outputs = tuple(str(path) for path in self.options.wanted.paths())
        except PenstockError as e:
            summary.stopped = summary.stopped or e


def check_libraries(how: Plan) -> None:
    """Raises ConfigError if a library is missing that the job needs."""
    library()
    if how.pixels.mode == "jpeg":
        pixels.jpeg_encoder()
    if how.pixels.kernel == "exact" and how.pixels.mode != "source":
        pixels.exact_kernel()


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


class _Run:
    """The captioning of one run. Counters are written by one thread each, and read by the caller's."""

    def __init__(
        self, job: Job, folder: WorkFolder, videos: list[Video], servers: list[ServerInfo], how: Plan, print_of: str
    ) -> None:
        options, parts = job.options, job.parts
        self._parts, self._options = parts, options
        self._totals = Totals(len(videos))
        self._frames = self._new = self._videos_done = self._failed = 0
        self._videos = len(videos)
        self._lock = threading.Lock()
        self._todo = self._survey(videos, folder, job._teller)
        self._left = len(self._todo)
        self._told = job._told
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
        sending = SendOptions(mode=options.mode, fingerprint=print_of, rows=how.chunk_size, give_up_s=options.give_up_s)
        self._sender = parts.sender(servers, sending, self._answered)

    def _survey(self, videos: Iterable[Video], folder: WorkFolder, teller: Teller) -> list[Video]:
        """The videos that this run has to do with; the others are counted."""
        todo = []
        for video in videos:
            found = spool.glance(folder.spool(video))
            if found is not None and not found.is_of(video):
                teller.say(f"changed since it was captioned, begins anew: {video.name}")
                found = None
            if found is None or found.end is None or (found.end.end == "failed" and self._options.retry_failed):
                todo.append(video)
                continue
            self._frames += found.rows
            self._videos_done += 1
            self._failed += found.end.end == "failed"
            self._totals.set(video, found.rows, known=True)
        return todo

    def caption(self, told: queue.SimpleQueue[str | PenstockError], teller: Teller) -> Summary:
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
                self._wait(told, teller, summary, start_s)
            finally:
                self._end(summary)
        stats = self._sender.stats()
        summary.seconds = self._parts.clock() - start_s
        summary.new_frames, summary.retries, summary.sent_bytes = self._new, stats.retries, stats.sent_bytes
        return summary

    def _wait(
        self, told: queue.SimpleQueue[str | PenstockError], teller: Teller, summary: Summary, start_s: float
    ) -> None:
        rates = Rates()
        rates.add(start_s, 0, 0)
        while True:
            try:
                event = told.get(timeout=teller.every_s)
            except queue.Empty:
                teller.show(self.now(rates, start_s))
                continue
            if isinstance(event, PenstockError):
                summary.stopped = event
            elif event == "interrupt":
                summary.interrupted = True
                in_flight = self._sender.stats().in_flight
                teller.say(f"interrupted: waiting for {in_flight} requests in flight; once more stops at once")
            teller.show(self.now(rates, start_s))
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

    def _closed(self, video: Video, end: End) -> None:
        if end.end == "failed":
            _logger.info("video=%s stage=%s frame=%s captions=%d", video.name, end.stage, end.frame, end.rows)
        with self._lock:
            self._videos_done += 1
            self._failed += end.end == "failed"
            self._totals.set(video, end.rows, known=True)
            self._left -= 1
            if self._left == 0:
                self._told.put("done")

    def _fatal(self, error: PenstockError) -> None:
        if not isinstance(error, NotSent):
            self._told.put(error)


def _stops(error: PenstockError) -> bool:
    """Whether every other chunk would meet the same, or the job ends anyway: the video is not to blame."""
    return isinstance(error, (*ENDS_THE_JOB, NotSent))
