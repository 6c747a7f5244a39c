"""Logging as in TorchServe: five files under LOG_LOCATION and METRICS_LOCATION, lines on stdout, log4j2 files.

One thread writes the files and another stdout, each from a bounded queue. A stalled reader of stdout therefore stops
neither the event loop nor the files, and a slow disk not the event loop. Records that find no room are dropped, and
`event=lines_lost` reports the number of their lines.
"""

import io
import json
import logging
import logging.config
import logging.handlers
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree

from msgspec import Struct, field

from penstock.config.load import load_yaml
from penstock.core.os_threads import silence
from penstock.errors import ConfigError
from penstock.serving.process import CLOSE_S, LogFile, LogThread, TextFormatter, ToThreads
from penstock.torchserve.config import Properties

log = logging.getLogger("penstock.torchserve")

FILES: Final = {
    "access_log": "ACCESS_LOG",
    "ts_log": "",  # the root logger
    "ts_metrics": "TS_METRICS",
    "model_log": "penstock.model",
    "model_metrics": "MODEL_METRICS",
}
"""The logger of each file."""

_MAX_FILE_BYTES: Final = 100 * 2**20  # these two are from TorchServe's log4j2.xml
_OLD_FILES: Final = 5
_MAX_METRICS: Final = 200  # records that may wait when one with metrics, up to 75 KB, is added
_REPORT_S: Final = 60.0  # between two reports of dropped lines
_METRICS: Final = ("ts_metrics", "model_metrics")
_CONSOLE: Final = "METRICS_CONSOLE"  # the logger of metrics on stdout
_BARE: Final = ("access_log", *_METRICS)  # lines with only time and text
_LEVEL_NAMES: Final = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class TorchServeFormatter(TextFormatter):
    """`2026-01-01T00:00:00,000 [INFO ] main penstock.engine - text`; bare: `2026-01-01T00:00:00,000 - text`.

    A worker's output has TorchServe's prefix: `W-9000-name_version-stdout MODEL_LOG`.
    """

    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def __init__(self, bare: bool = False, first_worker: int = 9000) -> None:
        super().__init__()
        self._bare = bare
        self._first_worker = first_worker

    def formatMessage(self, record: logging.LogRecord) -> str:
        at = self.formatTime(record)
        if self._bare:  # one record holds many metrics
            return f"{at} - " + record.message.replace("\n", f"\n{at} - ")
        level = _LEVEL_NAMES.get(record.levelname, record.levelname)
        thread, name = record.threadName, record.name
        if name == _CONSOLE:
            prefix = f"{at} [{level:<5}] {record.__dict__['worker']} {record.__dict__['metrics']} - "
            return prefix + record.message.replace("\n", f"\n{prefix}")
        if thread == "MainThread":
            thread = "main"
        if name == FILES["model_log"]:
            extra = record.__dict__
            worker = self._first_worker + int(extra.get("slot", 0))
            stream = extra.get("stream", "stdout")
            thread, name = f"W-{worker}-{extra.get('model', '')}_{extra.get('version', '')}-{stream}", "MODEL_LOG"
        found = record.__dict__
        suffix = "".join(f" {key}={found[key]}" for key in ("request_id", "trace_id", "span_id") if found.get(key))
        return f"{at} [{level:<5}] {thread} {name} - {record.message}{suffix}"


