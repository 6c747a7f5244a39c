"""Memory that one process lends to others: an object in it crosses as its place, and is not copied.

A process that maps a region with a descriptor can lend it to its children. They map it through `/proc`, which works for
processes of one user. The memory of an object stays as it is while the object lives in the lending process, and a
message that refers to it keeps it alive until its batch is answered.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from penstock.core.wire.slabs import Slab, lease

LENT_BYTES = 16 * 2**10
"""Larger objects are in shared memory. A choice: smaller ones are copied in less time than memory is found for them."""

_serials = itertools.count(1)
_regions: list[Region] = []  # that this process maps and knows


class Region:
    """Shared memory that this process maps. `fd`: its descriptor, which children can map; None if it is borrowed."""

    def __init__(self, memory: mmap.mmap, fd: int | None = None, serial: int | None = None) -> None:
        self.memory, self.fd = memory, fd
        self.serial = next(_serials) if serial is None else serial
        self._whole = memoryview(memory)  # while there is one, the addresses are of this region
        _regions.append(self)

    @cached_property
    def begin(self) -> int:
        """The address of the first byte."""
        return _address(self._whole)

    def place(self, at: int) -> int | None:
        """The offset of an address, if it is in the region."""
        return at - self.begin if 0 <= at - self.begin < len(self._whole) else None

    def forget(self) -> None:
        """Lends nothing any more."""
        _regions.remove(self)
        self._whole = memoryview(b"")


class Borrowed(Slab):
    """An object's memory in a message to a child. It lives until `unpin`."""

    __slots__ = ("_raw", "place")

    def __init__(self, region: Region, offset: int, raw: memoryview) -> None:
        assert region.fd is not None
        self.offset = -next(_serials)  # its number: those of other slabs are not negative
        self.place = self.offset, region.fd, region.serial, offset, raw.nbytes
        self._raw: memoryview | None = raw

    def pin(self) -> None:
        """It lives already."""

    def unpin(self) -> None:
        """The child has no reference any more."""
        self._raw = None


def find(raw: Any) -> tuple[Region, int] | None:
    """The region that has this memory, and the offset in it."""
    if _regions:
        at = _address(raw)
        for region in _regions:
            if (offset := region.place(at)) is not None:
                return region, offset
    return None


def _address(memory: Any) -> int:
    import numpy as np  # only processes with large objects need it

    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class Lender(Region):
    """The region of a worker's results, as the process that reads them maps it.

    Only the thread that reads the results calls it, but the last reference to a result may end in any thread. At most
    half of the memory is lent, so that there is always room for the next results.
    """

    def __init__(self, memory: mmap.mmap, fd: int) -> None:
        """`fd` is closed when the worker and its results are gone."""
        super().__init__(memory, fd)
        self._fds = [fd]
        self._lent: dict[int, object] = {}  # references to memory that is lent, by offset
        self._left = len(memory) // 2
        self._ended: deque[tuple[int, int]] = deque()  # offset and length
        self._closed = False

    @property
    def lent(self) -> int:
        """The number of results that live."""
        return len(self._lent)

    def lend(self, offset: int, length: int) -> memoryview | None:
        """A writable view of a result; None if too much is lent."""
        if length > self._left:
            return None
        self._left -= length

        def ended(_: object) -> None:
            del self._lent[offset]
            self._ended.append((offset, length))
            if self._closed:
                self._close()

        view, self._lent[offset] = lease(self.memory, offset, length, True, ended)
        return view

    def returned(self) -> Iterator[int]:
        """The offsets of results that are gone."""
        while self._ended:
            offset, length = self._ended.popleft()
            self._left += length
            yield offset

    def close(self) -> None:
        """The worker is gone. What is lent stays."""
        self._closed = True
        self._close()

    def _close(self) -> None:
        if not self._lent and self._fds:
            os.close(self._fds.pop())
            self.forget()
