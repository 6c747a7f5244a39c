"""A results folder: run.json states the origin, records.jsonl holds the measurements, summary.csv a table.

`append` returns after the measurement is synced to disk, so a killed run loses at most the measurement in progress.
Reading drops a last line truncated by a power failure or a full disk.
"""

import csv
import errno
import fcntl
import io
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import psutil
from msgspec import Struct, field

from penstock._version import __version__
from penstock.core.os_threads import atomic_file, usable_cores
from penstock.core.readings import Gpus
from penstock.errors import ConfigError, PenstockError, plain
from penstock.perf.bench.measurement import FIGURES, SCHEMA, Measurement

MACHINE: Final = ("cpu", "cores", "memory_gib", "gpus")  # the facts that figures depend on
_LIBRARIES: Final = ("penstock", "uvloop", "httptools", "msgspec")
_CPUINFO: Final = Path("/proc/cpuinfo")

HIDDEN: Final = "***"
_NAME: Final = r"[\w.-]*(?:token|key|password|passwd|secret|authorization|credentials?|signature)"
_SIGN: Final = r"""(?:\s*=\s*|["']\s*[=:]\s*|:\s+)"""  # a colon without a space occurs in file.py:Class
_VALUE: Final = r""""(?:[^"\\]|\\.)*"|'[^']*'|(?:(?:bearer|basic)\s+)?[^\s"'&;,}\]]+"""
_SETTING: Final = re.compile(rf"({_NAME}=|--[\w-]+={_NAME}=).+", re.IGNORECASE | re.DOTALL)
_INSIDE: Final = re.compile(rf"(?<![\w.-])({_NAME}{_SIGN})(?:{_VALUE})", re.IGNORECASE)
_USER: Final = re.compile(r"(?<=://)[^/?#\s]*@")


class Origin(Struct, frozen=True, kw_only=True):
    """The content of run.json. `command` is the name of the command ("bench"), `line` the redacted command line."""

    command: str
    line: str = ""
    target: str = ""
    slo: str = ""
    seed: int = 0
    started: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    penstock: str = __version__
    schema: int = SCHEMA

    @classmethod
    def of_process(cls, command: str, target: str, slo: str, seed: int, libraries: Sequence[str]) -> Self:
        """The origin of results that this process starts to measure."""
        return cls(
            command=command,
            line=command_line(sys.argv[1:]),
            target=target,
            slo=slo,
            seed=seed,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine(),
            versions=versions(libraries),
        )

    @property
    def busy(self) -> str:
        """A caveat if the machine was busy before the run; else ""."""
        load, cores = self.machine.get("load_before", 0.0), self.machine.get("cores", 1)
        return f"the machine was busy before the run began: load {load:g} on {cores} cores" if load > cores / 2 else ""


def machine() -> dict[str, Any]:
    """CPU, usable cores, memory, system, names of GPUs, and the load average of the last minute."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    cpu = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": [name for (_, name), *_ in Gpus().read()],
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(libraries: Sequence[str] = ()) -> dict[str, str]:
    """The versions of Python, Penstock (with its commit in a checkout) and the installed ones of `libraries`."""
    found = {"python": platform.python_version()}
    for name in (*_LIBRARIES, *libraries):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if commit := _commit():
        found["penstock"] = f"{found.get('penstock', '')} ({commit})".strip()
    return found


def _commit() -> str:
    """The commit of the checkout with this file; "" for an installed package, even inside another checkout."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists() or not (root / "src" / "penstock").is_dir():
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def redacted(text: str) -> str:
    """The text with *** for the values of names such as `api_key` or `access_token`, and for users in URLs."""
    return _USER.sub(f"{HIDDEN}@", _INSIDE.sub(rf"\1{HIDDEN}", plain(text)))


def command_line(words: Sequence[str]) -> str:
    """The redacted command line `penstock WORDS`, quoted for a shell."""
    return shlex.join(["penstock", *map(_redacted_word, words)])


