"""Anonymous shared memory for large payloads: a pool that this process fills and its workers read.

The pool is one memfd (an unlinked temporary file on systems without memfd) that every worker maps. The owner allocates;
the other side maps it read-only.
"""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from penstock.errors import PayloadTooLarge

PAGE = mmap.PAGESIZE
GIVE_BACK_BYTES = 16 * 2**20  # freed slabs of at least this size return to the system; smaller ones are reused


class Slab:
    """Memory for one payload. `view` is writable.

    A transport pins the slab while a worker may read it, so `release` is safe at any time. It is idempotent.
    """

    __slots__ = ("_extent", "_pins", "_pool", "_released", "_start", "length", "offset", "view")

    def __init__(self, pool: SlabPool, offset: int, length: int, extent: int, view: memoryview) -> None:
        self._pool = pool
        self._start = self.offset = offset
        self.length = length
        self.view = view
        self._extent = extent
        self._pins = 0
        self._released = False

    def __len__(self) -> int:
        return self.length

    def shrink(self, length: int) -> None:
        """Keeps only the first `length` bytes."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a slab of {self.length} bytes cannot shrink to {length}")
        self.view = self.view[:length]
        self.length = length
        keep = _pages(self.offset - self._start + length)
        if keep < self._extent:
            tail, self._extent = self._extent - keep, keep
            self._pool._give_back(self._start + keep, tail)

    def skip(self, count: int) -> None:
        """Drops the first `count` bytes, so that what follows can be aligned by its end."""
        self.view = self.view[count:]
        self.offset += count
        self.length -= count

    def pin(self) -> None:
        """Keeps the memory until `unpin`, even after `release`."""
        self._pins += 1

    def unpin(self) -> None:
        """Undoes one `pin`; the last one frees a released slab."""
        self._pins -= 1
        self._maybe_free()

    def release(self) -> None:
        """Frees the memory, now or at the last `unpin`."""
        self._released = True
        self._maybe_free()

    def retire(self) -> None:
        """Never reuses this memory, because a reader may keep a view of it."""
        self._extent = 0

    def lease(self) -> tuple[memoryview, weakref.ref[Any]]:
        """A read-only view, and a reference that dies with its last reader; see `lease`."""
        return lease(self._pool.memory, self.offset, self.length)

    def _maybe_free(self) -> None:
        if self._released and self._pins == 0 and self._extent:
            extent, self._extent = self._extent, 0
            try:
                self.view.release()
            except BufferError:  # a reader in this process still holds it and will see the next payload
                pass
            self._pool._give_back(self._start, extent)


class SlabPool:
    """`capacity_bytes` of shared memory, allocated in whole pages, first fit. Thread-safe.

    Workers map `fd`. With the argument `fd`, the pool uses memory that a peer has created.
    """

    def __init__(self, capacity_bytes: int, fd: int | None = None) -> None:
        self.capacity_bytes = _pages(capacity_bytes)
        self.fd = anonymous_file(self.capacity_bytes) if fd is None else fd
        self.memory = mmap.mmap(self.fd, self.capacity_bytes)
        self.in_use_bytes = 0
        self._offsets = [0]  # of free extents, sorted
        self._lengths = [self.capacity_bytes]
        self._waiters: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def allocate(self, n: int) -> Slab | None:
        """A slab of `n` bytes; None if the pool is full at the moment. Raises PayloadTooLarge if it can never fit."""
        extent = _pages(n)
        if extent > self.capacity_bytes:
            raise PayloadTooLarge(
                f"a payload of {n} bytes does not fit into the pool of {self.capacity_bytes} bytes: "
                "raise limits.pool_bytes"
            )
        with self._lock:
            i = next((i for i, room in enumerate(self._lengths) if room >= extent), -1)
            if i < 0:
                return None
            offset = self._offsets[i]
            if self._lengths[i] == extent:
                del self._offsets[i], self._lengths[i]
            else:
                self._offsets[i] += extent
                self._lengths[i] -= extent
            self.in_use_bytes += extent
        return Slab(self, offset, n, extent, memoryview(self.memory)[offset : offset + n])

    def when_free(self, wake: Callable[[], None]) -> None:
        """Calls `wake()` once, after memory is freed, on the thread that freed it."""
        self._waiters.append(wake)

    def close(self) -> None:
        """Closes the descriptor and unmaps the pool; live views keep the mapping."""
        self._waiters.clear()
        try:
            self.memory.close()
        except BufferError:
            pass
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _give_back(self, offset: int, extent: int) -> None:
        if self.fd < 0:
            return
        if extent >= GIVE_BACK_BYTES:
            give_to_system(self.memory, offset, extent)
        with self._lock:
            self.in_use_bytes -= extent
            i = bisect_left(self._offsets, offset)
            if i < len(self._offsets) and offset + extent == self._offsets[i]:
                extent += self._lengths[i]
                del self._offsets[i], self._lengths[i]
            if i and self._offsets[i - 1] + self._lengths[i - 1] == offset:
                self._lengths[i - 1] += extent
            else:
                self._offsets.insert(i, offset)
                self._lengths.insert(i, extent)
            waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()


def map_read_only(fd: int, capacity_bytes: int) -> mmap.mmap:
    """A read-only mapping of a peer's pool, for `lease`."""
    return mmap.mmap(fd, capacity_bytes, prot=mmap.PROT_READ)


