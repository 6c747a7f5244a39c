"""Captions of one video on disk: a file that is only appended to, and what of it holds after any interruption.

A line each: the video it belongs to, then its rows in frame order, numbered without a gap, then how it ended. A line
that was not written whole, and all behind it, counts as never written: those rows are captioned again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from penstock.bulk.types import Position, Row, Video
from penstock.errors import PenstockError

TAIL_BYTES = 65536  # a last line is looked for in so much; captions are far shorter


class SpoolError(PenstockError):
    """A spool cannot be read or written; what was committed before stays."""

    code = "spool_error"


class Head(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line: which file the rows are of, as it was when its captioning began."""

    video: str
    bytes: int
    mtime_ns: int


class End(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The last line of a video that was read to its end, or failed; `rows` are kept in both cases.

    `seen` is how many frames were decoded. A later try may append more rows and another end; `attempts` counts them.
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


class Spooled(Struct, frozen=True):
    """What a spool holds: whose it is, how many rows, where to go on, how it ended, and how many bytes of it count."""

    head: Head
    rows: int = 0
    last: Position | None = None
    end: End | None = None
    attempts: int = 0
    bytes: int = 0

    def is_of(self, video: Video) -> bool:
        """Whether the file is still the one whose rows these are."""
        return self.head == head_of(video)


_encode = msgspec.json.encode
_decode_head = msgspec.json.Decoder(Head).decode
_decode_end = msgspec.json.Decoder(End).decode
_decode_line = msgspec.json.Decoder(_Line).decode
_Bad = (msgspec.DecodeError, UnicodeDecodeError)  # a ValidationError is a DecodeError


def head_of(video: Video) -> Head:
    """The head that a spool of this video has."""
    return Head(video.name, video.bytes, video.mtime_ns)


def head_line(video: Video) -> bytes:
    """The first line."""
    return _encode(head_of(video)) + b"\n"


def row_line(number: int, row: Row) -> bytes:
    """The line of row `number` of the video, from 0."""
    return _encode(_Line(number, row.frame, row.time_s, row.pts, row.caption)) + b"\n"


def end_line(end: End) -> bytes:
    """The last line."""
    return _encode(end) + b"\n"


def append(path: Path, lines: bytes, *, anew: bool = False) -> None:
    """Writes the lines so that they outlive a crash of the machine; `anew`: in place of what was there.

    Raises SpoolError.
    """
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if anew else os.O_APPEND)
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


def cut(path: Path, size: int) -> None:
    """Takes away what is behind the lines that hold. Raises SpoolError."""
    try:
        if os.path.getsize(path) > size:
            os.truncate(path, size)
    except OSError as e:
        raise SpoolError(f"cannot mend {path}: {e.strerror}") from e


def glance(path: Path) -> Spooled | None:
    """What a spool says at its two ends, without its rows: `last` is unknown. None: no spool, or not a video's end."""
    try:
        with path.open("rb") as file:
            head = _decode_head(file.readline(TAIL_BYTES))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
        if not tail.endswith(b"\n"):
            return None
        end = _decode_end(tail[tail.rfind(b"\n", 0, -1) + 1 :])
    except (FileNotFoundError, *_Bad):
        return None
    except OSError as e:
        raise SpoolError(f"cannot read {path}: {e.strerror}") from e
    return Spooled(head, end.rows, None, end, end.attempts if end.end == "failed" else 0, size)


def scan(path: Path) -> Spooled | None:
    """What of a spool holds, read from its beginning; None: nothing does. Raises SpoolError."""
    try:
        with path.open("rb") as file:
            first = file.readline(TAIL_BYTES)
            if not first.endswith(b"\n"):
                return None
            found = Spooled(_decode_head(first), bytes=len(first))
            for line in file:
                if (more := _with(found, line)) is None:
                    break
                found = more
            return found
    except (FileNotFoundError, *_Bad):
        return None
    except OSError as e:
        raise SpoolError(f"cannot read {path}: {e.strerror}") from e


def _with(found: Spooled, line: bytes) -> Spooled | None:
    """The same with one more line; None if it does not hold."""
    if not line.endswith(b"\n"):
        return None
    size = found.bytes + len(line)
    try:
        row = _decode_line(line)
    except _Bad:
        pass
    else:
        if row.row != found.rows or (found.last is not None and row.frame <= found.last.frame):
            return None
        last = Position(row.frame, row.pts, row.row + 1)
        return Spooled(found.head, row.row + 1, last, None, found.attempts, size)
    try:
        end = _decode_end(line)
    except _Bad:
        return None
    if end.rows != found.rows:
        return None
    attempts = end.attempts if end.end == "failed" else found.attempts
    return Spooled(found.head, found.rows, found.last, end, attempts, size)


def rows(path: Path) -> Iterator[Row]:
    """The rows of a spool that holds to its end, as outputs are made of. Raises SpoolError."""
    try:
        with path.open("rb") as file:
            file.readline()
            for line in file:
                if line.startswith(b'{"row":'):
                    found = _decode_line(line)
                    yield Row(found.frame, found.time, found.pts, found.caption)
    except (OSError, *_Bad) as e:
        raise SpoolError(f"cannot read {path}: {e}; start again with --restart") from e
