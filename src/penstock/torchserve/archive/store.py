"""The model store: what a name or URL means, and archives unpacked for use.

All of it blocks (disk, network): on a loop, call it in a thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

from penstock.errors import ArchiveError, ConfigError
from penstock.torchserve.archive.errors import ArchiveExists, ArchiveNotFound, UrlForbidden
from penstock.torchserve.archive.mar import Archive, read_folder, unpack_archive
from penstock.torchserve.archive.names import check_name
from penstock.torchserve.archive.safe_unpack import LIMITS, Limits

_URL: Final = re.compile(r"(?:file|https?)://.*", re.DOTALL)


class Unpacked:
    """An archive in use: its files stay where they are until `close`, after which the last user's are removed.

    `digest` is the SHA-256 of the archive, "" of a folder that is used where it is.
    """

    def __init__(self, archive: Archive, digest: str = "", cached: Path | None = None, in_use: int = -1) -> None:
        self.archive = archive
        self.digest = digest
        self._cached = cached
        self._in_use = in_use

    def close(self) -> None:
        """Gives the files back. A second call does nothing."""
        cached, self._cached = self._cached, None
        if cached is None:
            return
        with _alone(cached) as lock:
            try:
                fcntl.flock(self._in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # someone else, perhaps another process, uses it too
                pass
            else:
                _remove(cached)
                lock.unlink()
            finally:
                os.close(self._in_use)

    def __enter__(self) -> Unpacked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ModelStore:
    """The archives of one folder, `root` (None: not configured), and of the URLs that are allowed.

    `allowed_urls` are regular expressions of which one must match a whole URL; a folder or a file outside the store
    is matched by its path and as file://PATH. Archives are unpacked below `cache`, which is this user's alone and may
    be shared by processes; each is there once, however often it is used. Raises ConfigError, ArchiveError.
    """

    def __init__(
        self, root: Path | None, *, allowed_urls: Sequence[str] = (), cache: Path | None = None, limits: Limits = LIMITS
    ) -> None:
        self.root = None if root is None else root.resolve()
        self.allowed_urls = list(allowed_urls)
        for pattern in allowed_urls:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"allowed_urls: {pattern!r} is no regular expression: {e}") from None
        self.cache = _private_folder(cache or _default_cache())
        self.limits = limits

    def names(self) -> list[str]:
        """What the store holds, by name: .mar files and folders, not what is hidden."""
        if self.root is None:
            return []
        entries = [e for e in os.scandir(self.root) if not e.name.startswith(".")]
        return sorted(e.name for e in entries if e.is_dir() or (e.is_file() and e.name.endswith(".mar")))

    def open(self, url: str, *, name: str = "", sha256: str = "", s3_sse_kms: bool = False) -> Unpacked:
        """The archive that the URL means, unpacked; close it when its files are not used any more.

        `name` is the model's where there is no manifest. Raises what `locate` raises, and ArchiveError for what the
        archive breaks; what was downloaded for it is then removed.
        """
        path = self.locate(url, sha256=sha256, s3_sse_kms=s3_sse_kms)
        try:
            return self._unpacked(path, name)
        except BaseException:
            self.forget(url)
            raise

    def locate(self, url: str, *, sha256: str = "", s3_sse_kms: bool = False) -> Path:
        """Where the archive is on this machine; one behind http(s) is downloaded into the store first.

        A bare name is a file or folder of the store; of other local paths only folders are taken, where they are.
        `sha256` is what a download must have. Raises ArchiveNotFound, UrlForbidden, ArchiveExists, DownloadFailed, with
        TorchServe's texts.
        """
        if self.root is None:
            raise ArchiveNotFound("Model store has not been configured.")
        if not url:
            raise ArchiveNotFound("empty url")
        if ".." in url:
            raise ArchiveNotFound(f"Relative path is not allowed in url: {url}")
        if _URL.fullmatch(url):
            return self._behind(url, sha256, s3_sse_kms)
        stored = self.root / _file_name(url, url)
        if os.path.isfile(stored):
            return self._permitted(stored, url)
        for folder in (Path(url), stored) if "/" in url else (stored, Path(url)):
            if os.path.isdir(folder) and folder.resolve() != self.root:
                return self._permitted(folder, url)
        raise ArchiveNotFound(f"Model not found at: {url}")

    def forget(self, url: str) -> None:
        """Removes what was downloaded for a URL that was opened, if anything was: its name is then free again."""
        if self.root is not None and url.startswith(("http://", "https://")):
            (self.root / _file_name(urlsplit(url).path, url)).unlink(missing_ok=True)

    def _behind(self, url: str, sha256: str, s3_sse_kms: bool) -> Path:
        assert self.root is not None
        self._check_allowed(url, [url])
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ArchiveNotFound(f"Model not found at: {url}") from None
        target = self.root / _file_name(parts.path, url)
        if os.path.lexists(target):
            raise ArchiveExists(f"Model file already exists {target.name}")
        if parts.scheme == "file":
            path = Path(unquote(parts.path))
            if parts.netloc not in ("", "localhost") or not os.path.isfile(path):
                raise ArchiveNotFound(f"Model not found at: {url}")
            return self._permitted(path, url)
        from penstock.torchserve.archive.download import download

        download(url, target, self.allowed_urls, sha256=sha256, sign_s3=s3_sse_kms, max_bytes=self.limits.total_bytes)
        return target

    def _permitted(self, path: Path, url: str) -> Path:
        """The path without links. Raises UrlForbidden if it is outside the store and no allowed URL matches it."""
        assert self.root is not None
        real = path.resolve()
        if not real.is_relative_to(self.root):
            self._check_allowed(url, [str(real), f"file://{real}"])
        return real

    def _check_allowed(self, url: str, forms: Sequence[str]) -> None:
        if not any(re.fullmatch(pattern, form) for pattern in self.allowed_urls for form in forms):
            raise UrlForbidden(f"Given URL {url} does not match any allowed URL(s)")

    def _unpacked(self, path: Path, name: str) -> Unpacked:
        if path.is_dir():
            return Unpacked(read_folder(path, name=name or path.name))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            return self._cached(digest, file, path.name, name)

    def _cached(self, digest: str, file: BinaryIO, file_name: str, name: str) -> Unpacked:
        cached = self.cache / digest
        with _alone(cached) as lock:
            try:
                if not cached.exists():
                    _remove_leftovers(cached)
                    unpack_archive(file, file_name, cached, limits=self.limits)
                archive = read_folder(cached, name=name or file_name)
            except BaseException:
                if not cached.exists():
                    lock.unlink()
                raise
            in_use = os.open(cached, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(in_use, fcntl.LOCK_SH)  # at once: only who holds `lock` asks for more
        return Unpacked(archive, digest, cached, in_use)


def _remove(cached: Path) -> None:
    """Removes the folder; if that is cut short, what is left is not under the folder's name."""
    cached.rename(cached.with_name(f".{cached.name}.{os.getpid()}"))
    _remove_leftovers(cached)