def _redacted_word(word: str) -> str:
    setting = _SETTING.fullmatch(word)  # in KEY=VALUE everything after the sign is the value
    return plain(setting[1]) + HIDDEN if setting else redacted(word)


# ---- the folder

log = logging.getLogger("penstock.perf")

RUN, RECORDS, SUMMARY = "run.json", "records.jsonl", "summary.csv"
_SAME: Final = ("command", "target", "slo", "seed", "penstock")  # must agree when a run is resumed
_FULL: Final = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the limit on file sizes is reached",
}


class NotWritten(PenstockError, code="not_written"):
    """A results folder cannot be written."""


class Results:
    """An open results folder; a context manager. Use `Results.open`.

    `measurements` holds all measurements of the folder in order, including earlier starts.
    """

    def __init__(self, folder: Path, origin: Origin, measurements: Sequence[Measurement], records: io.FileIO) -> None:
        self.folder, self.origin = folder, origin
        self.measurements = list(measurements)
        self._records = records

    @classmethod
    def open(cls, folder: Path | str, origin: Origin, *, resume: bool = False) -> Self:
        """Opens or creates the folder. `resume` allows a folder that already holds this run.

        Raises ConfigError for a folder with another run, machine, version, schema or other content; NotWritten.
        """
        folder = Path(folder)
        with writing(folder):
            names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
            if RUN in names:
                if not resume:
                    raise ConfigError(f"{folder} already holds a run; name another folder, or remove this one")
                origin = _same_run(folder, origin)
            elif others := sorted(names - {RECORDS, f".{RUN}.part"}):
                found = f"{folder} has {others[0]}, but no {RUN}"
                raise ConfigError(f"{found}: expected an empty folder or a results folder")
            folder.mkdir(parents=True, exist_ok=True)
            records = open_locked(folder / RECORDS)
            try:
                if RUN not in names:
                    if os.fstat(records.fileno()).st_size:
                        raise ConfigError(f"{folder} has {RECORDS} without {RUN}; name another folder")
                    write_whole(folder / RUN, json_text(origin).encode())
                measurements, length = _measurements(folder / RECORDS)
                records.truncate(length)
                records.seek(length)
            except BaseException:
                records.close()
                raise
        return cls(folder, origin, measurements, records)

    def append(self, measurement: Measurement) -> None:
        """Appends a measurement. Raises NotWritten; earlier measurements stay intact."""
        self.measurements.append(measurement)
        with writing(self.folder):
            append_line(self._records, msgspec.json.encode(measurement))

    def close(self) -> None:
        """Writes the summary. Raises NotWritten."""
        if self._records.closed:
            return
        try:
            with writing(self.folder):
                write_whole(self.folder / SUMMARY, summary(self.measurements).encode())
        finally:
            self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(folder: Path | str) -> tuple[Origin, list[Measurement]]:
    """The origin and the measurements of a folder. Raises ConfigError if it holds no results."""
    folder = Path(folder)
    return _origin(folder), _measurements(folder / RECORDS)[0] if (folder / RECORDS).exists() else []


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file atomically. Raises OSError."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises NotWritten for an OSError."""
    try:
        yield
    except OSError as e:
        raise write_error(folder, e) from e


def write_error(folder: Path, error: OSError) -> NotWritten:
    reason = _FULL.get(error.errno or 0)
    if reason is None:
        return NotWritten(f"cannot write to {folder}: {error.strerror or error}")
    return NotWritten(f"{reason}: {folder} takes no more results. Its content is intact; make room for the next run")


_COLUMNS: Final = (
    "label", "load", "mode", "concurrency", "rate_per_s", "repeat", "started", "seconds", "requests", "answered",
    "errors", "error_share", "throughput_per_s", "goodput_per_s", "mean_s", "p50_s", "p75_s", "p90_s", "p95_s",
    "p99_s", "p99_low_s", "p99_high_s", "p999_s", "max_s", "slo_met", "queue_s", "preprocess_s", "run_s",
    "postprocess_s", "mean_batch", "cpu_cores", "memory_bytes", "generator_cpu", "late_share", "invalid",
)  # fmt: skip


