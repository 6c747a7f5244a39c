"""A model archive's files in a folder: own member walk, every rule checked before a byte is written.

Nothing of a refused archive stays: files go into a temporary sibling of the target, which is renamed at the end.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import IO, BinaryIO, Final, cast

from msgspec import Struct

from penstock.errors import ArchiveError
from penstock.torchserve.archive.names import Names, check_name

CHUNK_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 1 << 20  # of one tar member: its long name and attributes
MAX_DIRECTORY_BYTES: Final = 8 << 20  # of a zip: 10,000 members with 800 bytes each


class Limits(Struct, frozen=True, kw_only=True):
    """What one archive may hold."""

    members: int = 10_000
    total_bytes: int = 200 << 30  # a model of 70 billion parameters in fp16 has 140 GB
    ratio: int = 100  # unpacked to packed; weights shrink by 0-20 %, text by 10, a bomb by 1000
    ratio_free_bytes: int = 256 << 20  # so small is no bomb, however well it was packed


LIMITS: Final = Limits()


def unpack(archive: BinaryIO, target: Path, *, tar: bool, limits: Limits = LIMITS) -> None:
    """Makes the folder `target`, which must not exist, out of the archive: a zip, or with `tar` a gzipped tar file.

    Of names in a tar file the first part is stripped. Raises ArchiveError that names the rule that is broken.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _made_whole(target) as folder, _errors():
        writer = _Writer(folder, limits, packed_bytes=os.fstat(archive.fileno()).st_size)
        (_unpack_tar if tar else _unpack_zip)(archive, writer)


@contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """A temporary folder beside the target, which becomes the target at the end, or is removed."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name[:64]}.", dir=target.parent))
    try:
        yield folder
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _errors() -> Iterator[None]:
    """What the readers of the standard library raise on broken archives, as ArchiveError."""
    try:
        yield
    except (zipfile.BadZipFile, BadGzipFile, tarfile.TarError, zlib.error, EOFError, ValueError, UnicodeError) as e:
        raise ArchiveError(f"the archive is damaged or cut short: {e}") from None
    except (NotImplementedError, RuntimeError, OverflowError) as e:
        raise ArchiveError(f"the archive has a form that is not read: {e}") from None


class _Writer:
    """Writes checked members below `folder`, within the limits."""

    def __init__(self, folder: Path, limits: Limits, *, packed_bytes: int) -> None:
        self._folder = folder
        self._limits = limits
        self._names = Names()
        self._members = 0
        ratio_bytes = max(limits.ratio * packed_bytes, limits.ratio_free_bytes)
        self.most_bytes = min(limits.total_bytes, ratio_bytes)
        self._written_bytes = 0

    def check_bytes(self, count: int) -> None:
        """Raises ArchiveError if that many bytes are too many for this archive."""
        if count > self._limits.total_bytes:
            raise ArchiveError(f"{count} bytes unpacked; at most {self._limits.total_bytes}")
        if count > self.most_bytes:
            ratio = self._limits.ratio
            raise ArchiveError(f"{count} bytes unpacked; at most {ratio} times the archive's size, which is no bomb")

    def check_room(self, count: int) -> None:
        """Raises ArchiveError if so many bytes are too many for this archive, or for the disk."""
        self.check_bytes(count)
        free = shutil.disk_usage(self._folder).free
        if count > free:
            raise ArchiveError(f"{count} bytes unpacked; the disk has {free} bytes free")

    def member(self) -> None:
        """Counts one. Raises ArchiveError if there are too many."""
        self._members += 1
        if self._members > self._limits.members:
            raise ArchiveError(f"more than {self._limits.members} members")

    def make_folder(self, name: str) -> None:
        self._names.add(name, folder=True)
        (self._folder / name).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, open_member: Callable[[], IO[bytes]]) -> None:
        """Writes one file. Raises ArchiveError if its bytes are too many, whatever size was declared."""
        self._names.add(name, folder=False)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_member() as source, path.open("xb") as out:
            while data := source.read(CHUNK_BYTES):
                self._written_bytes += len(data)
                self.check_bytes(self._written_bytes)
                out.write(data)


class _BoundedReads:
    """A file that refuses to read a zip's directory, which is read in one piece, if it is too long."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seekable = file.tell, file.seekable

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        try:
            return self._file.seek(position, whence)
        except OSError:
            raise ArchiveError("the archive is damaged or cut short: it names a place before its beginning") from None

    def read(self, count: int = -1) -> bytes:
        if count > MAX_DIRECTORY_BYTES:
            raise ArchiveError(f"a directory of {count} bytes: too many members; at most {MAX_DIRECTORY_BYTES} bytes")
        return self._file.read(count)


