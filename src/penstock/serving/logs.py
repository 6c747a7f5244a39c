"""The log of a native server: one line per text line or one JSON object per record, written by a thread of its own.

A bounded queue keeps a slow disk or a stalled reader of stderr away from the event loop. When it is full, records are
dropped and counted, and a later line reports their number.
"""

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import sys
import time
from typing import Any, Final

from penstock.config.schema import LoggingConfig
from penstock.errors import ConfigError

log = logging.getLogger("penstock.serving")

_MAX_QUEUE: Final = 10_000  # records
_CLOSE_S: Final = 5.0  # for writing the queue at the end
_REPORT_S: Final = 60.0  # between two messages that the log cannot be written
_EXTRAS: Final = ("request_id", "model", "version", "slot")


class _Line(logging.Formatter):
    """`2026-01-01T00:00:00.000Z INFO penstock.engine request_id=a text`; the prefix precedes every line of a text."""

    def format(self, record: logging.LogRecord) -> str:
        found = _fields(self, record)
        head = f"{found['time']} {found['level']} {found['logger']} "
        head += "".join(f"{key}={found[key]} " for key in _EXTRAS if key in found)
        return "\n".join(head + line for line in found["message"].split("\n"))


class _Json(logging.Formatter):
    """An object with `time`, `level`, `logger`, `message`, and `request_id`, `model`, `version`, `slot` if known."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(self, record), ensure_ascii=False)


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


class _Queue(logging.handlers.QueueHandler):
    """Counts the records for which there was no room."""

    queue: queue.Queue[Any]

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_info = record.getMessage(), None, None  # arguments may change later
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _Listener(logging.handlers.QueueListener):
    def __init__(self, source: _Queue, target: logging.Handler) -> None:
        super().__init__(source.queue, target)
        self._source = source

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        if self._source.queue.empty():
            self.report_dropped()

    def report_dropped(self) -> None:
        dropped, self._source.dropped = self._source.dropped, 0
        if dropped:
            text = "event=lines_lost count=%d reason=more_than_can_be_written"
            super().handle(log.makeRecord(log.name, logging.WARNING, "", 0, text, (dropped,), None))


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
    """Opens the file again when it was renamed."""


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
        self._target.setFormatter(_Json() if config.format == "json" else _Line())
        self._handler = _Queue(queue.Queue(_MAX_QUEUE))
        self._listener = _Listener(self._handler, self._target)
        self._listener.start()
        self._root.addHandler(self._handler)
        self.set_level(config.level)

    def set_level(self, level: str) -> None:
        self._root.setLevel(level.upper())

    def close(self) -> None:
        """Writes the queue, for at most 5 s: stderr may be a pipe that is not read."""
        self._root.removeHandler(self._handler)
        self._root.setLevel(self._level)
        thread: Any = self._listener._thread
        try:
            self._handler.queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        thread.join(_CLOSE_S)
        if not thread.is_alive():
            self._listener.report_dropped()
            self._target.close()
