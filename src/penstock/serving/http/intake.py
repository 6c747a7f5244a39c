"""Collects the body of a request: in plain memory while it is small, in a Buffer (shared memory) when it is large."""

import sys
from typing import Any, Final

from penstock.core.contracts import Backend, Buffer
from penstock.errors import PayloadTooLarge, QueueFull
from penstock.serving.http.responses import ListenerFull

BIG_BYTES: Final = 64 * 1024  # larger bodies go into a Buffer
ALIGNMENT: Final = 64


def aligned(backend: Backend, length: int) -> Buffer | None:
    """Memory whose end is aligned: there is the last tensor, which no worker has to copy then. None while there is
    none. Raises PayloadTooLarge if there will never be."""
    before = -length % ALIGNMENT
    buffer = backend.allocate(length + before)
    if buffer is not None:
        buffer.skip(before)
    return buffer


class Budget:
    """The bytes that all clients of a listener occupy while they send requests or read answers.

    Parts of requests count at once, unread answers and open calls from one sweep of the clock to the next. A small
    request that comes whole, and what is in shared memory, costs nothing here.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self.most = most
        self.full = False
        self.swept = 0
        self._parts = 0

    def count(self, more: int) -> None:
        """Adds parts of requests, or subtracts them."""
        self._parts += more
        self.full = self._parts + self.swept > self.most

    def sweep(self, found: int) -> None:
        """Replaces what the last sweep found."""
        self.swept = found
        self.count(0)

    def refusal(self) -> ListenerFull:
        text = f"the clients of this port occupy {self.most} bytes (limits.max_transit_bytes); send again later"
        return ListenerFull(text, retry_after_s=1.0)


class Intake:
    """Holds one body at a time. `release` frees a Buffer that was not taken."""

    def __init__(self, backend: Backend, max_body_bytes: int, budget: Budget | None = None) -> None:
        self.backend = backend
        self.budget = budget or Budget()
        self.most = self.max_body_bytes = max_body_bytes
        self.length = 0
        self.begun = False
        self._small: bytes | bytearray = b""
        self._buffer: Buffer | None = None
        self._filled = 0
        self._held = 0  # bytes of `_small` in the budget

    def begin(self, length: int, most: int) -> None:
        """Begins a body of `length` bytes; 0 if the length is unknown (chunked) or there is no body.

        It has at most `most` bytes: BIG_BYTES if no model takes it, because no caller would release its Buffer.
        """
        self.begun = True
        self.length = length
        self.most = most

    def add(self, chunk: bytes) -> None:
        """Adds a piece of the body. Raises PayloadTooLarge, QueueFull when the pool is full, and ListenerFull.

        Chunked bodies grow by doubling, so the cost of a byte is constant however small the chunks are.
        """
        end = self._filled + len(chunk)
        if end > self.most:
            key = " (limits.max_body_bytes)" if self.most == self.max_body_bytes else ""
            raise PayloadTooLarge(f"the body is larger than {self.most} bytes{key}")
        if self._buffer is None and end > BIG_BYTES and not self.length:
            self._grow(end)
        if self._buffer is not None:
            if end > len(self._buffer.view):
                self._grow(end)
            self._buffer.view[self._filled : end] = chunk
            self._filled = end
            return
        self._hold(len(chunk))
        if self.budget.full:
            raise self.budget.refusal()
        if not self._filled:
            self._small = chunk
        else:
            if isinstance(self._small, bytes):
                self._small = bytearray(self._small)
            self._small += chunk
        self._filled = end

    def _grow(self, need: int) -> None:
        size = min(max(need, 2 * self._filled, 4 * BIG_BYTES), self.max_body_bytes)
        larger = self.backend.allocate(size)
        if larger is None:  # waiting while holding a Buffer could deadlock
            raise QueueFull("the memory for request bodies is full; send again later, or send a Content-Length")
        larger.view[: self._filled] = self._small if self._buffer is None else self._buffer.view[: self._filled]
        if self._buffer is not None:
            self._buffer.release()
        self._buffer, self._small = larger, b""
        self._hold(-self._held)

    def _hold(self, more: int) -> None:
        self.budget.count(more)
        self._held += more

    def reserve(self) -> bool:
        """Gets memory for a whole body of known length; False while the pool is full. Raises PayloadTooLarge."""
        buffer = self.backend.allocate(self.length)
        if buffer is None:
            return False
        buffer.view[: self._filled] = self._small
        self._buffer, self._small = buffer, b""
        self._hold(-self._held)
        return True

    def rest(self) -> memoryview:
        """The unfilled part of the reserved memory."""
        assert self._buffer is not None
        return self._buffer.view[self._filled : self.length]

    def filled_to(self, nbytes: int) -> bool:
        """Counts bytes received straight into `rest()`; True when the body is complete."""
        self._filled += nbytes
        return self._filled == self.length

    def take(self) -> Any:
        """The body: `bytes`, or the Buffer, which now belongs to the caller. Resets the intake."""
        buffer, small, filled = self._buffer, self._small, self._filled
        self._buffer, self._small, self._filled, self.begun = None, b"", 0, False
        self._hold(-self._held)
        if buffer is None:
            return small if isinstance(small, bytes) else bytes(small)
        if filled < len(buffer.view):
            buffer.shrink(filled)
        return buffer

    def release(self) -> None:
        """Frees the memory of an incomplete body."""
        payload = self.take()
        if not isinstance(payload, bytes):
            payload.release()
