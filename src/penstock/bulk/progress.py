"""The progress of a job and its final summary, for people (a bar or plain lines) and for programs (JSON)."""

import collections
import contextlib
import logging
import os
import sys
from typing import IO, Any, Final, Literal, cast

import msgspec
from msgspec import Struct

from penstock.bulk.types import EndpointStats
from penstock.errors import INTERRUPTED, PenstockError

Style = Literal["auto", "bar", "plain", "json", "none", "quiet"]

SHOW_CURSOR = b"\x1b[?25h\n"
WINDOW_S = 20.0  # over which rates are measured

DONE: Final = 0
INCOMPLETE: Final = 3  # some videos failed, or the job had to stop


class Progress(Struct, frozen=True):
    """Frames and videos of earlier runs count as done; rates cover this run's last seconds.

    `frames_total` is an estimate from the headers of the files, and None until every video is known.
    """

    elapsed_s: float
    frames: int
    frames_total: int | None
    videos: int
    videos_total: int
    failed: int
    frames_per_s: float
    bytes_per_s: float
    eta_s: float | None
    in_flight: int
    retries: int
    servers: tuple[EndpointStats, ...] = ()

    def line(self) -> str:
        total = f"/{self.frames_total:,}" if self.frames_total is not None else ""
        share = f" (about {self.frames / self.frames_total:.0%})" if self.frames_total else ""
        parts = [
            f"{self.frames:,}{total} frames{share}",
            f"{self.videos:,}/{self.videos_total:,} videos",
            f"{self.frames_per_s:,.1f} frames/s",
            f"{self.bytes_per_s / 1e6:,.1f} MB/s",
            f"{self.in_flight} in flight",
            f"{duration(self.eta_s)} left",
        ]
        parts += [f"{self.retries} retries"] if self.retries else []
        parts += [f"{self.failed} failed"] if self.failed else []
        if len(self.servers) > 1 or any(s.state != "up" for s in self.servers):
            parts += [f"{s.url} {f'{s.in_flight}/{s.window}' if s.state == 'up' else s.state}" for s in self.servers]
        return ", ".join(parts)


class JobSummary(Struct):
    """Sums over all videos of the job; `new_frames`, `seconds` and `sent_bytes` are of this run."""

    videos: int = 0
    complete: int = 0
    failed: int = 0
    partial: int = 0  # failed videos with captions before the damage
    damaged: int = 0  # complete videos with gaps
    errors: int = 0  # rows with an error instead of a caption
    tokens: tuple[int, ...] = (0, 0)  # of prompts and of completions
    price: tuple[float, float] | None = None  # of a million of each
    frames: int = 0
    seen: int = 0  # frames of the videos that were read, captioned or not
    similar: int = 0  # near-duplicates that were not captioned, or got the caption of another frame
    new_frames: int = 0
    retries: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    stopped: PenstockError | None = None
    outputs: tuple[str, ...] = ()
    failures: str | None = None

    @property
    def unfinished(self) -> int:
        """Videos that a later run continues."""
        return self.videos - self.complete - self.failed

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return INTERRUPTED
        incomplete = self.stopped is not None or self.failed or self.damaged or self.errors or self.unfinished
        return INCOMPLETE if incomplete else DONE

    def fields(self) -> dict[str, Any]:
        """For programs."""
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "stopped"}
        stopped = None if self.stopped is None else self.stopped.message
        return own | {"unfinished": self.unfinished, "stopped": stopped, "exit_code": self.exit_code}

    def lines(self) -> list[str]:
        """For people."""
        skipped = f" of {self.seen:,} frames" if self.seen > self.frames else ""
        skipped += f", {self.similar:,} near-duplicates" if self.similar else ""
        rate = f"{self.new_frames / self.seconds:,.1f} frames/s, " if self.seconds > 0 else ""
        lines = [
            f"{self.complete:,} of {self.videos:,} videos complete, {self.frames:,} captions{skipped}; this run: "
            f"{self.new_frames:,} in {duration(self.seconds)}, {rate}{self.sent_bytes / 1e6:,.1f} MB sent, "
            f"{self.retries} retries"
        ]
        if any(self.tokens):
            prompts, completions = self.tokens
            lines.append(f"tokens: {prompts:,} of prompts, {completions:,} of completions{self._cost()}")
        written = [f"written: {', '.join(self.outputs)}"] if self.outputs else []
        return lines + written + self.problems()

    def _cost(self) -> str:
        if self.price is None:
            return ""
        cost = sum(count * each for count, each in zip(self.tokens, self.price, strict=True)) / 1e6
        return f", {cost:,.4f} at the given prices"

    def problems(self) -> list[str]:
        """The lines that are printed even if nothing else is."""
        lines = []
        if self.failed:
            partial = f", {self.partial:,} of them after some captions, which are kept" if self.partial else ""
            lines.append(f"{self.failed:,} failed{partial}: see {self.failures}; --retry-failed tries them again")
        if self.damaged:
            lines.append(f"{self.damaged:,} damaged, captioned except for gaps: see {self.failures}")
        if self.errors:
            lines.append(f"{self.errors:,} rows have an error: see {self.failures}; --retry-failed tries them again")
        if self.stopped is not None:
            lines.append(f"stopped: {self.stopped.message}")
        if self.unfinished:
            lines.append(f"{self.unfinished:,} videos are not finished: run the same command again to continue")
        return lines