def _unpack_zip(file: BinaryIO, writer: _Writer) -> None:
    with zipfile.ZipFile(cast(IO[bytes], _BoundedReads(file))) as archive:
        members = archive.infolist()
        named = []
        for member in members:  # all before the first is written
            writer.member()
            named.append((_zip_name(member), member))
        writer.check_room(sum(m.file_size for m in members))
        for name, member in named:
            if member.is_dir():
                writer.make_folder(name)
            else:
                writer.write(name, lambda m=member: archive.open(m))  # type: ignore[misc]


def _zip_name(member: zipfile.ZipInfo) -> str:
    """The member's checked name. Raises ArchiveError if it is of a kind that is refused."""
    name = check_name(member.orig_filename.removesuffix("/"))
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind == stat.S_IFLNK:
        raise ArchiveError(f"name {name[:128]!r}: links are refused")
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ArchiveError(f"name {name[:128]!r}: only files and folders are unpacked")
    if member.flag_bits & 0x1:
        raise ArchiveError(f"name {name[:128]!r}: encrypted members are refused")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveError(f"name {name[:128]!r}: compression {member.compress_type}; expected stored or deflated")
    return name


class _Unzipped:
    """The bytes of a gzipped tar file, forwards only. Counts all of them, also those that are skipped."""

    def __init__(self, file: BinaryIO, writer: _Writer) -> None:
        self._file = GzipFile(fileobj=file, mode="rb")
        self._writer = writer
        self._position = 0
        self.last = b""  # what was read last: after the members, the header that is none

    def read(self, count: int) -> bytes:
        if count > CHUNK_BYTES + MAX_HEADER_BYTES:
            raise ArchiveError(f"a member's header has {count} bytes; at most {MAX_HEADER_BYTES}")
        data = self._file.read(count)
        self._position += len(data)
        self._writer.check_bytes(self._position)
        self.last = data
        return data

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        while self._position < position and self.read(min(position - self._position, CHUNK_BYTES)):
            pass
        return self._position

    def drain(self) -> None:
        """Reads to the end, where the checksum is."""
        while self.read(CHUNK_BYTES):
            pass


def _unpack_tar(file: BinaryIO, writer: _Writer) -> None:
    if file.read(2) != b"\x1f\x8b":
        raise ArchiveError("neither a .mar (zip) nor a .tar.gz: it does not begin as a gzip file")
    file.seek(0)
    unzipped = _Unzipped(file, writer)
    with tarfile.open(fileobj=cast(IO[bytes], unzipped), mode="r:") as archive:
        for member in archive:
            writer.member()
            name = _tar_name(member)
            writer.check_bytes(member.size)
            if not name:
                continue
            if member.isdir():
                writer.make_folder(name)
            else:
                writer.write(name, lambda m=member: _opened(archive, m))  # type: ignore[misc]
    if unzipped.last.strip(b"\0"):
        raise ArchiveError("the archive is damaged: a member's header is none")
    unzipped.drain()


def _opened(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    found = archive.extractfile(member)
    assert found is not None, "only regular files come here"
    return found


def _tar_name(member: tarfile.TarInfo) -> str:
    """The member's checked name without its first part; "" for the folder around all. Raises ArchiveError."""
    whole = check_name(member.name) if member.name != "." else ""
    if member.issym() or member.islnk():
        raise ArchiveError(f"name {whole[:128]!r}: links are refused")
    if not (member.isdir() or member.isreg()) or member.sparse is not None:
        raise ArchiveError(f"name {whole[:128]!r}: only files and folders are unpacked")
    if member.name.startswith("./"):  # the first part is the "."
        return whole
    first, slash, rest = whole.partition("/")
    return rest if slash else "" if member.isdir() else first
