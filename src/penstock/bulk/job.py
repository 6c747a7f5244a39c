"""One bulk job: videos become captions on disk, continuing where an earlier run ended.

In a run, decoder threads read and send, the sender talks to the servers, and the writer commits. A prober counts the
frames ahead, and the caller's thread waits for the end and reports progress.
"""

import functools
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.bulk import outputs, shards, spool
from penstock.bulk.decode import estimate, read_chunks
from penstock.bulk.endpoints import NotSent
from penstock.bulk.engine import HANG_S, Engine
from penstock.bulk.frames import torchcodec_decoder
from penstock.bulk.options import JobOptions, JobPlan, make_plan
from penstock.bulk.pixels import JPEG_SHARE, SceneStarts, exact_kernel, jpeg_encoder, within
from penstock.bulk.progress import JobSummary, Progress, ProgressReporter, RateWindow, duration, make_reporter
from penstock.bulk.sender import ChunkSender
from penstock.bulk.servers import NOT_UP, ServerInfo, ask, require_same
from penstock.bulk.spool import SpoolEnd, WorkFolder, fingerprint, fingerprint_digest
from penstock.bulk.threads import CaptionWriter, DecoderThreads, ReadChunks
from penstock.bulk.types import Chunk, ChunkResult, SendOptions, Video
from penstock.bulk.video import VideoError, VideoProbe, av_library, expand, is_image, probe, valid_text
from penstock.client.endpoint import parse_url, tls_context
from penstock.errors import ConfigError, PenstockError
from penstock.runs import WRITE_EVERY_S, Run

_logger = logging.getLogger("penstock.bulk")

LINK_BYTES_PER_S = 118e6  # of payload on a link of 1 Gbit/s
DRAIN_S = 60.0  # for requests in flight at an interrupt: longer than a batch of a slow model takes
MAX_REFUSED = 10  # videos in a row that fail at the servers, without a caption between: the others would fail too
MAX_ERRORS = 100  # rows in a row with an error: it is the request that is wrong, or the model that cannot answer it
PROBE_S = 5.0  # for the header that is being probed at the end


class AllRefused(PenstockError, code="all_refused"):
    """The servers answer, but caption nothing."""


class JobParts(Struct, frozen=True):
    """The parts of a job that tests replace."""

    ask: Callable[..., ServerInfo] = ask
    read_chunks: ReadChunks = read_chunks
    probe: Callable[[str, int | None], VideoProbe] = probe
    sender: Callable[..., ChunkSender] = ChunkSender


