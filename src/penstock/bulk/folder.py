"""The work folder of a job: its fingerprint, its list of videos, a spool for each, and a lock against a second job."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.bulk.fingerprint import Fingerprint, FingerprintDiffers, differences
from penstock.bulk.outputs import whole
from penstock.bulk.types import Video
from penstock.errors import PenstockError


class FolderError(PenstockError):
    """The work folder cannot be used: another job has it, or the disk refuses."""

    code = "work_folder"


class _Kept(Struct, frozen=True):
    """A video of the list. A path need not be text, so it is kept as bytes."""

    path: bytes
    name: str
    size_bytes: int
    mtime_ns: int


class WorkFolder:
    """`<output>.work`. Held by one job at a time, as long as its process lives. Raises FolderError."""

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
            raise FolderError(f"cannot lock {path}: {e.strerror}; put the output on a disk that has locks") from e

    def close(self) -> None:
        """Lets another job in."""
        os.close(self._lock)

    def spool(self, video: Video) -> Path:
        """Where the captions of a video are."""
        return self.path / "spool" / f"{key(video)}.jsonl"

    def agree(self, now: Fingerprint, *, restart: bool) -> None:
        """Goes on if the folder's captions were made with the same fingerprint, or is emptied if `restart`.

        Raises FingerprintDiffers, FolderError.
        """
        file = self.path / "job.json"
        if restart:
            file.unlink(missing_ok=True)
        was = self.fingerprint()
        if was is None:
            self._clear()  # captions of which nobody knows how they were made
            replace(file, msgspec.json.format(msgspec.json.encode({"fingerprint": now})) + b"\n")
        elif found := differences(was, now):
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
        """That of the folder's captions; None if there are none yet. Raises FolderError."""
        file = self.path / "job.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Fingerprint])["fingerprint"]
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, KeyError) as e:
            raise FolderError(f"cannot read {file}: {e}; --restart begins anew") from e

    def keep(self, videos: Iterable[Video]) -> None:
        """Notes the list of videos, for a later run that names none. Raises FolderError."""
        encode = msgspec.json.Encoder().encode
        kept = (_Kept(os.fsencode(v.path), v.name, v.bytes, v.mtime_ns) for v in videos)
        replace(self.path / "videos.jsonl", b"".join(encode(k) + b"\n" for k in kept))

    def videos(self) -> list[Video]:
        """The list that was kept last. Raises FolderError."""
        file = self.path / "videos.jsonl"
        decode = msgspec.json.Decoder(_Kept).decode
        try:
            with file.open("rb") as lines:
                found = [decode(line) for line in lines]
            return [Video(os.fsdecode(k.path), k.name, k.size_bytes, k.mtime_ns) for k in found]
        except FileNotFoundError:
            raise FolderError(f"no videos are named, and there was no run before with {self.path}; name some") from None
        except (OSError, msgspec.DecodeError) as e:
            raise FolderError(f"no videos are named, and {file} cannot be read: {e}; name them again") from e


def key(video: Video) -> str:
    """The name of a video's spool."""
    return hashlib.sha256(video.name.encode()).hexdigest()[:32]


def replace(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all. Raises FolderError."""
    try:
        with whole(path) as file:
            file.write(data)
    except OSError as e:
        raise FolderError(f"cannot write {path}: {e.strerror}") from e
