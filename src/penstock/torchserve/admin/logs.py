"""The five files under LOG_LOCATION and METRICS_LOCATION, and the lines on stdout, as TorchServe's users know them.

What is logged goes through one bounded queue to a thread, so that neither a slow disk nor a reader of stdout that
sleeps can hold the event loop; what finds the queue full is counted, and told when there is room again.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import logging.config
import logging.handlers
import os
import queue
import re
import sys
import threading
import time
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.torchserve.admin.log4j import read_log4j
from penstock.torchserve.config.properties import Properties

log = logging.getLogger("penstock.compat")

FILES: Final = {
    "access_log": "ACCESS_LOG",
    "ts_log": "",  # the root
    "ts_metrics": "TS_METRICS",
    "model_log": "penstock.model",
    "model_metrics": "MODEL_METRICS",
}
"""The logger of each file."""

_MOST_BYTES: Final = 100 * 2**20  # of a file, and how many old ones are kept; source: TorchServe's log4j2.xml
_OLD_FILES: Final = 5
_MOST_WAITING: Final = 10_000  # records
_CLOSE_S: Final = 5.0  # for what waits at the end
_METRICS: Final = ("ts_metrics", "model_metrics")
_BARE: Final = ("access_log", *_METRICS)  # lines of time and text alone
_LEVELS: Final = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class Line(logging.Formatter):
    """`2026-01-01T00:00:00,000 [INFO ] main penstock.engine - text`; bare: `2026-01-01T00:00:00,000 - text`.

    What a worker printed stands as in TorchServe: `W-9000-name_version-stdout MODEL_LOG`.
    """

    def __init__(self, bare: bool = False, first_worker: int = 9000) -> None:
        super().__init__()
        self._bare = bare
        self._first_worker = first_worker

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        return f"{whole},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        at = self.formatTime(record)
        if self._bare:  # metrics come many in one record
            return "\n".join([f"{at} - {line}" for line in record.message.split("\n")])
        level = _LEVELS.get(record.levelname, record.levelname)
        thread, name = record.threadName, record.name
        if thread == "MainThread":
            thread = "main"
        if name == FILES["model_log"]:
            told = record.__dict__
            worker = self._first_worker + int(told.get("slot", 0))
            stream = told.get("stream", "stdout")
            thread, name = f"W-{worker}-{told.get('model', '')}_{told.get('version', '')}-{stream}", "MODEL_LOG"
        return f"{at} [{level:<5}] {thread} {name} - {record.message}"


class _Console(logging.StreamHandler[Any]):
    """Lines on stdout, until nobody reads it any more."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(formatter)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # models print what they like

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())  # also for what is printed, and flushed at the end
        os.close(null)


class _Queue(logging.handlers.QueueHandler):
    """Hands records over to the thread, with what `handlers` are to write them; counts those that find no room."""

    def __init__(self, waiting: queue.Queue[Any], handlers: list[logging.Handler]) -> None:
        super().__init__(waiting)
        self._handlers = handlers
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> Any:
        return super().prepare(record), self._handlers

    def enqueue(self, record: Any) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class Logs:
    """The files and stdout while the server runs."""

    def __init__(self, properties: Properties, config: str | None = None) -> None:
        """`config` is the file of `--log-config`; without it that of `vmargs`. Raises ConfigError."""
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._queues: list[tuple[logging.Logger, _Queue]] = []
        self._before: list[tuple[logging.Logger, int, bool]] = []
        self._files: list[logging.Handler] = []
        self._levels = {
            **dict.fromkeys(FILES.values(), "INFO"),
            "ACCESS_LOG": "INFO" if properties.access_log else "OFF",
        }
        self._paths: dict[str, str] = {}
        self._line = Line(first_worker=properties.initial_worker_port)
        self._thread = threading.Thread(target=self._write, name="logs", daemon=True)
        self._console = _Console(self._line)
        self._plain = _Console(logging.Formatter())
        config = config or _of_vmargs(properties.vmargs)
        if config is not None and self._configured(config):
            return
        told: list[str] = []
        for name, logger in FILES.items():
            folder = properties.metrics_location if name in _METRICS else properties.log_location
            self._open(name, logger, self._paths.get(name) or os.path.join(folder, f"{name}.log"), told)
        for logger, level in self._levels.items():
            found = logging.getLogger(logger)
            self._before.append((found, found.level, found.propagate))
            found.setLevel(logging.CRITICAL + 1 if level == "OFF" else level)
            if logger in FILES.values():  # one that has no file of its own speaks through the root's
                found.propagate = False
        self._thread.start()
        if told:
            log.warning("event=no_log_files consequence=lines_are_on_stdout_alone reason=%s", "; ".join(told))

    def say(self, line: str) -> None:
        """Puts a line on stdout as it is, behind those that wait."""
        if not self._thread.is_alive():
            print(line, flush=True)
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((logging.makeLogRecord({"msg": line}), [self._plain]))

    def close(self) -> bool:
        """Writes what waits. False if nobody takes it: then Python would wait at its end, for the lock of stdout."""
        for logger, handler in self._queues:
            logger.removeHandler(handler)
        for logger, level, propagate in self._before:
            logger.setLevel(level)
            logger.propagate = propagate
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        for file in self._files:
            file.close()
        return not self._thread.is_alive()

    def _open(self, name: str, logger: str, path: str, told: list[str]) -> None:
        """The file's logger writes into it, and on stdout except for metrics."""
        handlers: list[logging.Handler] = [] if name in _METRICS else [self._console]
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            file = logging.handlers.RotatingFileHandler(path, "a", _MOST_BYTES, _OLD_FILES, "utf-8", errors="replace")
        except OSError as error:
            told.append(f"{path}: {error.strerror}")
        else:
            file.setFormatter(Line(bare=True) if name in _BARE else self._line)
            self._files.append(file)
            handlers.insert(0, file)  # before stdout, which may be slow
        found = logging.getLogger(logger)
        handler = _Queue(self._waiting, handlers)
        found.addHandler(handler)
        self._queues.append((found, handler))

    def _write(self) -> None:
        """The thread."""
        while (waiting := self._waiting.get()) is not None:
            record, handlers = waiting
            for handler in handlers:
                handler.handle(record)
            for _, each in self._queues:
                if each.dropped and self._waiting.empty():
                    dropped, each.dropped = each.dropped, 0
                    log.warning("event=lines_lost count=%d reason=more_than_can_be_written", dropped)

    # ---- --log-config

    def _configured(self, path: str) -> bool:
        """True if the file configures everything itself; of a log4j2 file levels and names of files are taken."""
        if path.endswith((".json", ".yaml", ".yml")):
            try:
                logging.config.dictConfig(_mapping(path))
            except (ValueError, TypeError, AttributeError, ImportError) as error:
                raise ConfigError(
                    f"--log-config {path}: {error}; expected a configuration of Python's logging"
                ) from None
            return True
        taken = read_log4j(path, os.environ)
        self._levels.update(taken.levels)
        self._paths.update(taken.files)
        return False


def _of_vmargs(vmargs: str | None) -> str | None:
    """The file of `-Dlog4j.configurationFile=`, which stands in config.properties where there is no flag."""
    for word in (vmargs or "").split():
        key, _, value = word.partition("=")
        if key in ("-Dlog4j.configurationFile", "-Dlog4j2.configurationFile"):
            return re.sub("^file:(//)?(?=/)", "", value)
    return None


def _mapping(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if path.endswith(".json"):
        value = json.loads(text)
    else:
        import yaml

        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected a table")
    value.setdefault("version", 1)
    value.setdefault("disable_existing_loggers", False)
    return value
