"""Unpacks a model archive member by member: a broken rule refuses the archive.

Files go into a temporary sibling of the target, which is renamed at the end. A refused archive leaves nothing behind.
"""

import os
import re
import shutil
import stat
import tarfile
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import IO, BinaryIO, Final, cast

from msgspec import Struct

from penstock.errors import ArchiveError

CHUNK_BYTES: Final = 1 << 20
MAX_NAME_BYTES: Final = 1024
MAX_PART_BYTES: Final = 255  # the limit of common file systems
MAX_HEADER_BYTES: Final = 1 << 20  # of one tar member: its long name and attributes
MAX_DIRECTORY_BYTES: Final = 8 << 20  # of a zip: 10,000 members with 800 bytes each

_DRIVE = re.compile(r"[A-Za-z]:")


class UnpackLimits(Struct, frozen=True, kw_only=True):
    """The limits of one archive."""

    members: int = 10_000
    total_bytes: int = 200 << 30  # a model of 70 billion parameters in fp16 has 140 GB
    ratio: int = 100  # unpacked to packed size: weights reach 1.2, text 10, a bomb 1000
    ratio_free_bytes: int = 256 << 20  # the ratio is not checked below this size


LIMITS: Final = UnpackLimits()


def check_name(name: str) -> str:
    """The name of a member relative to the archive's root, without a leading "./".

    Raises ArchiveError with the broken rule.
    """
    plain = name.removeprefix("./")
    rule = _broken_rule(plain)
    if rule:
        raise ArchiveError(f"name {name[:128]!r}: {rule}")
    return plain


def _broken_rule(name: str) -> str:
    parts = name.split("/")
    if not name:
        return "no name may be empty"
    if name.startswith("/"):
        return "no path may be absolute"
    if ".." in parts:
        return "no path may climb with '..'"
    if "\\" in name:
        return "no name may hold a backslash"
    if _DRIVE.match(name):
        return "no path may name a drive"
    if not name.isprintable():  # NUL, newlines, lone surrogates
        return "names hold printable characters only"
    if "" in parts or "." in parts:
        return "no part of a path may be empty or '.'"
    if len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"a name has at most {MAX_NAME_BYTES} bytes, a part of it at most {MAX_PART_BYTES}"
    return ""


class MemberNames:
    """The names of one archive so far, including all folders."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, bool]] = {}  # folded name -> (original spelling, whether it is a folder)

    def add(self, name: str, *, folder: bool) -> None:
        """Adds a checked name. Raises ArchiveError for a duplicate, also one that differs only in case or accents."""
        at = name.find("/")
        while at > 0:
            self._add_one(name[:at], folder=True)
            at = name.find("/", at + 1)
        self._add_one(name, folder=folder)

    def _add_one(self, name: str, *, folder: bool) -> None:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = (name, folder)
        elif seen[0] != name:
            raise ArchiveError(f"name {name[:128]!r}: differs from {seen[0][:128]!r} only in case or in its accents")
        elif not (folder and seen[1]):
            raise ArchiveError(f"name {name[:128]!r}: no name may occur twice")


def unpack(archive: BinaryIO, target: Path, *, tar: bool, limits: UnpackLimits = LIMITS) -> None:
    """Unpacks a zip, or with `tar` a gzipped tar file, into the new folder `target`.

    The first part of every name in a tar file is dropped. Raises ArchiveError with the broken rule.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name[:64]}.", dir=target.parent))
    try:
        with _archive_errors():
            writer = _Writer(folder, limits, packed_bytes=os.fstat(archive.fileno()).st_size)
            (_unpack_tar if tar else _unpack_zip)(archive, writer)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _archive_errors() -> Iterator[None]:
    """Turns the standard library's errors about broken archives into ArchiveError."""
    try:
        yield
    except (zipfile.BadZipFile, BadGzipFile, tarfile.TarError, zlib.error, EOFError, ValueError, UnicodeError) as e:
        raise ArchiveError(f"the archive is damaged or cut short: {e}") from None
    except (NotImplementedError, RuntimeError, OverflowError) as e:
        raise ArchiveError(f"the archive has a form that is not supported: {e}") from None