class RateWindow:
    """Frames and bytes per second over the last seconds. Pure: time is an argument."""

    def __init__(self) -> None:
        self._points: collections.deque[tuple[float, int, int]] = collections.deque()

    def add(self, now_s: float, frames: int, sent_bytes: int) -> tuple[float, float]:
        """The rates after these new totals."""
        points = self._points
        points.append((now_s, frames, sent_bytes))
        while len(points) > 2 and points[1][0] <= now_s - WINDOW_S:
            points.popleft()
        then_s, old_frames, old_bytes = points[0]
        if now_s <= then_s:
            return 0.0, 0.0
        return (frames - old_frames) / (now_s - then_s), (sent_bytes - old_bytes) / (now_s - then_s)


def duration(seconds: float | None) -> str:
    """`3:07`, `2:03:07`, `5d 02:03`; `?` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400}d {whole % 86_400 // 3600:02}:{whole % 3600 // 60:02}"
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole % 3600 // 60:{'02' if hours else ''}}:{whole % 60:02}"


def printable(line: str) -> str:
    """The line with control characters spelled out, so that a file name cannot control the terminal."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class ProgressReporter:
    """Prints a line every `every_s` seconds, notes in between, and the summary after `close`.

    `close` restores the terminal; `abandon` does so from a signal handler.
    """

    every_s = 5.0

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def show(self, progress: Progress) -> None:
        self.note(progress.line())

    def note(self, line: str) -> None:
        self._print(line)

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a lost reader is no reason to end the job
            print(printable(line), file=self._stream, flush=True)

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def end(self, summary: JobSummary) -> None:
        for line in summary.lines():
            self._print(line)


class JsonReporter(ProgressReporter):
    """One object a line: `Progress`, {"note": ...}, and at the end {"summary": ...}."""

    every_s = 1.0

    def show(self, progress: Progress) -> None:
        self._print_json(progress)

    def note(self, line: str) -> None:
        self._print_json({"note": line})

    def end(self, summary: JobSummary) -> None:
        self._print_json({"summary": summary.fields()})

    def _print_json(self, value: object) -> None:
        self._print(msgspec.json.encode(value).decode())


class SummaryReporter(ProgressReporter):
    """Notes and the summary, no progress."""

    every_s = 3600.0

    def show(self, progress: Progress) -> None: ...


class QuietReporter(SummaryReporter):
    """Only the problems in the summary."""

    def note(self, line: str) -> None: ...

    def end(self, summary: JobSummary) -> None:
        for line in summary.problems():
            self._print(f"penstock: {line}")


class _ForgivingStream:
    """A stream that ignores the loss of its reader, such as a closed terminal."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class BarReporter(ProgressReporter):
    """A bar with the progress line below it."""

    every_s = 0.25

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(stream)
        self._live = Live(console=Console(file=cast(IO[str], _ForgivingStream(stream))), auto_refresh=False)
        self._live.start()

    def show(self, progress: Progress) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid()
        width = min(80, self._live.console.width)
        table.add_row(ProgressBar(total=progress.frames_total, completed=progress.frames, width=width))
        table.add_row(Text(progress.line()))
        self._live.update(table, refresh=True)

    def note(self, line: str) -> None:
        self._live.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stream.fileno(), SHOW_CURSOR)


def make_reporter(style: Style, stream: IO[str] | None = None) -> ProgressReporter:
    """The reporter for a style; "auto" is a bar on a terminal and plain lines elsewhere."""
    stream = stream if stream is not None else sys.stderr
    if style == "auto":
        style = "bar" if stream.isatty() else "plain"
    kinds: dict[str, type[ProgressReporter]] = {
        "bar": BarReporter, "plain": ProgressReporter, "json": JsonReporter, "none": SummaryReporter,
        "quiet": QuietReporter,
    }  # fmt: skip
    return kinds[style](stream)


class WarningHandler(logging.Handler):
    """Shows warnings of the job's parts through its reporter."""

    def __init__(self, reporter: ProgressReporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self._reporter.note(f"{record.levelname.lower()}: {record.getMessage()}")
