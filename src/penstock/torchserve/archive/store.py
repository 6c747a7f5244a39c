"""The model store: finds the archive that a name or URL means and keeps it unpacked while it is in use.

An archive is a .mar, a .tar.gz or a folder. Everything here blocks on disk and network: call it in a thread.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from penstock.core.os_threads import temporary_folder
from penstock.errors import ArchiveError, ConfigError
from penstock.torchserve.archive import ArchiveExists, ArchiveNotFound, UrlForbidden
from penstock.torchserve.archive.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    WORKFLOW_MANIFEST,
    Manifest,
    model_name_from,
    parse_manifest,
)
from penstock.torchserve.archive.safe_unpack import LIMITS, UnpackLimits, check_name, unpack

_DOWNLOADS: Final = ("http://", "https://")
_URL: Final = re.compile(r"(?:file|https?)://.*", re.DOTALL)


class Archive(Struct, frozen=True):
    """An unpacked archive. `folder` is the root of its files: the handler's model_dir."""

    folder: Path
    manifest: Manifest
    has_manifest: bool = True


def read_folder(folder: Path, *, name: str = "") -> Archive:
    """The archive in a folder, or in the only folder inside it if that has a manifest.

    Without a manifest the model's name derives from `name`, its version is "1.0", and it has no handler. Raises
    ArchiveError.
    """
    inner = list(folder.iterdir())
    if len(inner) == 1 and any((inner[0] / manifest).is_file() for manifest in (MANIFEST, WORKFLOW_MANIFEST)):
        folder = inner[0]
    manifest = WORKFLOW_MANIFEST if (folder / WORKFLOW_MANIFEST).is_file() else MANIFEST
    try:
        with (folder / manifest).open("rb") as f:
            text = f.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Archive(folder, Manifest(model_name=model_name_from(name or folder.name)), has_manifest=False)
    except OSError as e:
        raise ArchiveError(f"{manifest} cannot be read: {e.strerror}", detail=str(e)) from None
    try:
        return Archive(folder, parse_manifest(text, file_name=name or folder.name))
    except ArchiveError as e:
        raise ArchiveError(e.message.replace(MANIFEST, manifest), detail=e.detail) from None


def unpack_archive(
    file: BinaryIO, file_name: str, target: Path, *, name: str = "", limits: UnpackLimits = LIMITS
) -> Archive:
    """Unpacks an open archive into the new folder `target`: a zip if it is a .mar or .war file, else a .tar.gz.

    `name` names a model without a manifest. Raises ArchiveError and then leaves no `target`.
    """
    unpack(file, target, tar=not file_name.endswith((".mar", ".war")), limits=limits)
    try:
        return read_folder(target, name=name or file_name)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