def summary(measurements: Sequence[Measurement]) -> str:
    """The measurements as CSV. Unknown figures, and all figures of invalid measurements, are empty."""
    return as_csv([_COLUMNS, *([row.get(name) for name in _COLUMNS] for row in map(_row, measurements))])


def json_text(value: Any) -> str:
    """The value as indented JSON, with the end of the line."""
    return f"{msgspec.json.format(msgspec.json.encode(value).decode())}\n"


def as_csv(table: Iterable[Sequence[object]]) -> str:
    """The table as CSV; None is empty."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    return out.getvalue()


def _row(m: Measurement) -> dict[str, Any]:
    row = {
        "label": m.label, "load": m.load.label, "mode": m.load.mode, "concurrency": m.load.concurrency,
        "rate_per_s": m.load.rate, "repeat": m.repeat, "started": m.started, "seconds": m.seconds,
        "requests": m.requests, "generator_cpu": m.generator.cpu, "late_share": m.generator.late_share,
        "invalid": "; ".join(m.invalid),
    }  # fmt: skip
    if m.invalid:
        return row
    errors = " ".join(f"{code}:{count}" for code, count in sorted(m.errors.items()))
    figures = {name: figure(m) for name, figure in FIGURES.items()}
    return row | {"answered": m.answered, "errors": errors, "slo_met": m.met} | figures


def open_locked(path: Path) -> io.FileIO:
    """The file, open for reading and writing, locked until closed. Raises OSError, ConfigError."""
    file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another run is writing to {path.parent}; name another folder") from None
    return file


def append_line(file: io.FileIO, line: bytes) -> None:
    """Appends a line, which is on disk when this returns. Raises OSError; the file is then unchanged."""
    rest, start = memoryview(line + b"\n"), file.tell()
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(start)
        file.seek(start)
        raise


def _origin(folder: Path) -> Origin:
    try:
        content = (folder / RUN).read_bytes()
    except OSError as e:
        reason = "there is no such folder" if not folder.is_dir() else f"{RUN}: {e.strerror}"
        raise ConfigError(f"{folder} holds no results: {reason}; expected a folder written with --output") from None
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema == SCHEMA:
            return msgspec.json.decode(content, type=Origin)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ConfigError(f"{folder / RUN} does not describe a run: {e}") from None
    raise ConfigError(
        f"{folder} has results of schema {schema}, this penstock ({__version__}) reads {SCHEMA}; measure again, or use "
        "the version that wrote them"
    )


class _Schema(Struct):
    schema: int


def _same_run(folder: Path, origin: Origin) -> Origin:
    """The folder's origin. Raises ConfigError if it belongs to another run."""
    there = _origin(folder)
    for name, found, expected in [
        *((name, getattr(there, name), getattr(origin, name)) for name in _SAME),
        *((name, there.machine.get(name), origin.machine.get(name)) for name in MACHINE),
    ]:
        if found != expected:
            raise ConfigError(
                f'{folder} has results of another run: its {name} is "{found}", now it is "{expected}"; '
                "name another folder"
            )
    return there


def _measurements(path: Path) -> tuple[list[Measurement], int]:
    """The complete measurements and their size in bytes. Raises ConfigError for an invalid line before the last."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from None
    decoder = msgspec.json.Decoder(Measurement)
    found: list[Measurement] = []
    start = number = 0
    while (end := content.find(b"\n", start)) >= 0:
        number += 1
        try:
            found.append(decoder.decode(content[start:end]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            if end + 1 < len(content):
                raise ConfigError(f"{path}, line {number}: not a measurement: {e}") from None
            break
        start = end + 1
    if start < len(content):
        log.warning("file=%s bytes=%d dropped=true reason=the last line is truncated", path, len(content) - start)
    return found, start
