"""One bulk job: videos -> captions on disk, resumed where an earlier run of it ended."""

from __future__ import annotations

import queue
import ssl
import sys

import msgspec

from penstock.bulk import outputs, pixels, report
from penstock.bulk.fingerprint import fingerprint, short
from penstock.bulk.folder import WorkFolder
from penstock.bulk.inputs import expand, valid_text
from penstock.bulk.options import Options, Plan, plan
from penstock.bulk.parts import Parts
from penstock.bulk.progress import Teller
from penstock.bulk.report import Summary
from penstock.bulk.run import Run, Told
from penstock.bulk.servers import ServerInfo, agree
from penstock.bulk.types import Video
from penstock.bulk.video import library
from penstock.client.endpoint import parse_url, tls_context
from penstock.client.errors import ConnectionLost, Unreachable
from penstock.errors import ConfigError, DeadlineExceeded, ModelNotReady, PenstockError

NOT_THERE = (Unreachable, ConnectionLost, DeadlineExceeded, ModelNotReady)  # a later run may find the server


class Job:
    """`run` once, in the main thread; `interrupt` from a signal handler or another thread."""

    def __init__(self, options: Options, teller: Teller, parts: Parts | None = None) -> None:
        self.options = options
        self.parts = parts or Parts()
        self.running = False  # else nothing is in flight that an interrupt could wait for
        self._teller = teller
        self._told: Told = queue.SimpleQueue()

    def interrupt(self) -> None:
        """The job takes nothing new, keeps what is in flight, and ends."""
        self._told.put("interrupt")

    def run(self) -> Summary:
        """Raises what is wrong before anything was captioned; later errors are in the summary."""
        outputs.check(self.options.wanted, self.options.failures)
        videos = self.videos() if self.options.inputs else None
        folder = WorkFolder(self.options.work)
        try:
            return self._run(folder, folder.videos() if videos is None else videos)
        finally:
            folder.close()

    def _run(self, folder: WorkFolder, videos: list[Video]) -> Summary:
        options = self.options
        servers = self.servers()
        run: Run | None = None
        if servers:
            how = plan(options, servers, len(videos))
            check_libraries(how)
            print_of = fingerprint(servers[0].parameters, options.sampling, how.pixels)
            folder.agree(print_of, restart=options.restart)
            folder.keep(videos)
            run = Run(
                options,
                self.parts,
                folder=folder,
                videos=videos,
                servers=servers,
                how=how,
                mark=short(print_of),
                told=self._told,
                show=self._teller,
            )
        elif folder.fingerprint() is None:
            raise ConfigError(f"no --server is given, and {folder.path} has no captions to write outputs from")
        self.running = True
        summary = run.caption() if run is not None else Summary()
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
        options = self.options
        tls = tls_context(options.ca) if options.ca is not None else None
        found: list[ServerInfo] = []
        absent: dict[str, PenstockError] = {}
        for url in dict.fromkeys(options.servers):
            try:
                found.append(self._ask(url, tls))
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

    def _ask(self, url: str, tls: ssl.SSLContext | None) -> ServerInfo:
        """What one server says, which is waited for if it is not there."""
        options, ask = self.options, self.parts.ask
        try:
            return ask(url, options.model, token=options.token, tls=tls)
        except NOT_THERE as e:
            if not options.wait_s:
                raise
            self._teller.say(f"{e.message}; waits for it, at most {options.wait_s:g} s")
        return ask(url, options.model, token=options.token, tls=tls, patience_s=options.wait_s)

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