class _Console(logging.StreamHandler[Any]):
    """Writes lines to stdout until its reader closes it."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(formatter)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # models may print anything

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
            return
        silence(self.stream)  # also for print() and the flush at exit


class _RotatingFile(LogFile, logging.handlers.RotatingFileHandler):
    """A log file of bounded size."""


class ServerLogs:
    """The log files and stdout while the server runs."""

    def __init__(self, properties: Properties, config: str | None = None) -> None:
        """`config` is the file of `--log-config`, by default the one in `vmargs`. Raises ConfigError."""
        self._queues: list[tuple[logging.Logger, ToThreads]] = []
        self._before: list[tuple[logging.Logger, int, bool]] = []
        self._files: list[logging.Handler] = []
        self._levels = {
            **dict.fromkeys(FILES.values(), "INFO"),
            "ACCESS_LOG": "INFO" if properties.access_log else "OFF",
            _CONSOLE: "INFO" if properties.console_metrics else "OFF",
        }
        self._paths: dict[str, str] = {}
        self._formatter = TorchServeFormatter(first_worker=properties.initial_worker_port)
        self._report_at = 0.0
        self._disk, self._stdout = LogThread("files", self._report_dropped), LogThread("stdout")
        self._console = _Console(self._formatter)
        self._plain = _Console(logging.Formatter())
        self._config = config or _config_in_vmargs(properties.vmargs)
        if self._config is not None and self._configure(self._config):
            return
        failures: list[str] = []
        for name, logger in FILES.items():
            folder = properties.metrics_location if name in _METRICS else properties.log_location
            self._open(name, logger, self._paths.get(name) or os.path.join(folder, f"{name}.log"), failures)
        self._attach(_CONSOLE, ToThreads([(self._stdout, self._console)], _MAX_METRICS))
        for logger in self._levels:
            found = logging.getLogger(logger)
            self._before.append((found, found.level, found.propagate))
            if logger in (*FILES.values(), _CONSOLE):  # loggers without a file of their own use the root's
                found.propagate = False
        self._set_levels()
        if failures:
            log.warning("event=no_log_files consequence=lines_are_on_stdout_alone reason=%s", "; ".join(failures))

    def reload(self) -> None:
        """Applies the changed levels of the log configuration; the files stay. Raises ConfigError."""
        if self._config is not None and not self._configure(self._config):
            self._set_levels()

    def _set_levels(self) -> None:
        for logger, level in self._levels.items():
            logging.getLogger(logger).setLevel(logging.CRITICAL + 1 if level == "OFF" else level)

    def print_line(self, line: str) -> None:
        """Prints a line on stdout without a prefix, after the lines in the queue."""
        if self._stdout.is_alive():
            self._stdout.put(logging.makeLogRecord({"msg": line}), self._plain)
        else:
            print(line, flush=True)

    def close(self) -> bool:
        """Writes the queues. False if a file or stdout blocks; Python's exit would then wait for the lock of stdout."""
        self._report_at = 0.0
        self._report_dropped()
        for logger, handler in self._queues:
            logger.removeHandler(handler)
        for logger, level, propagate in self._before:
            logger.setLevel(level)
            logger.propagate = propagate
        end = time.monotonic() + CLOSE_S
        written = [thread.close(end) for thread in (self._disk, self._stdout)]
        for file in self._files:
            file.close()
        return all(written)

    def _report_dropped(self) -> None:
        """Logs the numbers of lost lines, once a minute at most: a stdout that is not read loses every line."""
        if time.monotonic() < self._report_at:
            return
        for thread in (self._disk, self._stdout):
            if dropped := thread.take_dropped():
                self._report_at = time.monotonic() + _REPORT_S
                reason = "more_than_can_be_written"
                log.warning("event=lines_lost where=%s count=%d reason=%s", thread.name, dropped, reason)

    def _open(self, name: str, logger: str, path: str, failures: list[str]) -> None:
        """Lets a logger write to its file, and to stdout unless it logs metrics."""
        targets: list[tuple[LogThread, logging.Handler]] = [] if name in _METRICS else [(self._stdout, self._console)]
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            file = _RotatingFile(path, "a", _MAX_FILE_BYTES, _OLD_FILES, "utf-8", errors="replace")
        except OSError as error:
            failures.append(f"{path}: {error.strerror}")
        else:
            file.setFormatter(TorchServeFormatter(bare=True) if name in _BARE else self._formatter)
            self._files.append(file)
            targets.append((self._disk, file))
        self._attach(logger, ToThreads(targets))

    def _attach(self, logger: str, handler: ToThreads) -> None:
        found = logging.getLogger(logger)
        found.addHandler(handler)
        self._queues.append((found, handler))

    # ---- --log-config

    def _configure(self, path: str) -> bool:
        """True if the file configures Python's logging; from a log4j2 file, takes levels and file names."""
        if path.endswith((".json", ".yaml", ".yml")):
            try:
                logging.config.dictConfig(_mapping(path))
            except (ValueError, TypeError, AttributeError, ImportError) as error:
                raise ConfigError(
                    f"--log-config {path}: {error}; expected a configuration of Python's logging"
                ) from None
            return True
        found = read_log4j(path, os.environ)
        self._levels.update(found.levels)
        if not found.console_metrics:
            self._levels[_CONSOLE] = "OFF"
        self._paths.update(found.files)
        return False


