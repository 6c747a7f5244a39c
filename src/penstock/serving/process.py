"""The process of a server: its event loop, stop signals, the ready message, garbage collection, and its log.

The log has one line per text line or one JSON object per record. A thread of its own writes it from a bounded queue,
which keeps a slow disk or a stalled reader of stderr away from the event loop. When the queue is full, records are
dropped and counted, and a later line reports their number.
"""

import ast
import asyncio
import contextlib
import gc
import json
import logging
import logging.handlers
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.config.checks import is_loopback
from penstock.config.schema import LoggingConfig
from penstock.core.os_threads import keep_standard_files, silence
from penstock.errors import ConfigError, PenstockError

log = logging.getLogger("penstock.serving")

READY_FD: Final = "PENSTOCK_READY_FD"
PARENT_FD: Final = "PENSTOCK_PARENT_FD"
LAME_DUCK_S: Final = 5.0  # a choice: balancers check health every few seconds


def runner() -> Callable[..., int]:
    """The function that runs a main coroutine."""
    keep_standard_files()
    import uvloop

    run: Callable[..., int] = uvloop.run
    return run


class StopSignal:
    """Set by SIGINT, SIGTERM, or the end of the process at the other end of PENSTOCK_PARENT_FD.

    A second signal ends the process at once; the workers end with their sockets. SIGHUP calls `reload` until then, in
    one task at a time.
    """

    def __init__(self, on_first: Callable[[], None], reload: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._on_first = on_first
        self._reload = reload
        self._reloading: asyncio.Task[None] | None = None
        self._again = False
        self._event = asyncio.Event()

    def catch(self) -> None:
        """Installs the handlers. Must be called on the loop's thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self.hang_up)
        fd = os.environ.pop(PARENT_FD, "")  # workers must not inherit it
        if fd.isdigit():
            with contextlib.suppress(OSError):
                loop.add_reader(int(fd), self._on_parents_end, int(fd))

    def _on_signal(self) -> None:
        if self._event.is_set():
            os._exit(1)
        self._on_first()
        self._event.set()

    def hang_up(self) -> None:
        """Reloads, as SIGHUP does."""
        if self._reloading is not None and not self._reloading.done():
            self._again = True
        elif not self._event.is_set():
            self._reloading = asyncio.ensure_future(self._reload_all())

    async def _reload_all(self) -> None:
        try:
            await self._reload()
        except PenstockError as error:
            log.error("event=reload_failed error=%r consequence=nothing_else_is_reloaded", str(error))
        except Exception:
            log.exception("event=reload_failed consequence=nothing_else_is_reloaded")
        else:
            log.info("event=reloaded")
        if self._again:
            self._again = False
            await self._reload_all()

    def _on_parents_end(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        if not self._event.is_set():
            self._on_signal()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    async def unless(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs the work until it ends or the signal, which cancels it. Raises the error of the work."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)


def lame_duck_s(hosts: Iterable[str]) -> float:
    """Seconds for which a server that is not ready still accepts connections, so that a remote balancer notices."""
    return 0.0 if all(map(is_loopback, hosts)) else LAME_DUCK_S


def say(text: str) -> None:
    """Prints on stdout. A full disk or a pipe without a reader is no reason to end, now or when Python exits."""
    try:
        print(text, flush=True)
    except OSError as error:
        silence(sys.stdout)
        log.warning("event=not_printed error=%s consequence=stdout_is_silent", error.strerror)


def report_ready(urls: Mapping[str, str]) -> None:
    """Writes the addresses as one JSON line to PENSTOCK_READY_FD, if set, and closes it."""
    fd = os.environ.get(READY_FD, "")
    if fd.isdigit():
        with contextlib.suppress(OSError), os.fdopen(int(fd), "w") as file:
            file.write(json.dumps(urls) + "\n")


def freeze_heap() -> None:
    """Excludes all loaded objects from garbage collection, and makes collections rarer under load."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


_MAX_QUEUE: Final = 10_000  # records
CLOSE_S: Final = 5.0  # for writing the queue at the end
_REPORT_S: Final = 60.0  # between two messages that the log cannot be written
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in b"\t\n"}
_WORD: Final = re.compile(r"([a-z]+_[a-z_]+)(?= [a-z_]+=|:)")  # the event of a line without `event=`
_PAIR: Final = re.compile(r"""(?<![^ ])([a-z_]+)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^ ]*)""")
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")
_EXTRAS: Final = ("request_id", "trace_id", "span_id", "model", "version", "slot")


class TextFormatter(logging.Formatter):
    """Escapes control characters, which would command the terminal of a reader or hide what a line says."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_CONTROLS)


class LineFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.000Z INFO penstock.engine request_id=a text`; the prefix precedes every line of a text."""

    def format(self, record: logging.LogRecord) -> str:
        found = _fields(self, record)
        head = f"{found['time']} {found['level']} {found['logger']} "
        head += "".join(f"{key}={found[key]} " for key in _EXTRAS if key in found)
        return "\n".join(head + line for line in found["message"].split("\n")).translate(_CONTROLS)