class BulkJob:
    """`run` once, in the main thread; `interrupt` from a signal handler or another thread.

    `events` end the run: "done", "interrupt", or an error of the whole job. Its `put` is safe in signal handlers.
    """

    def __init__(self, options: JobOptions, reporter: ProgressReporter, parts: JobParts | None = None) -> None:
        self.options = options
        self.parts = parts or JobParts()
        self.running = False  # whether an interrupt has anything in flight to wait for
        self.reporter = reporter
        self.engine: Engine | None = None
        self.events: queue.SimpleQueue[str | PenstockError] = queue.SimpleQueue()

    def interrupt(self) -> None:
        """Starts nothing new, keeps what is in flight, and ends the job."""
        self.events.put("interrupt")

    def run(self) -> JobSummary:
        """Raises errors found before anything was captioned; later errors are in the summary."""
        outputs.check_outputs(self.options.outputs, self.options.failures)
        videos = self.videos() if self.options.inputs else None
        with ExitStack() as opened:
            folder = opened.enter_context(closing(WorkFolder(self.options.work)))
            if videos is not None and self.options.shard is not None:
                videos = shards.take(folder, videos, self.options.shard)
            if self.options.engine is not None:
                hang_s = min(HANG_S, self.options.request_timeout_s)
                self.engine = Engine(self.options.engine, folder.path / "engine.log", self.events.put, hang_s=hang_s)
                opened.enter_context(closing(self.engine)).start()
            return self._run(folder, folder.videos() if videos is None else videos)

    def merge(self) -> JobSummary:
        """Writes the outputs of all shards together. Raises OutputError, FolderError."""
        outputs.check_outputs(self.options.outputs, self.options.failures)
        with ExitStack() as opened:
            spools = shards.joined(self.options.outputs.files[0], opened)
            folder = opened.enter_context(closing(WorkFolder(self.options.work)))
            files = self.options.outputs.written([video for video, _ in spools])
            folder.own([*files, self.options.failures], now=False)
            summary = JobSummary()
            self._finish(folder, spools, summary)
            return summary

    def _run(self, folder: WorkFolder, videos: list[Video]) -> JobSummary:
        options = self.options
        if not options.servers and folder.fingerprint() is None:
            raise ConfigError(f"no --server is given, and {folder.path} has no captions to write outputs from")
        folder.own([*options.outputs.written(videos), options.failures], now=False)
        servers = self.servers()
        summary = JobSummary()
        if servers:
            plan = make_plan(options, servers, max(1, len(videos)))
            check_libraries(plan)
            configuration = fingerprint(servers[0].parameters, options.sampling, plan.pixels)
            folder.require(configuration, restart=options.restart)
            folder.save_videos(videos)
            run = JobRun(self, plan, servers, videos, folder, fingerprint_digest(configuration))
            self.running = True
            summary = run.caption()
            self.running = False
        self._finish(folder, [(video, folder.spool(video)) for video in videos], summary)
        return summary

    def videos(self) -> list[Video]:
        """The videos of the inputs. Raises InputError, ConfigError."""
        options = self.options
        videos, notes = expand(
            options.inputs,
            stdin=sys.stdin.buffer,
            from0=options.from0,
            extensions=options.extensions,
            allowed_urls=options.allowed_urls,
        )
        if notes.skipped:
            kind = "images" if videos and all(is_image(video.path) for video in videos) else "videos"
            self.reporter.note(f"skipped {notes.skipped:,} files that are not {kind}")
        for name in notes.duplicates[:5]:
            self.reporter.note(f"named twice, captioned once: {name}")
        if not videos:
            raise ConfigError(f"there is no video and no image in {', '.join(map(valid_text, options.inputs))}")
        return videos

    def servers(self) -> list[ServerInfo]:
        """The descriptions of the servers. Raises as `servers.ask` does, and ServersDiffer.

        A server that is not up is assumed to be like the others: the sender checks it before it gets a chunk.
        """
        options = self.options
        found: list[ServerInfo] = []
        absent: dict[str, PenstockError] = {}
        for url in dict.fromkeys(options.servers):
            try:
                found.append(self._ask(url))
            except NOT_UP as e:
                absent[url] = e
        if absent and not found:
            raise next(iter(absent.values()))
        for url, error in absent.items():
            self.reporter.note(f"continues without a server until it is up: {error.message}")
            found.append(
                msgspec.structs.replace(
                    found[0], address=parse_url(url, tls_context(options.ca) if options.ca else None)
                )
            )
        if found:
            require_same(found)
        return found

    def _ask(self, url: str) -> ServerInfo:
        """The description of one server. Waits for it if it is not up."""
        options = self.options
        check = self.engine.check if self.engine is not None else lambda: None
        ask = functools.partial(
            self.parts.ask, url, options.model, token=options.token, ca=options.ca, backend=options.backend, check=check
        )
        try:
            return ask()
        except NOT_UP as e:
            if not options.wait_s:
                raise
            self.reporter.note(f"{e.message}; waiting for it, at most {options.wait_s:g} s")
        return ask(patience_s=options.wait_s)

    def _finish(self, folder: WorkFolder, spools: list[tuple[Video, Path]], summary: JobSummary) -> None:
        """Completes the summary, and writes outputs if every video has ended or nothing else was requested."""
        summary.price = self.options.price
        try:
            for video, file in spools:
                summary.videos += 1
                state = spool.read_end(file) or spool.scan(file)
                if state is None or not state.is_of(video):
                    continue
                summary.frames += state.rows
                summary.seen += max(state.rows, state.end.seen if state.end else 0)
                summary.similar += state.similar
                summary.complete += state.end is not None and not state.failed
                summary.failed += state.failed
                summary.partial += state.failed and state.rows > 0
                summary.damaged += state.end is not None and not state.failed and bool(state.gaps)
                summary.errors += state.tally.errors
                summary.tokens = tuple(map(sum, zip(summary.tokens, state.tally.tokens, strict=True)))
            if outputs.write_failures(self.options.failures, spools, folder):
                summary.failures = str(self.options.failures)
            if summary.unfinished == 0 or not self.options.servers:
                folder.own(self.options.outputs.written([video for video, _ in spools]))
                outputs.write_outputs(self.options.outputs, spools, spool.request_of(spools))
                summary.outputs = tuple(str(path) for path in self.options.outputs.all())
        except PenstockError as e:
            summary.stopped = summary.stopped or e