def _config_in_vmargs(vmargs: str | None) -> str | None:
    """The file of `-Dlog4j.configurationFile=` in `vmargs`."""
    for word in (vmargs or "").split():
        key, _, value = word.partition("=")
        if key in ("-Dlog4j.configurationFile", "-Dlog4j2.configurationFile"):
            return re.sub("^file:(//)?(?=/)", "", value)
    return None


def _mapping(path: str) -> dict[str, Any]:
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    else:
        value, _ = load_yaml(path, f"--log-config {path}")
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected a table")
    value.setdefault("version", 1)
    value.setdefault("disable_existing_loggers", False)
    return value


# ---- log4j2

# TorchServe's logger -> (Penstock's logger, file)
_LOG4J_LOGGERS: Final = {
    "Root": ("", "ts_log"),
    "org.pytorch.serve": ("penstock", "ts_log"),
    "ACCESS_LOG": ("ACCESS_LOG", "access_log"),
    "MODEL_LOG": ("penstock.model", "model_log"),
    "MODEL_METRICS": ("MODEL_METRICS", "model_metrics"),
    "TS_METRICS": ("TS_METRICS", "ts_metrics"),
}
_LOG4J_LEVELS: Final = {
    "all": "DEBUG",
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "error": "ERROR",
    "fatal": "CRITICAL",
    "off": "OFF",
}
_LOG4J_VARIABLE = re.compile(r"\$\{env:(\w+)(?::-([^}]*))?\}")
_KNOWN_PARTS: Final = frozenset({"patternlayout", "policies", "defaultrolloverstrategy"})


class Log4jConfig(Struct):
    """`levels` by Penstock's loggers ("" is the root), `files` by their default names.

    `console_metrics` is False if metrics do not reach the root logger, which prints on stdout.
    """

    levels: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    console_metrics: bool = True


def read_log4j(path: str, env: Mapping[str, str]) -> Log4jConfig:
    """The levels of known loggers and their files; a warning lists the ignored parts. Raises ConfigError."""
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"--log-config {path}: {error}; expected a log4j2 XML, or a configuration of Python's logging in a"
            " .json or .yaml file"
        ) from None
    appenders, ignored = _appenders(root, env)
    found = Log4jConfig()
    for element in root.iter():
        kind = _tag(element.tag)
        if kind not in ("logger", "root", "asyncroot", "asynclogger"):
            continue
        name = "Root" if "root" in kind else element.get("name", "")
        level = _LOG4J_LEVELS.get(element.get("level", "").lower())
        if name not in _LOG4J_LOGGERS:
            continue  # a library that Penstock does not use
        logger, file = _LOG4J_LOGGERS[name]
        if level is not None:
            found.levels[logger] = level
        if logger == "TS_METRICS" and element.get("additivity", "").lower() == "false":
            found.console_metrics = False
        for ref in element:
            if target := appenders.get(ref.get("ref", "")):
                found.files[file] = target
    if found.levels.get("TS_METRICS", found.levels.get("", "INFO")) not in ("DEBUG", "INFO"):
        found.console_metrics = False
    if ignored:
        log.warning(
            "file=%s ignored=%s hint=--log-config also takes a configuration of Python's logging (.json, .yaml)",
            path,
            ",".join(sorted(ignored)),
        )
    return found


def _appenders(root: ElementTree.Element, env: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """The file of each appender ("" for the console), and the ignored parts."""
    found: dict[str, str] = {}
    ignored: set[str] = set()
    for group in root:
        if _tag(group.tag) != "appenders":
            continue
        for element in group:
            kind, name = _tag(element.tag), element.get("name", "")
            file = _LOG4J_VARIABLE.sub(lambda m: env.get(m[1], m[2] or ""), element.get("fileName", ""))
            if kind == "console":
                found[name] = ""
            elif kind in ("rollingfile", "file", "randomaccessfile", "rollingrandomaccessfile") and "$" not in file:
                found[name] = file
            else:
                ignored.add(f"appender {name}")
            ignored |= {f"layout of {name}" for child in element if _tag(child.tag) not in _KNOWN_PARTS}
    return found, ignored


def _tag(tag: object) -> str:
    """The name of an element in lower case, without its namespace; "" for a comment."""
    return tag.rpartition("}")[2].lower() if isinstance(tag, str) else ""