class _Json(logging.Formatter):
    """An object with `time`, `level`, `logger`, `message`, and `request_id`, `model`, `version`, `slot` if known.

    A line of Penstock's own also has the pairs of its text under their keys, such as `event` and `status`.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(self, record)
        if record.name.startswith("penstock.") and record.name != "penstock.model":
            fields = {**pairs_of(fields["message"]), **fields}
        return json.dumps(fields, ensure_ascii=False)


def pairs_of(text: str) -> dict[str, str | int | float]:
    """The pairs of a line such as `event=loaded model=m seconds=3: text`, or `loaded model=m`; numbers as numbers."""
    first = text.partition("\n")[0]
    found: dict[str, str | int | float] = {}
    if (word := _WORD.match(first)) is not None:
        found["event"] = word[1]
    for pair in _PAIR.finditer(first):
        key, value = pair[1], pair[2].rstrip(":")
        if value[:1] in ("'", '"'):
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
        elif key not in _EXTRAS and _NUMBER.fullmatch(value):
            value = float(value) if "." in value else int(value)
        found[key] = value
    return found


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    text = record.getMessage()
    if record.exc_info and not record.exc_text:
        record.exc_text = formatter.formatException(record.exc_info)
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    extras = {key: value for key in _EXTRAS if (value := record.__dict__.get(key)) not in (None, "")}
    return {
        "time": f"{at}.{int(record.msecs):03d}Z",
        "level": record.levelname,
        "logger": record.name,
        **extras,
        "message": f"{text}\n{record.exc_text}" if record.exc_text else text,
    }


class LogThread:
    """A thread that writes records from a bounded queue; counts the lines of records that found no room."""

    def __init__(self, name: str, wrote: Callable[[], None] = lambda: None) -> None:
        """Calls `wrote` whenever the queue is empty."""
        self.name, self._wrote = name, wrote
        self._waiting: queue.Queue[Any] = queue.Queue(_MAX_QUEUE)
        self._lock = threading.Lock()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name=f"logs-{name}", daemon=True)
        self._thread.start()

    def put(self, record: logging.LogRecord, target: logging.Handler, limit: int | None = None) -> None:
        """Drops the record if the queue is full, or if `limit` records wait."""
        try:
            if limit is not None and self._waiting.qsize() >= limit:
                raise queue.Full
            self._waiting.put_nowait((record, target))
        except queue.Full:
            with self._lock:
                self._dropped += record.getMessage().count("\n") + 1

    def _write(self) -> None:
        while (queued := self._waiting.get()) is not None:
            record, target = queued
            target.handle(record)
            if self._waiting.empty():
                self._wrote()

    def take_dropped(self) -> int:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return dropped

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, end: float) -> bool:
        """Writes the queue until `end`, by time.monotonic(). False if records are left."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=max(0.0, end - time.monotonic()))
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self.is_alive()


class ToThreads(logging.Handler):
    """Passes the records of a logger to the threads of its handlers. `limit` as in `LogThread.put`."""

    def __init__(self, targets: Sequence[tuple[LogThread, logging.Handler]], limit: int | None = None) -> None:
        super().__init__()
        self._targets, self._limit = targets, limit

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_info = record.getMessage(), None, None  # arguments may change later
        for thread, target in self._targets:
            thread.put(record, target, self._limit)


class LogFile(logging.Handler):
    """Mixed into a file handler: a full disk leaves one message a minute on stderr, and no traceback per line."""

    _again_s = 0.0

    def handleError(self, record: logging.LogRecord) -> None:
        error, now = sys.exc_info()[1], time.monotonic()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif now >= self._again_s:
            self._again_s = now + _REPORT_S
            path = getattr(self, "baseFilename", "stderr")
            text = f"penstock: {path} cannot be written: {error.strerror}; log lines are lost until it can\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode(errors="replace"))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # lines that did not fit
            super().close()


class _File(LogFile, logging.handlers.WatchedFileHandler):
    """Reopens the file after it was renamed."""


class _Stderr(LogFile, logging.StreamHandler[Any]):
    """Survives the end of a pipe's reader."""


class ServerLog:
    """The handler of the root logger while a server runs."""

    def __init__(self, config: LoggingConfig) -> None:
        """Raises ConfigError if the file cannot be opened."""
        self._root = logging.getLogger()
        self._level = self._root.level
        self._target: logging.Handler = _Stderr(sys.stderr)
        if config.file is not None:
            try:
                self._target = _File(config.file, encoding="utf-8", errors="replace")
            except OSError as error:
                raise ConfigError(f"logging.file: {config.file} cannot be opened: {error.strerror}") from None
        self._target.setFormatter(_Json() if config.format == "json" else LineFormatter())
        self._thread = LogThread("server", self._report_dropped)
        self._handler = ToThreads([(self._thread, self._target)])
        self._root.addHandler(self._handler)
        self.set_level(config.level)

    def set_level(self, level: str) -> None:
        self.level = level
        self._root.setLevel(level.upper())

    def close(self) -> bool:
        """Writes the queue. False if the log blocks, as an unread pipe does; Python's exit would then wait for it."""
        self._root.removeHandler(self._handler)
        self._root.setLevel(self._level)
        if not self._thread.close(time.monotonic() + CLOSE_S):
            return False
        self._report_dropped()
        self._target.close()
        return True

    def _report_dropped(self) -> None:
        if dropped := self._thread.take_dropped():
            text = "event=lines_lost count=%d reason=more_than_can_be_written"
            self._target.handle(log.makeRecord(log.name, logging.WARNING, "", 0, text, (dropped,), None))
