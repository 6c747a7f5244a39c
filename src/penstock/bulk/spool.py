"""Captions of one video on disk: an append-only file, and how much of it is valid after any interruption.

One line each: the video, its rows in frame order, numbered without gaps, and how the video ended. An incomplete line
and everything after it count as never written; those rows are captioned again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from penstock.bulk.types import CaptionRow, Position, Video
from penstock.errors import PenstockError

TAIL_BYTES = 65536  # holds the last line; captions are far shorter


class SpoolError(PenstockError):
    """A spool cannot be read or written; committed rows stay."""

    code = "spool_error"


class SpoolHead(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line: the video file as it was when its captioning began."""

    video: str
    bytes: int
    mtime_ns: int


class SpoolEnd(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The last line of a video that was read to its end or failed; its `rows` are kept in both cases.

    `seen` counts decoded frames. A later attempt may append more rows and another end; `attempts` counts them.
    """

    end: Literal["complete", "failed"]
    rows: int
    seen: int = 0
    attempts: int = 1
    stage: str = ""
    frame: int | None = None
    error: str = ""


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    row: int
    frame: int
    time: float
    pts: int | None
    caption: str


class SpoolState(Struct, frozen=True):
    """The valid content of a spool: its video, number of rows, last position, end, and size in bytes."""

    head: SpoolHead
    rows: int = 0
    last: Position | None = None
    end: SpoolEnd | None = None
    attempts: int = 0
    bytes: int = 0

    def is_of(self, video: Video) -> bool:
        """Whether the video file is unchanged since its rows were made."""
        return self.head == _head_of(video)

    @property
    def failed(self) -> bool:
        return self.end is not None and self.end.end == "failed"


_encode = msgspec.json.encode
_decode_head = msgspec.json.Decoder(SpoolHead).decode
_decode_end = msgspec.json.Decoder(SpoolEnd).decode
_decode_line = msgspec.json.Decoder(_Line).decode
_INVALID = (msgspec.DecodeError, UnicodeDecodeError)


def _head_of(video: Video) -> SpoolHead:
    return SpoolHead(video.name, video.bytes, video.mtime_ns)


def head_line(video: Video) -> bytes:
    return _encode(_head_of(video)) + b"\n"


def row_line(number: int, row: CaptionRow) -> bytes:
    """The line of row `number` of the video, counted from 0."""
    return _encode(_Line(number, row.frame, row.time_s, row.pts, row.caption)) + b"\n"


def end_line(end: SpoolEnd) -> bytes:
    return _encode(end) + b"\n"


def append(path: Path, lines: bytes, *, overwrite: bool = False) -> None:
    """Writes lines that survive a crash of the machine. Raises SpoolError."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if overwrite else os.O_APPEND)
        file = os.open(path, flags, 0o666)
        try:
            left = memoryview(lines)
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as e:
        raise SpoolError(f"cannot write {path}: {e.strerror}; what was committed before stays") from e


def truncate(path: Path, size: int) -> None:
    """Removes everything after the valid lines. Raises SpoolError."""
    try:
        if os.path.getsize(path) > size:
            os.truncate(path, size)
    except OSError as e:
        raise SpoolError(f"cannot repair {path}: {e.strerror}") from e


def read_end(path: Path) -> SpoolState | None:
    """The state of a video that has ended, from the spool's first and last line; `last` stays unknown.

    None if there is no spool or the video has not ended. Raises SpoolError.
    """
    try:
        with path.open("rb") as file:
            head = _decode_head(file.readline(TAIL_BYTES))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
        if not tail.endswith(b"\n"):
            return None
        end = _decode_end(tail[tail.rfind(b"\n", 0, -1) + 1 :])
    except (FileNotFoundError, *_INVALID):
        return None
    except OSError as e:
        raise SpoolError(f"cannot read {path}: {e.strerror}") from e
    return SpoolState(head, end.rows, None, end, end.attempts if end.end == "failed" else 0, size)


def scan(path: Path) -> SpoolState | None:
    """The valid content, read from the beginning; None if there is none. Raises SpoolError."""
    try:
        with path.open("rb") as file:
            first = file.readline(TAIL_BYTES)
            if not first.endswith(b"\n"):
                return None
            state = SpoolState(_decode_head(first), bytes=len(first))
            for line in file:
                if (extended := _with_line(state, line)) is None:
                    break
                state = extended
            return state
    except (FileNotFoundError, *_INVALID):
        return None
    except OSError as e:
        raise SpoolError(f"cannot read {path}: {e.strerror}") from e


def _with_line(state: SpoolState, line: bytes) -> SpoolState | None:
    """The state after one more line; None if the line is invalid."""
    if not line.endswith(b"\n"):
        return None
    size = state.bytes + len(line)
    try:
        row = _decode_line(line)
    except _INVALID:
        pass
    else:
        if row.row != state.rows or (state.last is not None and row.frame <= state.last.frame):
            return None
        last = Position(row.frame, row.pts, row.row + 1)
        return SpoolState(state.head, row.row + 1, last, None, state.attempts, size)
    try:
        end = _decode_end(line)
    except _INVALID:
        return None
    if end.rows != state.rows:
        return None
    attempts = end.attempts if end.end == "failed" else state.attempts
    return SpoolState(state.head, state.rows, state.last, end, attempts, size)


def rows(path: Path) -> Iterator[CaptionRow]:
    """The rows of a spool whose video has ended. Raises SpoolError."""
    try:
        with path.open("rb") as file:
            file.readline()
            for line in file:
                if line.startswith(b'{"row":'):
                    found = _decode_line(line)
                    yield CaptionRow(found.frame, found.time, found.pts, found.caption)
    except (OSError, *_INVALID) as e:
        raise SpoolError(f"cannot read {path}: {e}; start again with --restart") from e