class RunCounters:
    """Counters of the threads of a run. Changes hold `lock`; a reader may see values from a moment apart."""

    def __init__(self, videos: int) -> None:
        self.lock = threading.Lock()
        self.videos = videos
        self.frames = self.new_frames = self.ended = self.failed = 0
        self.left = 0  # videos of this run that have not ended
        self.refused = 0  # videos in a row that failed at the servers
        self.errors = 0  # rows in a row with an error
        self._expected: dict[str, int] = {}  # frames of each video whose header was read
        self._expected_sum = 0

    def expect(self, video: Video, frames: int, *, known: bool) -> None:
        """Sets the number of frames of one video; an estimate never replaces an earlier number."""
        if video.name in self._expected and not known:
            return
        self._expected_sum += frames - self._expected.get(video.name, 0)
        self._expected[video.name] = frames

    def expected_frames(self) -> int | None:
        """An estimate for all videos, with the mean for those not read yet; None before the first."""
        read = len(self._expected)
        return round(self._expected_sum * self.videos / read) if read else None


class JobRun:
    """`caption` once; implements `JobListener` for the threads that it starts."""

    def __init__(
        self,
        job: BulkJob,
        plan: JobPlan,
        servers: list[ServerInfo],
        videos: list[Video],
        folder: WorkFolder,
        digest: str,
    ) -> None:
        """`digest` identifies the configuration."""
        parts, self._options = job.parts, job.options
        self._events, self._reporter, self._probe_header = job.events, job.reporter, parts.probe
        self._counters, self._by_clip = RunCounters(len(videos)), plan.by_clip
        self._videos = self._remaining(videos, folder)
        self._counters.left = len(self._videos)
        self._writer = CaptionWriter(self, carry=self._options.sampling.carry)
        self._decoders = DecoderThreads(
            self._videos, folder.spool, plan, parts.read_chunks, self._writer, self, retry=job.options.retry_failed
        )
        options = job.options
        sending = SendOptions(
            mode=options.mode, fingerprint=digest, rows=plan.chunk_size, give_up_s=options.give_up_s,
            request_timeout_s=options.request_timeout_s, rpm=options.rpm, tpm=options.tpm,
        )  # fmt: skip
        watch = {} if job.engine is None else {"on_hang": job.engine.restart}
        self._sender = parts.sender(servers, sending, self._chunk_done, **watch)

    def _remaining(self, videos: list[Video], folder: WorkFolder) -> list[Video]:
        """The videos of this run; counts the others."""
        remaining, counters = [], self._counters
        for video in videos:
            state = spool.read_end(folder.spool(video))
            if state is not None and not state.is_of(video):
                self._reporter.note(f"changed since it was captioned, begins anew: {video.name}")
                state = None
            if state is None or ((state.failed or state.tally.errors) and self._options.retry_failed):
                remaining.append(video)
                continue
            counters.frames += state.rows
            counters.ended += 1
            counters.failed += state.failed
            counters.expect(video, state.rows, known=True)
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
                # a shard has no output of its own
                with Run("caption", str(next(iter(self._options.outputs.files), self._options.work))) as run:
                    self._wait(summary, start_s, run)
            finally:  # in the order in which frames pass the threads; an interrupt keeps what is in flight
                self._decoders.close()
                self._sender.close(DRAIN_S if summary.interrupted else 0.0)
                self._writer.close()
                prober.join(PROBE_S)
        stats = self._sender.stats()
        summary.seconds = time.monotonic() - start_s
        summary.new_frames = self._counters.new_frames
        summary.retries, summary.sent_bytes = stats.retries, stats.sent_bytes
        return summary

    def _wait(self, summary: JobSummary, start_s: float, run: Run) -> None:
        rates = RateWindow()
        rates.add(start_s, 0, 0)
        every_s = self._reporter.every_s
        shown_s = time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=min(every_s, WRITE_EVERY_S))
            except queue.Empty:
                progress = self._progress(rates, start_s)
                run.write(progress.frames, progress.frames_total, progress.line())
                if time.monotonic() >= shown_s + every_s - WRITE_EVERY_S / 2:
                    shown_s = time.monotonic()
                    self._reporter.show(progress)
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

    def _progress(self, rates: RateWindow, start_s: float) -> Progress:
        stats, counters = self._sender.stats(), self._counters
        now_s = time.monotonic()
        frames_per_s, bytes_per_s = rates.add(now_s, counters.new_frames, stats.sent_bytes)
        total = counters.expected_frames()
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
                found = self._probe_header(video.path, self._options.sampling.stream)
                frames = estimate(self._options.sampling, found, by_clip=self._by_clip)
            except Exception:  # only an estimate: the video's decoder reports the error
                frames = 0
            with self._counters.lock:
                self._counters.expect(video, frames, known=False)

    # ---- called in the threads of decoders, sender and writer

    def _chunk_done(self, chunk: Chunk, result: ChunkResult) -> None:
        self._decoders.chunk_done()
        self._writer.chunk_done(chunk, result)

    def resumed(self, video: Video, rows: int) -> None:
        with self._counters.lock:
            self._counters.frames += rows

    def committed(self, video: Video, rows: int, errors: list[str]) -> None:
        counters = self._counters
        with counters.lock:
            counters.frames += rows
            counters.new_frames += rows
            counters.refused = 0 if rows else counters.refused
            before = counters.errors
            counters.errors = before + rows if rows == len(errors) else 0
            if before < MAX_ERRORS <= counters.errors:
                self.fatal(AllRefused(f"{counters.errors} rows in a row have an error, the last: {errors[-1]}"))

    def closed(self, video: Video, end: SpoolEnd) -> None:
        if end.end == "failed":
            _logger.info("video=%s stage=%s frame=%s captions=%d", video.name, end.stage, end.frame, end.rows)
        counters = self._counters
        with counters.lock:
            counters.ended += 1
            counters.failed += end.end == "failed"
            counters.expect(video, end.rows, known=True)
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