def lease(
    memory: mmap.mmap, offset: int, length: int, writable: bool = False, ended: Callable[[Any], object] | None = None
) -> tuple[memoryview, weakref.ref[Any]]:
    """A view `[length]` of bytes, and a weak reference that dies with the last view of this memory; `ended` is called
    then, in any thread.

    A released view may have live slices, so the reference is to the array below all of them.
    """
    import numpy as np  # only workers with large payloads need it

    if offset < 0 or length < 0 or offset + length > len(memory):
        raise ValueError(f"[{offset}, {offset + length}) is outside the pool of {len(memory)} bytes")
    base = np.frombuffer(memory, np.uint8, length, offset)
    base.flags.writeable = writable
    return memoryview(base.data), weakref.ref(base, ended)


def _pages(n: int) -> int:
    return max(PAGE, -(-n // PAGE) * PAGE)


def anonymous_file(size: int) -> int:
    """The descriptor of an unnamed file of `size` bytes, not inherited by default."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="penstock-")
        os.unlink(path)
    os.ftruncate(fd, size)
    return fd


def give_to_system(memory: mmap.mmap, offset: int, extent: int) -> None:
    """Frees the pages; they read as zeros from now on."""
    option = getattr(mmap, "MADV_REMOVE", None)
    if option is not None:
        try:
            memory.madvise(option, offset, extent)
        except OSError:  # the file system cannot punch holes: the memory stays resident
            pass


Lease = tuple[int, "weakref.ref[Any]"]
"""(offset of a request slab, weak reference that dies with its last reader)."""


class HeldSlabs:
    """In a worker: the request slabs that a model still references after its response."""

    def __init__(self) -> None:
        self._held: list[Lease] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def offsets(self) -> set[int]:
        """The offsets of the slabs held at the last call of `after`."""
        return {offset for offset, _ in self._held}

    def after(self, leases: list[Lease], collect: bool = True) -> tuple[list[int], list[int]]:
        """(offsets of `leases` held after a response, offsets held before and released since).

        `collect`: runs the garbage collector, so that a slab in a reference cycle does not count as held.
        """
        held = _alive(leases)
        if held and collect:
            gc.collect(1)
            held = _alive(held)
        kept = _alive(self._held)
        released = {offset for offset, _ in self._held} - {offset for offset, _ in kept}
        self._held = kept + held
        return [offset for offset, _ in held], list(released)


def _alive(leases: list[Lease]) -> list[Lease]:
    return [(offset, ref) for offset, ref in leases if ref() is not None]