class _Writer:
    """Writes checked members into `folder` within the limits."""

    def __init__(self, folder: Path, limits: UnpackLimits, *, packed_bytes: int) -> None:
        self._folder = folder
        self._limits = limits
        self._names = MemberNames()
        self._members = 0
        self._max_bytes = min(limits.total_bytes, max(limits.ratio * packed_bytes, limits.ratio_free_bytes))
        self._written_bytes = 0

    def check_bytes(self, count: int) -> None:
        """Raises ArchiveError if `count` bytes exceed the limits."""
        if count > self._limits.total_bytes:
            raise ArchiveError(f"{count} bytes unpacked; at most {self._limits.total_bytes}")
        if count > self._max_bytes:
            raise ArchiveError(
                f"{count} bytes unpacked; at most {self._limits.ratio} times the archive's size, to refuse zip bombs"
            )

    def check_space(self, count: int) -> None:
        """Raises ArchiveError if `count` bytes exceed the limits or the free disk space."""
        self.check_bytes(count)
        free = shutil.disk_usage(self._folder).free
        if count > free:
            raise ArchiveError(f"{count} bytes unpacked; the disk has {free} bytes free")

    def count_member(self) -> None:
        """Raises ArchiveError for one member too many."""
        self._members += 1
        if self._members > self._limits.members:
            raise ArchiveError(f"more than {self._limits.members} members")

    def make_folder(self, name: str) -> None:
        self._names.add(name, folder=True)
        (self._folder / name).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, open_member: Callable[[], IO[bytes]]) -> None:
        """Writes one file. Raises ArchiveError for too many actual bytes, whatever size was declared."""
        self._names.add(name, folder=False)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_member() as source, path.open("xb") as out:
            while data := source.read(CHUNK_BYTES):
                self._written_bytes += len(data)
                self.check_bytes(self._written_bytes)
                out.write(data)


class _BoundedFile:
    """A zip file that limits the size of its directory, which zipfile reads in one piece."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seekable = file.tell, file.seekable

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        try:
            return self._file.seek(position, whence)
        except OSError:
            raise ArchiveError("the archive is damaged or cut short: an offset lies before its beginning") from None

    def read(self, count: int = -1) -> bytes:
        if count > MAX_DIRECTORY_BYTES:
            raise ArchiveError(f"a directory of {count} bytes: too many members; at most {MAX_DIRECTORY_BYTES} bytes")
        return self._file.read(count)


def _unpack_zip(file: BinaryIO, writer: _Writer) -> None:
    with zipfile.ZipFile(cast(IO[bytes], _BoundedFile(file))) as archive:
        members = archive.infolist()
        named = []
        for member in members:  # check all before writing the first
            writer.count_member()
            named.append((_zip_name(member), member))
        writer.check_space(sum(m.file_size for m in members))
        for name, member in named:
            if member.is_dir():
                writer.make_folder(name)
            else:
                writer.write(name, lambda m=member: archive.open(m))  # type: ignore[misc]


def _zip_name(member: zipfile.ZipInfo) -> str:
    """The member's checked name. Raises ArchiveError for a refused kind of member."""
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


class _TarStream:
    """The unpacked bytes of a gzipped tar file, forwards only. Skipped bytes count towards the limits."""

    def __init__(self, file: BinaryIO, writer: _Writer) -> None:
        self._file = GzipFile(fileobj=file, mode="rb")
        self._writer = writer
        self._position = 0
        self.last_read = b""  # at the end of the members: the block that is not a header

    def read(self, count: int) -> bytes:
        if count > CHUNK_BYTES + MAX_HEADER_BYTES:
            raise ArchiveError(f"a member's header has {count} bytes; at most {MAX_HEADER_BYTES}")
        data = self._file.read(count)
        self._position += len(data)
        self._writer.check_bytes(self._position)
        self.last_read = data
        return data

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        while self._position < position and self.read(min(position - self._position, CHUNK_BYTES)):
            pass
        return self._position


def _unpack_tar(file: BinaryIO, writer: _Writer) -> None:
    if file.read(2) != b"\x1f\x8b":
        raise ArchiveError("neither a .mar (zip) nor a .tar.gz: it has no gzip header")
    file.seek(0)
    stream = _TarStream(file, writer)
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
        for member in archive:
            writer.count_member()
            name = _tar_name(member)
            writer.check_bytes(member.size)
            if name and member.isdir():
                writer.make_folder(name)
            elif name:
                writer.write(name, lambda m=member: cast(IO[bytes], archive.extractfile(m)))  # type: ignore[misc]
    if stream.last_read.strip(b"\0"):
        raise ArchiveError("the archive is damaged: a member's header is invalid")
    while stream.read(CHUNK_BYTES):  # the checksum is at the end
        pass


def _tar_name(member: tarfile.TarInfo) -> str:
    """The member's checked name without its first part; "" for the outermost folder. Raises ArchiveError."""
    whole = check_name(member.name) if member.name != "." else ""
    if member.issym() or member.islnk():
        raise ArchiveError(f"name {whole[:128]!r}: links are refused")
    if not (member.isdir() or member.isreg()) or member.sparse is not None:
        raise ArchiveError(f"name {whole[:128]!r}: only files and folders are unpacked")
    if member.name.startswith("./"):  # the first part is the "."
        return whole
    first, slash, rest = whole.partition("/")
    return rest if slash else "" if member.isdir() else first
