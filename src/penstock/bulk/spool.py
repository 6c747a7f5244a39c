"""Captions of a job on disk: a spool for each video, in a work folder that is locked for one job.

A spool has one line each for the video, its rows in frame order, numbered without gaps, and how the video ended. It
only grows. An incomplete line and everything after it count as never written; those rows are captioned again.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.bulk.types import Answer, CaptionRow, Gap, Pixels, Position, Sampling, Video
from penstock.core.os_threads import atomic_file
from penstock.errors import PenstockError

TAIL_BYTES = 65536  # usually holds the last line


class SpoolError(PenstockError, code="spool_error"):
    """A spool cannot be read or written; committed rows stay."""


class SpoolHead(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line: the video file as it was when its captioning began."""

    video: str
    bytes: int
    mtime_ns: int


class Tally(Struct, omit_defaults=True):
    """Sums over the rows of a video: those with an error, the frame and the error of the first of them, and tokens."""

    errors: int = 0
    frame: int | None = None
    error: str = ""
    tokens: tuple[int, int] = (0, 0)

    def add(self, row: CaptionRow | _Line) -> None:
        if row.error:
            self.errors += 1
            if self.errors == 1:
                self.frame, self.error = row.frame, row.error
        if row.tokens is not None:
            self.tokens = self.tokens[0] + row.tokens[0], self.tokens[1] + row.tokens[1]


