"""How far a job is, told while it runs: a bar on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import sys
from typing import IO, Any, Literal, Protocol, cast

import msgspec
from msgspec import Struct

from penstock.errors import ConfigError

Style = Literal["auto", "bar", "plain", "json", "none"]

SHOW_CURSOR = b"\x1b[?25h\n"

WINDOW_S = 20.0  # rates are of so long


class Server(Struct, frozen=True):
    """One server as the sender sees it."""

    url: str
    state: str  # "up", "rests" or "away"
    in_flight: int
    window: int
    answered: int


class Now(Struct, frozen=True):
    """How far the job is. Frames and videos of earlier runs count as done; rates are of this run's last seconds.

    `frames_total` is None until something is known of every video; it is an estimate, since what files say of
    themselves is.
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
    servers: tuple[Server, ...] = ()


class Rates:
    """Frames and bytes a second, over the last seconds. Pure: times are arguments."""

    def __init__(self) -> None:
        self._points: collections.deque[tuple[float, int, int]] = collections.deque()

    def add(self, now_s: float, frames: int, sent_bytes: int) -> tuple[float, float]:
        """What the rates are now that these are the totals."""
        points = self._points
        points.append((now_s, frames, sent_bytes))
        while len(points) > 2 and points[1][0] <= now_s - WINDOW_S:
            points.popleft()
        then_s, old_frames, old_bytes = points[0]
        if now_s <= then_s:
            return 0.0, 0.0
        return (frames - old_frames) / (now_s - then_s), (sent_bytes - old_bytes) / (now_s - then_s)


class Teller(Protocol):
    """Shows `Now` every `every_s` seconds; `say` is for a line between, `end` for the sums, after `close`.

    `close` leaves the terminal as it was; `abandon` does so from a signal handler, whatever it interrupted.
    """

    every_s: float

    def show(self, now: Now) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def end(self, lines: list[str], fields: dict[str, Any]) -> None: ...


def teller(style: Style, stream: IO[str] | None = None) -> Teller:
    """The one for this style; "auto" is a bar on a terminal and plain lines elsewhere."""
    stream = stream if stream is not None else sys.stderr
    if style == "auto":
        style = "bar" if stream.isatty() else "plain"
    makers: dict[str, Any] = {"bar": Bar, "plain": Plain, "json": Json, "none": Silent}
    if style not in makers:
        raise ConfigError(f"progress must be one of auto, {', '.join(makers)}, found '{style}'")
    made: Teller = makers[style](stream)
    return made


def sentence(now: Now) -> str:
    """All of it in one line."""
    total = f"/{now.frames_total:,}" if now.frames_total is not None else ""
    share = f" (about {now.frames / now.frames_total:.0%})" if now.frames_total else ""
    parts = [
        f"{now.frames:,}{total} frames{share}",
        f"{now.videos:,}/{now.videos_total:,} videos",
        f"{now.frames_per_s:,.1f} frames/s",
        f"{now.bytes_per_s / 1e6:,.1f} MB/s",
        f"{now.in_flight} in flight",
        f"{duration(now.eta_s)} left",
    ]
    parts += [f"{now.retries} retries"] if now.retries else []
    parts += [f"{now.failed} failed"] if now.failed else []
    if len(now.servers) > 1 or any(s.state != "up" for s in now.servers):
        parts += [f"{s.url} {f'{s.in_flight}/{s.window}' if s.state == 'up' else s.state}" for s in now.servers]
    return ", ".join(parts)


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
    """The same with its control characters spelled out: the name of a file commands no terminal."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class Plain:
    """A line every few seconds."""

    every_s = 5.0

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def show(self, now: Now) -> None:
        self.say(sentence(now))

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more: no reason to end the job
            print(printable(line), file=self._stream, flush=True)

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def end(self, lines: list[str], fields: dict[str, Any]) -> None:
        for line in lines:
            Plain.say(self, line)


class Json(Plain):
    """An object a line: `Now`, {"note": ...}, at the end {"summary": ...}."""

    every_s = 1.0

    def show(self, now: Now) -> None:
        self._line(now)

    def say(self, line: str) -> None:
        self._line({"note": line})

    def end(self, lines: list[str], fields: dict[str, Any]) -> None:
        self._line({"summary": fields})

    def _line(self, what: object) -> None:
        super().say(msgspec.json.encode(what).decode())


class Silent(Plain):
    """Nothing."""

    every_s = 3600.0

    def show(self, now: Now) -> None: ...

    def say(self, line: str) -> None: ...

    def end(self, lines: list[str], fields: dict[str, Any]) -> None: ...


class _Lasting:
    """A stream that may lose its reader, as when the terminal is closed: what is written then is lost."""

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


class Bar(Plain):
    """A bar with all of it below."""

    every_s = 0.25

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(stream)
        self._live = Live(console=Console(file=cast(IO[str], _Lasting(stream))), auto_refresh=False)
        self._live.start()

    def show(self, now: Now) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        both = Table.grid()
        both.add_row(ProgressBar(total=now.frames_total, completed=now.frames, width=min(80, self._live.console.width)))
        both.add_row(Text(sentence(now)))
        self._live.update(both, refresh=True)

    def say(self, line: str) -> None:
        self._live.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stream.fileno(), SHOW_CURSOR)


class Notes(logging.Handler):
    """Warnings of the job's parts, said by its teller."""

    def __init__(self, show: Teller) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show.say(f"{record.levelname.lower()}: {record.getMessage()}")