def _remove_leftovers(cached: Path) -> None:
    """Removes what is half made or half removed, also by a process that was killed. Only for who is `_alone`."""
    for folder in cached.parent.glob(f".{cached.name}.*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(cached: Path) -> Iterator[Path]:
    """Makes this thread the only one, of all processes, that makes or removes this folder; yields the lock's path."""
    path = cached.with_suffix(".lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):  # nobody removed it meanwhile
                yield path
                return
        finally:
            os.close(lock)


def _file_name(path: str, url: str) -> str:
    """The last part of a path, as a name in the store."""
    name = unquote(path).rstrip("/").rpartition("/")[2]
    try:
        return check_name(name)
    except ArchiveError:
        raise ArchiveNotFound(f"Model not found at: {url}") from None


def _default_cache() -> Path:
    return Path(tempfile.gettempdir()).resolve() / f"penstock-{os.getuid()}" / "models"


def _private_folder(path: Path) -> Path:
    """The folder, made if need be. Raises ArchiveError if other users could put something into it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    above, found = os.lstat(path.parent), os.lstat(path)
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    kept = not above.st_mode & 0o022 or above.st_mode & stat.S_ISVTX  # nobody else can put another in its place
    if not (mine and kept and stat.S_ISDIR(above.st_mode) and above.st_uid in (0, os.getuid())):
        raise ArchiveError(f"the cache of models {path} is not this user's alone: remove it, or name another")
    return path