class SpoolEnd(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The last line of a video that was read to its end or failed; its `rows` are kept in both cases.

    `seen` counts decoded frames, and lost ones before the last of them. A later attempt may append more rows and
    another end; `attempts` counts them. `gaps` are all gaps of the video, `similar` counts all near-duplicates, and
    `tally` is of all rows.
    """

    end: Literal["complete", "failed"]
    rows: int
    seen: int = 0
    attempts: int = 1
    stage: str = ""
    frame: int | None = None
    error: str = ""
    gaps: list[Gap] = []
    similar: int = 0
    tally: Tally = msgspec.field(default_factory=Tally)


class _Line(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    row: int
    frame: int
    time: float
    pts: int | None
    caption: str
    gaps: list[Gap] = []  # that became known since the row before
    similar: int = 0  # near-duplicates without a row before it
    carried: bool = False  # the caption is the one of the row before
    error: str = ""
    tokens: tuple[int, int] | None = None


class SpoolState(Struct, frozen=True):
    """The valid content of a spool: its video, number of rows, last position, end, size in bytes, and gaps.

    `similar` counts the near-duplicates so far, and `answer` is the last row's.
    """

    head: SpoolHead
    rows: int = 0
    last: Position | None = None
    end: SpoolEnd | None = None
    attempts: int = 0
    bytes: int = 0
    gaps: list[Gap] = []
    similar: int = 0
    answer: Answer = Answer()  # of the last row
    tally: Tally = msgspec.field(default_factory=Tally)

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


def row_line(
    number: int, row: CaptionRow, gaps: list[Gap] | None = None, similar: int = 0, *, carried: bool = False
) -> bytes:
    """The line of row `number` of the video, counted from 0.

    `gaps` became known since the row before, and so many `similar` frames were dropped; a `carried` row is of such a
    frame, with the caption of the row before.
    """
    line = _Line(
        number, row.frame, row.time_s, row.pts, row.caption, gaps or [], similar, carried, row.error, row.tokens
    )
    return _encode(line) + b"\n"


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
            size = start = file.seek(0, os.SEEK_END)
            tail = b""
            while start and b"\n" not in tail[:-1]:  # an end with many gaps is long
                start, stop = max(0, start - TAIL_BYTES), start
                file.seek(start)
                tail = file.read(stop - start) + tail
        if not tail.endswith(b"\n"):
            return None
        end = _decode_end(tail[tail.rfind(b"\n", 0, -1) + 1 :])
    except (FileNotFoundError, *_INVALID):
        return None
    except OSError as e:
        raise SpoolError(f"cannot read {path}: {e.strerror}") from e
    attempts = end.attempts if end.end == "failed" else 0
    return SpoolState(head, end.rows, None, end, attempts, size, end.gaps, end.similar, tally=end.tally)


def scan(path: Path, *, until_error: bool = False) -> SpoolState | None:
    """The valid content, read from the beginning; None if there is none. `until_error` ends it before the first row
    with an error. Raises SpoolError."""
    try:
        with path.open("rb") as file:
            first = file.readline(TAIL_BYTES)
            if not first.endswith(b"\n"):
                return None
            state = SpoolState(_decode_head(first), bytes=len(first))
            for line in file:
                if (extended := _with_line(state, line)) is None:
                    break
                if until_error and extended.tally.errors:
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
        last = state.last
        if row.row != state.rows or (last is not None and row.frame <= max(last.frame, last.carried_to)):
            return None
        if not row.carried:
            last = Position(row.frame, row.pts, 1 + (last.taken if last else 0))
        elif last is not None:
            last = replace(last, carried_to=row.frame)
        gaps = state.gaps + row.gaps if row.gaps else state.gaps
        similar = state.similar + row.similar + row.carried
        tally = state.tally
        if row.error or row.tokens:
            tally = copy.copy(tally)
            tally.add(row)
        answer = Answer(row.caption, row.error)
        return SpoolState(state.head, row.row + 1, last, None, state.attempts, size, gaps, similar, answer, tally)
    try:
        end = _decode_end(line)
    except _INVALID:
        return None
    if end.rows != state.rows:
        return None
    attempts = end.attempts if end.end == "failed" else state.attempts
    return SpoolState(
        state.head, state.rows, state.last, end, attempts, size, end.gaps, end.similar, state.answer, state.tally
    )


def rows(path: Path) -> Iterator[CaptionRow]:
    """The rows of a spool whose video has ended. Raises SpoolError."""
    try:
        with path.open("rb") as file:
            file.readline()
            for line in file:
                if line.startswith(b'{"row":'):
                    found = _decode_line(line)
                    yield CaptionRow(found.frame, found.time, found.pts, found.caption, found.error, found.tokens)
    except (OSError, *_INVALID) as e:
        raise SpoolError(f"cannot read {path}: {e}; start again with --restart") from e


# ---- the work folder

FORMAT = 1  # of the spools, and of how frames are sampled and scaled
MODEL_KEYS = ("model", "revision", "prompt", "max_new_tokens", "precision")  # of the server's parameters
REQUEST = "request"  # the key of what a request to OpenAI's API says besides

Fingerprint = dict[str, Any]


class FingerprintDiffers(PenstockError, code="fingerprint_differs"):
    """The work folder holds captions that another configuration made."""


class FolderError(PenstockError, code="work_folder"):
    """The work folder cannot be used: another job holds it, or the disk fails."""


def fingerprint(parameters: dict[str, Any], sampling: Sampling, pixels: Pixels) -> Fingerprint:
    """Everything that changes captions, from the server's `parameters` and the job.

    Two jobs may share rows only if their fingerprints are equal. Servers and chunk sizes are not part of it.
    """
    model = {key: parameters.get(key) for key in MODEL_KEYS}
    if REQUEST in parameters:
        model[REQUEST] = parameters[REQUEST]
    form: Fingerprint = {"pixels": pixels.mode, "kernel": pixels.kernel, "height": pixels.height, "width": pixels.width}
    form |= {"tone_map": pixels.tone_map or None, "deinterlace": pixels.deinterlace or None}
    form |= {"decoder": None if pixels.decoder == "pyav" else pixels.decoder}
    if pixels.mode == "source":
        form["kernel"] = None  # the client scales nothing
    # jobs of earlier versions lack the newer fields
    frames = {key: None if value is False else value for key, value in msgspec.structs.asdict(sampling).items()}
    return {"format": FORMAT} | model | frames | form


def fingerprint_digest(of: Fingerprint) -> str:
    """Eight hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(of, order="sorted")).hexdigest()[:8]


def differences(old: Fingerprint, new: Fingerprint) -> list[str]:
    """A line for each field that differs."""
    return [
        f"{key}: was {_text(old, key)}, is {_text(new, key)}"
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]


def _text(of: Fingerprint, key: str) -> str:
    return msgspec.json.encode(of[key]).decode() if of.get(key) is not None else "not set"


class _VideoLine(Struct, frozen=True):
    """A video of the list. Its path is bytes because it need not be valid text."""

    path: bytes
    name: str
    size_bytes: int
    mtime_ns: int


