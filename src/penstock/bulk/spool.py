"""Captions of a job on disk: a spool for each video, in a work folder that is locked for one job.

A spool has one line each for the video, its rows in frame order, numbered without gaps, and how the video ended. It
only grows. An incomplete line and everything after it count as never written; those rows are captioned again.
"""

from __future__ import annotations

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

    def add(self, row: CaptionRow) -> None:
        if row.error:
            self.errors += 1
            if self.errors == 1:
                self.frame, self.error = row.frame, row.error
        self.tokens = plus(self.tokens, row.tokens)


def plus(tokens: tuple[int, int], more: tuple[int, int] | None, times: int = 1) -> tuple[int, int]:
    """Sums of tokens; a row whose server does not count them has None."""
    return tokens if more is None else (tokens[0] + times * more[0], tokens[1] + times * more[1])


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


class SpoolState(Struct):
    """The valid content of a spool: its video, number of rows, last position, end, size in bytes, and gaps.

    `similar` counts the near-duplicates so far, and `answer` is the last row's. `failing` are the rows with an error by
    number, and `before` is the last captioned frame before the first of them. A `complete` video was once read to its
    end; `seen` is of its last end.
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
    failing: dict[int, CaptionRow] = {}
    before: Position | None = None
    complete: bool = False
    seen: int = 0

    def is_of(self, video: Video) -> bool:
        """Whether the video file is unchanged since its rows were made."""
        return self.head == _head_of(video)

    def failed_requests(self) -> dict[int, list[CaptionRow]]:
        """The rows with an error by the frame whose request failed: its own, and those that carry its caption."""
        rows = sorted(self.failing.items())
        return {line.frame: _carriers(self.failing, number) for number, line in rows if not line.carried}

    @property
    def failed(self) -> bool:
        return self.end is not None and self.end.end == "failed"


_decode_head = msgspec.json.Decoder(SpoolHead).decode
_decode_end = msgspec.json.Decoder(SpoolEnd).decode
_decode_row = msgspec.json.Decoder(CaptionRow).decode
_INVALID = (msgspec.DecodeError, UnicodeDecodeError)


def _head_of(video: Video) -> SpoolHead:
    return SpoolHead(video.name, video.bytes, video.mtime_ns)


def head_line(video: Video) -> bytes:
    return line_of(_head_of(video))


def line_of(value: SpoolHead | CaptionRow | SpoolEnd) -> bytes:
    return msgspec.json.encode(value) + b"\n"


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


def scan(path: Path) -> SpoolState | None:
    """The valid content, read from the beginning; None if there is none. Raises SpoolError."""
    try:
        with path.open("rb") as file:
            first = file.readline(TAIL_BYTES)
            if not first.endswith(b"\n"):
                return None
            state = SpoolState(_decode_head(first), bytes=len(first))
            for line in file:
                if not (line.endswith(b"\n") and (_add_row(state, line) or _add_end(state, line))):
                    break
                state.bytes += len(line)
    except (FileNotFoundError, *_INVALID):
        return None
    except OSError as e:
        raise SpoolError(f"cannot read {path}: {e.strerror}") from e
    tokens, state.tally = state.tally.tokens, Tally()
    for _, row in sorted(state.failing.items()):
        state.tally.add(row)
    state.tally.tokens = tokens
    return state


def _add_row(state: SpoolState, line: bytes) -> bool:
    """Whether a line is the next valid one and a row, which it adds."""
    try:
        row = _decode_row(line)
    except _INVALID:
        return False
    last = state.last
    if row.row < state.rows:
        old = state.failing.get(row.row)
        if old is None or old.frame != row.frame:
            return False
        state.tally.tokens = plus(state.tally.tokens, old.tokens, -1)
        for failed in _carriers(state.failing, row.row):
            del state.failing[failed.row]
            if row.error:
                state.failing[failed.row] = with_answer(failed, row)
        newest = last is not None and row.frame == last.frame
    else:
        if row.row > state.rows or (last is not None and row.frame <= max(last.frame, last.carried_to)):
            return False
        if row.error and not state.failing:
            state.before = last
        if row.error:
            state.failing[row.row] = row
        if not row.carried:
            state.last = Position(row.frame, row.pts, 1 + (last.taken if last else 0))
        elif last is not None:
            state.last = replace(last, carried_to=row.frame)
        state.rows += 1
        state.gaps += row.gaps
        state.similar += row.similar + row.carried
        newest = True
    state.tally.tokens = plus(state.tally.tokens, row.tokens)
    state.answer = Answer(row.caption, row.error) if newest else state.answer
    state.end = None
    return True


def _carriers(failing: dict[int, CaptionRow], number: int) -> list[CaptionRow]:
    """A row with an error and those that carry its caption."""
    found = [failing[number]]
    while (follower := failing.get(number + len(found))) is not None and follower.carried:
        found.append(follower)
    return found


def _add_end(state: SpoolState, line: bytes) -> bool:
    """Whether a line is valid and an end, which it adds."""
    try:
        end = _decode_end(line)
    except _INVALID:
        return False
    if end.rows != state.rows:
        return False
    state.end, state.gaps, state.similar, state.seen = end, end.gaps, end.similar, end.seen
    state.attempts = end.attempts if state.failed else state.attempts
    state.complete = state.complete or not state.failed
    return True


def rows(path: Path) -> Iterator[CaptionRow]:
    """The rows of a spool whose video has ended. Raises SpoolError."""
    try:
        count, later = 0, dict[int, CaptionRow]()  # those that replace others
        for row in _rows(path):
            if row.row == count:
                count += 1
            else:
                later[row.row] = row
        count, shown = 0, None  # the row whose caption is carried, if it replaces another
        for row in _rows(path):
            if row.row == count:
                count += 1
                shown = shown if row.carried else later.get(row.row)
                yield row if shown is None else with_answer(row, shown)
    except (OSError, *_INVALID) as e:
        raise SpoolError(f"cannot read {path}: {e}; start again with --restart") from e


def _rows(path: Path) -> Iterator[CaptionRow]:
    with path.open("rb") as file:
        file.readline()
        for line in file:
            if not line.startswith(b'{"end":'):
                yield _decode_row(line)


def with_answer(row: CaptionRow, of: CaptionRow | Answer) -> CaptionRow:
    """The row with another answer, whose tokens count once if it is carried."""
    tokens = None if row.carried else of.tokens
    return replace(row, caption=of.caption, error=of.error, tokens=tokens)


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