class UnpackedArchive:
    """An archive in use. Its files stay until `close`; closing the last use removes them.

    `digest` is the archive's SHA-256, "" for a folder, which is used in place.
    """

    def __init__(self, archive: Archive, digest: str = "", cached: Path | None = None, in_use: int = -1) -> None:
        self.archive = archive
        self.digest = digest
        self._cached = cached
        self._in_use = in_use  # a descriptor with a shared lock

    def close(self) -> None:
        """Releases the files. May be called twice."""
        cached, self._cached = self._cached, None
        if cached is None:
            return
        with _exclusive(cached) as lock:
            try:
                fcntl.flock(self._in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # still in use, perhaps by another process
                pass
            else:
                cached.rename(cached.with_name(f".{cached.name}.{os.getpid()}"))  # a crash leaves no partial folder
                _remove_leftovers(cached)
                lock.unlink()
            finally:
                os.close(self._in_use)


class ModelStore:
    """The archives in the folder `root` (None: not configured) and behind the allowed URLs.

    `allowed_urls` are regular expressions; one must match the whole URL. A path outside the store is matched both as a
    path and as file://PATH. Archives are unpacked once into `cache`, which only this user can write and several
    processes can share. Raises ConfigError, ArchiveError.
    """

    def __init__(
        self,
        root: Path | None,
        *,
        allowed_urls: Sequence[str] = (),
        cache: Path | None = None,
        limits: UnpackLimits = LIMITS,
    ) -> None:
        self.root = None if root is None else root.resolve()
        self.allowed_urls = list(allowed_urls)
        for pattern in allowed_urls:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"allowed_urls: {pattern!r} is not a regular expression: {e}") from None
        if cache is None:
            folder = Path(temporary_folder("TMPDIR to a folder for the unpacked models")).resolve()
            cache = folder / f"penstock-{os.getuid()}" / "models"
        self.cache = _private_folder(cache)
        self.limits = limits

    def names(self) -> list[str]:
        """The names in the store: .mar files and folders, without hidden ones."""
        if self.root is None:
            return []
        entries = [e for e in os.scandir(self.root) if not e.name.startswith(".")]
        return sorted(e.name for e in entries if e.is_dir() or (e.is_file() and e.name.endswith(".mar")))

    def open(self, url: str, *, name: str = "", sha256: str = "", s3_sse_kms: bool = False) -> UnpackedArchive:
        """The unpacked archive at the URL. Close it when its files are no longer used.

        `name` names a model without a manifest. Raises like `locate`, and ArchiveError for a bad archive, whose
        download is then removed.
        """
        path = self.locate(url, sha256=sha256, s3_sse_kms=s3_sse_kms)
        try:
            if path.is_dir():
                return UnpackedArchive(read_folder(path, name=name or path.name))
            return self._unpacked(path, name)
        except BaseException:
            self.forget(url)
            raise

    def locate(self, url: str, *, sha256: str = "", s3_sse_kms: bool = False) -> Path:
        """The local path of an archive; an http(s) URL is first downloaded into the store.

        A bare name is a file or folder of the store. Other local paths must be folders and are used in place.
        `sha256` is the expected digest of a download. Raises ArchiveNotFound, UrlForbidden, ArchiveExists,
        DownloadFailed, with TorchServe's messages.
        """
        if self.root is None:
            raise ArchiveNotFound("Model store has not been configured.")
        if not url:
            raise ArchiveNotFound("empty url")
        if ".." in url:
            raise ArchiveNotFound(f"Relative path is not allowed in url: {url}")
        if _URL.fullmatch(url):
            return self._fetched(self.root, url, sha256, s3_sse_kms)
        stored = self.root / _file_name(url, url)
        if os.path.isfile(stored):
            return self._permitted(stored, url)
        for folder in (Path(url), stored) if "/" in url else (stored, Path(url)):
            if os.path.isdir(folder) and folder.resolve() != self.root:
                return self._permitted(folder, url)
        raise ArchiveNotFound(f"Model not found at: {url}")

    def packages(self, files: UnpackedArchive) -> Path:
        """The folder for the packages of a model: its own, or one in the cache for a folder that is used in place."""
        folder = files.archive.folder
        if files.digest:
            return folder
        return self.cache / "packages" / hashlib.sha256(os.fsencode(folder)).hexdigest()

    def has(self, url: str) -> bool:
        """False if this local archive does not exist; True for every http(s) URL."""
        try:
            return url.startswith(_DOWNLOADS) or bool(self.locate(url))
        except ArchiveNotFound:
            return False
        except ArchiveError:
            return True

    def forget(self, url: str) -> None:
        """Removes the download of an http(s) URL, if any, which frees its name."""
        if self.root is not None and url.startswith(_DOWNLOADS):
            (self.root / _file_name(urlsplit(url).path, url)).unlink(missing_ok=True)

    def _fetched(self, root: Path, url: str, sha256: str, s3_sse_kms: bool) -> Path:
        self._check_allowed(url, [url])
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ArchiveNotFound(f"Model not found at: {url}") from None
        target = root / _file_name(parts.path, url)
        if os.path.lexists(target):
            raise ArchiveExists(f"Model file already exists {target.name}")
        if parts.scheme == "file":
            path = Path(unquote(parts.path))
            if parts.netloc not in ("", "localhost") or not os.path.isfile(path):
                raise ArchiveNotFound(f"Model not found at: {url}")
            return self._permitted(path, url)
        from penstock.torchserve.archive.network import download

        download(url, target, self.allowed_urls, sha256=sha256, sign_s3=s3_sse_kms, max_bytes=self.limits.total_bytes)
        return target

    def _permitted(self, path: Path, url: str) -> Path:
        """The path with links resolved. Raises UrlForbidden if it is outside the store and no allowed URL matches."""
        real = path.resolve()
        if self.root is None or not real.is_relative_to(self.root):
            self._check_allowed(url, [str(real), f"file://{real}"])
        return real

    def _check_allowed(self, url: str, forms: Sequence[str]) -> None:
        if not any(re.fullmatch(pattern, form) for pattern in self.allowed_urls for form in forms):
            raise UrlForbidden(f"Given URL {url} does not match any allowed URL(s)")

    def _unpacked(self, path: Path, name: str) -> UnpackedArchive:
        """The archive's folder in the cache, unpacked there unless it exists."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            cached = self.cache / digest
            with _exclusive(cached) as lock:
                try:
                    if cached.exists():
                        archive = read_folder(cached, name=name or path.name)
                    else:
                        _remove_leftovers(cached)
                        archive = unpack_archive(file, path.name, cached, name=name, limits=self.limits)
                except BaseException:
                    if not cached.exists():
                        lock.unlink()
                    raise
                in_use = os.open(cached, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(in_use, fcntl.LOCK_SH)  # never blocks: only the holder of `lock` takes it exclusively
        return UnpackedArchive(archive, digest, cached, in_use)


def _remove_leftovers(cached: Path) -> None:
    """Removes partly written or removed folders, also of killed processes. The caller holds `_exclusive`."""
    for folder in cached.parent.glob(f".{cached.name}.*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _exclusive(cached: Path) -> Iterator[Path]:
    """Lets one thread of all processes create or remove this folder; yields the path of the lock."""
    path = cached.with_suffix(".lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:  # not removed meanwhile
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


def _private_folder(path: Path) -> Path:
    """The folder, created if needed. Raises ArchiveError if other users could write into it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    parent, found = os.lstat(path.parent), os.lstat(path)
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    irreplaceable = not parent.st_mode & 0o022 or parent.st_mode & stat.S_ISVTX
    if not (private and irreplaceable and stat.S_ISDIR(parent.st_mode) and parent.st_uid in (0, os.getuid())):
        raise ArchiveError(f"other users can write to the model cache {path}: remove it, or name another")
    return path