class WorkFolder:
    """`<output>.work`, locked for one job until `close` or the end of its process. Raises FolderError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            (path / "spool").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise FolderError(f"cannot make the work folder {path}: {e.strerror}") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._lock)
            if isinstance(e, BlockingIOError):
                raise FolderError(f"another job uses {path}; wait for it, or choose another output") from None
            raise FolderError(f"cannot lock {path}: {e.strerror}; put the output on a disk that supports locks") from e

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._lock)

    def spool(self, video: Video) -> Path:
        return self.path / "spool" / f"{spool_key(video)}.jsonl"

    def require(self, new: Fingerprint, *, restart: bool) -> None:
        """Accepts a folder with the same fingerprint; empties it first if `restart`.

        Raises FingerprintDiffers, FolderError.
        """
        file = self.path / "job.json"
        if restart:
            file.unlink(missing_ok=True)
        old = self.fingerprint()
        if old is None:
            self._clear()  # spools without a fingerprint are of unknown origin
            write_atomically(file, msgspec.json.format(msgspec.json.encode({"fingerprint": new})) + b"\n")
        elif found := differences(old, new):
            raise FingerprintDiffers(
                f"{self.path} has captions of another configuration, which these must not be mixed with:\n  "
                + "\n  ".join(found)
                + "\nGive --restart to discard them, or another output"
            )

    def _clear(self) -> None:
        try:
            shutil.rmtree(self.path / "spool")
            (self.path / "spool").mkdir()
        except OSError as e:
            raise FolderError(f"cannot empty {self.path / 'spool'}: {e.strerror}") from e

    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the folder's captions, or None if it has none yet. Raises FolderError."""
        return _fingerprint_in(self.path)

    def own(self, files: Iterable[Path], *, now: bool = True) -> None:
        """Records outputs before they are written; not `now`, because another job may write them first.

        Raises FolderError if one exists that no run of this job wrote.
        """
        names = {os.path.relpath(file, self.path.parent): file for file in files}
        known = self._owned(names)
        if foreign := next((file for name, file in names.items() if name not in known and os.path.lexists(file)), None):
            raise FolderError(f"'{foreign}' exists, and this job did not write it: move it away, or name another file")
        self._record(known | set(names) if now else known)

    def remove(self, file: Path) -> None:
        """Removes an output if this job wrote it. Raises FolderError."""
        name, known = os.path.relpath(file, self.path.parent), self._owned(())
        if name in known:
            try:
                file.unlink(missing_ok=True)
            except OSError as e:
                raise FolderError(f"cannot remove {file}: {e.strerror}") from e
            self._record(known - {name})

    def _owned(self, names: Iterable[str]) -> set[str]:
        """The names of the outputs that this job wrote; `names` if an earlier version kept no record."""
        record = self.path / "outputs.json"
        try:
            return msgspec.json.decode(record.read_bytes(), type=set[str])
        except FileNotFoundError:
            return set(names) if self.fingerprint() else set()
        except (OSError, msgspec.DecodeError) as e:
            raise FolderError(f"cannot read {record}: {e}; delete it to let the job replace its outputs") from e

    def _record(self, names: set[str]) -> None:
        write_atomically(self.path / "outputs.json", msgspec.json.encode(sorted(names)))

    def save_videos(self, videos: Iterable[Video]) -> None:
        """Saves the list of videos for a later run without inputs. Raises FolderError."""
        lines = (_VideoLine(os.fsencode(v.path), v.name, v.bytes, v.mtime_ns) for v in videos)
        write_atomically(self.path / "videos.jsonl", b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def videos(self) -> list[Video]:
        """The list that was saved last. Raises FolderError."""
        file = self.path / "videos.jsonl"
        decode = msgspec.json.Decoder(_VideoLine).decode
        try:
            with file.open("rb") as lines:
                found = [decode(line) for line in lines]
            return [Video(os.fsdecode(v.path), v.name, v.size_bytes, v.mtime_ns) for v in found]
        except FileNotFoundError:
            raise FolderError(f"no videos are named, and there was no run before with {self.path}; name some") from None
        except (OSError, msgspec.DecodeError) as e:
            raise FolderError(f"no videos are named, and {file} cannot be read: {e}; name them again") from e


def _fingerprint_in(folder: Path) -> Fingerprint | None:
    file = folder / "job.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Fingerprint])["fingerprint"]
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, KeyError) as e:
        raise FolderError(f"cannot read {file}: {e}; --restart begins anew") from e


def request_of(spools: Sequence[tuple[Video, Path]]) -> dict[str, Any] | None:
    """What requests to OpenAI's API said besides the images of these videos; None if they went to another API.

    Raises FolderError.
    """
    found = _fingerprint_in(spools[0][1].parents[1]) if spools else None
    return None if found is None else found.get(REQUEST)


def spool_key(video: Video) -> str:
    return hashlib.sha256(video.name.encode()).hexdigest()[:32]


def write_atomically(path: Path, data: bytes) -> None:
    """Raises FolderError."""
    try:
        with atomic_file(path) as file:
            file.write(data)
    except OSError as e:
        raise FolderError(f"cannot write {path}: {e.strerror}") from e