def check_libraries(plan: JobPlan) -> None:
    """Raises ConfigError if a library that the job needs is missing."""
    av_library()
    if plan.pixels.decoder == "torchcodec":
        torchcodec_decoder()
    if plan.sampling.scene is not None:
        SceneStarts(plan.sampling.scene)
    if plan.pixels.mode == "jpeg":
        jpeg_encoder()
    if plan.pixels.kernel == "exact" and plan.pixels.mode != "source":
        exact_kernel()


def dry_run(options: JobOptions, parts: JobParts | None = None) -> list[str]:
    """What the job would do, for people: a line for each file, then the sums. Sends no frame.

    Raises as `BulkJob.run` does before it captions.
    """
    job = BulkJob(options, make_reporter("plain"), parts)
    videos = job.videos()
    servers = job.servers()
    plan = make_plan(options, servers, len(videos))
    check_libraries(plan)
    lines, frames, wire_bytes, broken = [], 0, 0, 0
    for video in videos:
        try:
            found = job.parts.probe(video.path, options.sampling.stream)
        except VideoError as e:
            broken += 1
            lines.append(f"{video.name}: {e.message}")
            continue
        count = estimate(options.sampling, found)
        frames += count
        frame_bytes = plan.frame_bytes or math.prod(within(plan.pixels.max_pixels, found.height, found.width)) * 3
        wire_bytes += count * (frame_bytes // JPEG_SHARE if options.pixels == "jpeg" else frame_bytes)
        lines.append(
            f"{video.name}: about {count:,} of {found.frames:,} frames, {found.width}x{found.height} {found.codec}, "
            f"{duration(found.duration_s)}, {video.bytes:,} bytes"
        )
    first = servers[0]
    pixels = plan.pixels
    size = "their own size" if pixels.height is None else f"{pixels.width}x{pixels.height}"
    size += "" if pixels.max_pixels is None else f", at most {pixels.max_pixels:,} pixels"
    return [
        *lines,
        f"{len(videos):,} videos, {broken:,} of them cannot be opened, {sum(v.bytes for v in videos):,} bytes on disk",
        f"about {frames:,} frames to caption, as {plan.pixels.mode} of {size}, {plan.chunk_size} a request",
        f"about {wire_bytes:,} bytes on the wire: {duration(wire_bytes / LINK_BYTES_PER_S)} at 1 Gbit/s",
        f"model {first.parameters.get('model') or first.model}, revision {first.revision}, "
        f"{sum(s.instances for s in servers)} instances on {len(servers)} servers",
    ]
