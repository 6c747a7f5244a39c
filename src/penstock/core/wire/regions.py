"""Shared memory of clients on this machine. The server process registers it; whoever decodes a request reads it.

A region is read and written with pread and pwrite and never mapped: a client that shortens a mapped segment would kill
the worker with SIGBUS. Workers open the server's descriptor, so that a client may remove the segment's name.
"""

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.errors import BadRequest, RegionNotFound

TABLE_VARIABLE: Final = "PENSTOCK_SHARED_MEMORY"  # the path of the table, for the server process and its workers


class Region(Struct, frozen=True):
    """`byte_size` bytes from `offset` of the POSIX shared memory object `key`, open in the process `pid` as `fd`."""

    name: str
    key: str
    offset: int
    byte_size: int
    pid: int
    fd: int


class _Table(Struct):
    most_bytes: int  # of one tensor
    regions: dict[str, Region]


_decode = msgspec.json.Decoder(_Table).decode
_last: list[Any] = [None, None]  # what identifies the last table that was read, and that table


def publish(path: str, most_bytes: int, regions: Mapping[str, Region]) -> None:
    """Replaces the table."""
    fresh = f"{path}.new"
    with open(fresh, "wb") as file:
        file.write(msgspec.json.encode(_Table(most_bytes, dict(regions))))
    os.replace(fresh, path)


def read_region(what: str, name: str, offset: int, size: int, into: memoryview | None = None) -> memoryview:
    """A copy of bytes of a region, in memory of this size if it is given. Raises BadRequest and RegionNotFound,
    which name the tensor `what`."""
    import numpy as np

    region = _find(what, name, offset, size)
    data = np.empty(size, np.uint8).data if into is None else into
    fd = _open(what, region)
    try:
        done = 0
        while done < size:
            count = os.preadv(fd, [data[done:]], region.offset + offset + done)
            if count == 0:
                raise _shortened(what, name)
            done += count
    finally:
        os.close(fd)
    return data


def write_region(what: str, name: str, offset: int, data: bytes | memoryview) -> None:
    """Writes bytes to a region. Raises BadRequest and RegionNotFound, which name the tensor `what`."""
    region = _find(what, name, offset, len(data))
    fd = _open(what, region)
    try:
        begin = region.offset + offset
        if os.fstat(fd).st_size < begin + len(data):  # a write would lengthen it again
            raise _shortened(what, name)
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], begin + done)
    finally:
        os.close(fd)


def _find(what: str, name: str, offset: int, size: int) -> Region:
    path = os.environ.get(TABLE_VARIABLE)
    if path is None:
        raise BadRequest(f"{what}: shared memory is off; set server.shared_memory = true, or send the tensor")
    try:
        status = os.stat(path)
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if _last[0] != stamp:
            with open(path, "rb") as file:
                _last[:] = stamp, _decode(file.read())
    except OSError:  # the server is ending
        raise BadRequest(f"{what}: the regions of shared memory are gone") from None
    table: _Table = _last[1]
    region = table.regions.get(name)
    if region is None:
        raise RegionNotFound(f"{what}: no region of shared memory has the name '{name[:100]}'; register it first")
    if not 0 <= offset <= offset + size <= region.byte_size:
        raise BadRequest(
            f"{what}: {size} bytes from {offset} are not inside the region '{name[:100]}' of {region.byte_size} bytes"
        )
    if size > table.most_bytes:
        raise BadRequest(f"{what}: {size} bytes are more than limits.max_body_bytes ({table.most_bytes})")
    return region


def _open(what: str, region: Region) -> int:
    try:
        return os.open(f"/proc/{region.pid}/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it was unregistered meanwhile
        raise BadRequest(f"{what}: the region '{region.name[:100]}' is no longer registered") from None


def _shortened(what: str, name: str) -> BadRequest:
    return BadRequest(f"{what}: the segment of the region '{name[:100]}' is shorter than when it was registered")
