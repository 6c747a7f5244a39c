"""One bulk job: videos become captions on disk, continuing where an earlier run ended."""

from __future__ import annotations

import queue
import ssl
import sys

import msgspec

from penstock.bulk import outputs, pixels, spool
from penstock.bulk.decode import estimate
from penstock.bulk.folder import WorkFolder, fingerprint, fingerprint_digest
from penstock.bulk.inputs import expand, valid_text
from penstock.bulk.options import JPEG_SHARE, JobOptions, JobPlan, make_plan
from penstock.bulk.progress import JobSummary, ProgressReporter, duration, make_reporter
from penstock.bulk.run import JobEvents, JobParts, JobRun, RunSpec
from penstock.bulk.servers import ServerInfo, require_same
from penstock.bulk.types import Video
from penstock.bulk.video import VideoError, av_library
from penstock.client.endpoint import ConnectionLost, Unreachable, parse_url, tls_context
from penstock.errors import ConfigError, DeadlineExceeded, ModelNotReady, PenstockError

NOT_UP = (Unreachable, ConnectionLost, DeadlineExceeded, ModelNotReady)  # a later run may find the server
LINK_BYTES_PER_S = 118e6  # of payload on a link of 1 Gbit/s


class BulkJob:
    """`run` once, in the main thread; `interrupt` from a signal handler or another thread."""

    def __init__(self, options: JobOptions, reporter: ProgressReporter, parts: JobParts | None = None) -> None:
        self.options = options
        self.parts = parts or JobParts()
        self.running = False  # whether an interrupt has anything in flight to wait for
        self._reporter = reporter
        self._events: JobEvents = queue.SimpleQueue()

    def interrupt(self) -> None:
        """Starts nothing new, keeps what is in flight, and ends the job."""
        self._events.put("interrupt")

    def run(self) -> JobSummary:
        """Raises errors found before anything was captioned; later errors are in the summary."""
        outputs.check_outputs(self.options.outputs, self.options.failures)
        videos = self.videos() if self.options.inputs else None
        folder = WorkFolder(self.options.work)
        try:
            return self._run(folder, folder.videos() if videos is None else videos)
        finally:
            folder.close()

    def _run(self, folder: WorkFolder, videos: list[Video]) -> JobSummary:
        options = self.options
        servers = self.servers()
        summary = JobSummary()
        if servers:
            plan = make_plan(options, servers, len(videos))
            check_libraries(plan)
            configuration = fingerprint(servers[0].parameters, options.sampling, plan.pixels)
            folder.require(configuration, restart=options.restart)
            folder.save_videos(videos)
            spec = RunSpec(options, plan, servers, videos, folder, fingerprint_digest(configuration))
            run = JobRun(spec, self.parts, self._events, self._reporter)
            self.running = True
            summary = run.caption()
            self.running = False
        elif folder.fingerprint() is None:
            raise ConfigError(f"no --server is given, and {folder.path} has no captions to write outputs from")
        self._finish(folder, videos, summary)
        return summary

    def videos(self) -> list[Video]:
        """The videos of the inputs. Raises InputError, ConfigError."""
        videos, notes = expand(self.options.inputs, stdin=sys.stdin.buffer, from0=self.options.from0)
        if notes.skipped:
            self._reporter.note(f"skipped {notes.skipped:,} files that are not videos")
        for name in notes.duplicates[:5]:
            self._reporter.note(f"named twice, captioned once: {name}")
        if not videos:
            raise ConfigError(f"there is no video in {', '.join(map(valid_text, self.options.inputs))}")
        return videos

    def servers(self) -> list[ServerInfo]:
        """The descriptions of the servers. Raises as `servers.ask` does, and ServersDiffer.

        A server that is not up is assumed to be like the others: the sender checks it before it gets a chunk.
        """
        options = self.options
        tls = tls_context(options.ca) if options.ca is not None else None
        found: list[ServerInfo] = []
        absent: dict[str, PenstockError] = {}
        for url in dict.fromkeys(options.servers):
            try:
                found.append(self._ask(url, tls))
            except NOT_UP as e:
                absent[url] = e
        if absent and not found:
            raise next(iter(absent.values()))
        for url, error in absent.items():
            self._reporter.note(f"continues without a server until it is up: {error.message}")
            found.append(msgspec.structs.replace(found[0], address=parse_url(url, tls)))
        if found:
            require_same(found)
        return found

    def _ask(self, url: str, tls: ssl.SSLContext | None) -> ServerInfo:
        """The description of one server. Waits for it if it is not up."""
        options, ask = self.options, self.parts.ask
        try:
            return ask(url, options.model, token=options.token, tls=tls)
        except NOT_UP as e:
            if not options.wait_s:
                raise
            self._reporter.note(f"{e.message}; waiting for it, at most {options.wait_s:g} s")
        return ask(url, options.model, token=options.token, tls=tls, patience_s=options.wait_s)

    def _finish(self, folder: WorkFolder, videos: list[Video], summary: JobSummary) -> None:
        """Completes the summary, and writes outputs if every video has ended or nothing else was requested."""
        spools = [(video, folder.spool(video)) for video in videos]
        try:
            for video, file in spools:
                summary.videos += 1
                state = spool.read_end(file) or spool.scan(file)
                if state is None or not state.is_of(video):
                    continue
                summary.frames += state.rows
                summary.complete += state.end is not None and not state.failed
                summary.failed += state.failed
                summary.partial += state.failed and state.rows > 0
            if outputs.write_failures(self.options.failures, spools):
                summary.failures = str(self.options.failures)
            if summary.unfinished == 0 or not self.options.servers:
                outputs.write_outputs(self.options.outputs, spools)
                summary.outputs = tuple(str(path) for path in self.options.outputs.all())
        except PenstockError as e:
            summary.stopped = summary.stopped or e


def check_libraries(plan: JobPlan) -> None:
    """Raises ConfigError if a library that the job needs is missing."""
    av_library()
    if plan.pixels.mode == "jpeg":
        pixels.jpeg_encoder()
    if plan.pixels.kernel == "exact" and plan.pixels.mode != "source":
        pixels.exact_kernel()


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
            found = job.parts.probe(video.path)
        except VideoError as e:
            broken += 1
            lines.append(f"{video.name}: {e.message}")
            continue
        count = estimate(options.sampling, found.frames, found.duration_s)
        frames += count
        frame_bytes = plan.frame_bytes or found.width * found.height * 3
        wire_bytes += count * (frame_bytes // JPEG_SHARE if options.pixels == "jpeg" else frame_bytes)
        lines.append(
            f"{video.name}: about {count:,} of {found.frames:,} frames, {found.width}x{found.height} {found.codec}, "
            f"{duration(found.duration_s)}, {video.bytes:,} bytes"
        )
    first = servers[0]
    size = "their own size" if plan.pixels.height is None else f"{plan.pixels.width}x{plan.pixels.height}"
    return [
        *lines,
        f"{len(videos):,} videos, {broken:,} of them cannot be opened, {sum(v.bytes for v in videos):,} bytes on disk",
        f"about {frames:,} frames to caption, as {plan.pixels.mode} of {size}, {plan.chunk_size} a request",
        f"about {wire_bytes:,} bytes on the wire: {duration(wire_bytes / LINK_BYTES_PER_S)} at 1 Gbit/s",
        f"model {first.parameters.get('model') or first.model}, revision {first.revision}, "
        f"{sum(s.instances for s in servers)} instances on {len(servers)} servers",
    ]
