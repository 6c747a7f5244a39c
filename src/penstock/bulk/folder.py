"""The work folder of a job: the fingerprint of its configuration, its videos, their spools, and a lock."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from penstock.bulk.outputs import atomic_file
from penstock.bulk.types import Pixels, Sampling, Video
from penstock.errors import PenstockError

FORMAT = 1  # of the spools, and of how frames are sampled and scaled
MODEL_KEYS = ("model", "revision", "prompt", "max_new_tokens", "precision")  # of the server's parameters

Fingerprint = dict[str, Any]


class FingerprintDiffers(PenstockError):
    """The work folder holds captions that another configuration made."""

    code = "fingerprint_differs"


class FolderError(PenstockError):
    """The work folder cannot be used: another job holds it, or the disk fails."""

    code = "work_folder"


def fingerprint(parameters: dict[str, Any], sampling: Sampling, pixels: Pixels) -> Fingerprint:
    """Everything that changes captions, from the server's `parameters` and the job.

    Two jobs may share rows only if their fingerprints are equal. Servers and chunk sizes are not part of it.
    """
    model = {key: parameters.get(key) for key in MODEL_KEYS}
    form = {"pixels": pixels.mode, "kernel": pixels.kernel, "height": pixels.height, "width": pixels.width}
    if pixels.mode == "source":
        form["kernel"] = None  # the client scales nothing
    return {"format": FORMAT} | model | msgspec.structs.asdict(sampling) | form


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
        file = self.path / "job.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Fingerprint])["fingerprint"]
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, KeyError) as e:
            raise FolderError(f"cannot read {file}: {e}; --restart begins anew") from e

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


def spool_key(video: Video) -> str:
    return hashlib.sha256(video.name.encode()).hexdigest()[:32]


def write_atomically(path: Path, data: bytes) -> None:
    """Raises FolderError."""
    try:
        with atomic_file(path) as file:
            file.write(data)
    except OSError as e:
        raise FolderError(f"cannot write {path}: {e.strerror}") from e
