"""The journal of a search: what was measured is on the disk before the search looks at it, and is never asked again.

A search is a function of its seed and of what it measured. So one that was killed asks its way through the journal
again, in no time, goes on where it was, and ends as if it had never stopped.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec
from msgspec import Struct

from penstock._version import __version__
from penstock.errors import ConfigError
from penstock.perf.bench.measurement import SCHEMA
from penstock.perf.bench.results import write_error
from penstock.perf.tune.trial import Curve, Reading

log = logging.getLogger("penstock.tune")

_HEAD: Final = {"penstock": __version__, "schema": str(SCHEMA)}


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of the bench. `key` is what it was asked; `failed` tells why it could not answer."""

    key: str
    reading: Reading | None = None
    curve: Curve | None = None
    failed: str = ""
    cost_s: float = 0.0


class _Head(Struct):
    run: dict[str, str]


class Journal:
    """Answers by what was asked. Without a file they are kept in memory alone."""

    def __init__(
        self, path: Path | None = None, file: io.FileIO | None = None, entries: Mapping[str, Entry] | None = None
    ) -> None:
        self._path, self._file = path or Path(), file
        self._entries = dict(entries or {})

    @classmethod
    def open(cls, path: Path, run: Mapping[str, str], *, resume: bool = True) -> Self:
        """The journal at `path` for the search that `run` describes (target, space, slo, seed ...).

        Without `resume` it begins anew. Raises ConfigError if the file is that of another search or version, holds what
        is no journal, or is in use; PenstockError if it cannot be written.
        """
        head = dict(_HEAD) | dict(run)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        except OSError as e:
            raise write_error(path, e) from e
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = path.read_bytes() if resume else b""
            entries, whole = _read(path, content, head)
            file.truncate(whole)
            file.seek(whole)
            journal = cls(path, file, entries)
            if not whole:
                journal._append(msgspec.json.encode(_Head(head)))
        except BlockingIOError:
            file.close()
            raise ConfigError(f"{path} is being written to by another run; name another folder") from None
        except BaseException:
            file.close()
            raise
        return journal

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """What was answered to this; None if it was not asked."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Keeps an answer; it is on the disk when this returns. Raises PenstockError if it cannot be."""
        self._append(msgspec.json.encode(entry))
        self._entries[entry.key] = entry

    def _append(self, line: bytes) -> None:
        if self._file is None:
            return
        rest, start = memoryview(line + b"\n"), self._file.tell()
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as e:
            self._file.truncate(start)
            self._file.seek(start)
            raise write_error(self._path, e) from e

    def close(self) -> None:
        """Lets the file go; safe to call twice."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(path: Path, content: bytes, head: Mapping[str, str]) -> tuple[dict[str, Entry], int]:
    """All whole entries, and how many bytes they and the head take; a last line that was cut short is none. Nor are
    INVALID readings after the last valid one: what held up the generator may have passed."""
    entries: dict[str, Entry] = {}
    last: dict[str, Entry] = {}  # invalid ones
    start = told = number = 0
    while (end := content.find(b"\n", start)) >= 0:
        number += 1
        line = content[start:end]
        try:
            if number == 1:
                _same(path, msgspec.json.decode(line, type=_Head).run, head)
            else:
                entry = msgspec.json.decode(line, type=Entry)
                last[entry.key] = entry
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}, line {number}: not of a journal ({e}); name another folder") from None
        start = end + 1
        if number == 1 or entry.reading is None or not entry.reading.invalid:
            entries.update(last)
            last.clear()
            told = start
    if start < len(content):
        log.warning("file=%s bytes=%d dropped=true reason=the last line was cut short", path, len(content) - start)
    return entries, told


def _same(path: Path, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for name in dict.fromkeys([*expected, *found]):
        was, now = found.get(name, ""), expected.get(name, "")
        if was != now:
            raise ConfigError(
                f'{path} is of another run: its {name} is "{was}", now it is "{now}"; name another folder, or begin '
                "anew with --no-resume"
            )
