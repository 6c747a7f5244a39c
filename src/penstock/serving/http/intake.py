"""Where the body of a request is gathered: in plain memory while small, in a Buffer (shared memory) when large."""

from __future__ import annotations

from typing import Any, Final

from penstock.core.contracts import Backend, Buffer
from penstock.errors import PayloadTooLarge, QueueFull

BIG_BYTES: Final = 64 * 1024  # bodies above it go into a Buffer


class Intake:
    """Holds one body at a time. A Buffer that was not taken is given back by `release`."""

    def __init__(self, backend: Backend, max_body_bytes: int) -> None:
        self.backend = backend
        self.most = self.max_body_bytes = max_body_bytes
        self.length = 0
        self._small: bytes | bytearray = b""
        self._buffer: Buffer | None = None
        self._filled = 0

    def begin(self, length: int, wanted: bool = True) -> None:
        """A body of `length` bytes comes; 0 where that is not known (chunked) or there is none.

        One that nobody wants is taken only while it is small: there is no one to give a Buffer back.
        """
        self.length = length
        self.most = self.max_body_bytes if wanted else min(BIG_BYTES, self.max_body_bytes)

    def add(self, chunk: bytes) -> None:
        """A piece of the body. Raises PayloadTooLarge, QueueFull when the pool is full.

        Chunked bodies grow by doubling, so the cost of a byte is constant however small the chunks are.
        """
        end = self._filled + len(chunk)
        if end > self.most:
            raise PayloadTooLarge(f"the body is larger than {self.most} bytes (limits.max_body_bytes)")
        if self._buffer is None and end > BIG_BYTES and not self.length:
            self._grow(end)
        if self._buffer is not None:
            if end > len(self._buffer.view):
                self._grow(end)
            self._buffer.view[self._filled : end] = chunk
        elif not self._filled:
            self._small = chunk
        else:
            if isinstance(self._small, bytes):
                self._small = bytearray(self._small)
            self._small += chunk
        self._filled = end

    def _grow(self, need: int) -> None:
        size = min(max(need, 2 * self._filled, 4 * BIG_BYTES), self.max_body_bytes)
        larger = self.backend.allocate(size)
        if larger is None:  # waiting for it while holding what we have could wait for ever
            raise QueueFull("the memory for request bodies is full; send again later, or send a Content-Length")
        larger.view[: self._filled] = self._small if self._buffer is None else self._buffer.view[: self._filled]
        if self._buffer is not None:
            self._buffer.release()
        self._buffer, self._small = larger, b""

    def reserve(self) -> bool:
        """Memory for the whole body of known length; False while the pool is full. Raises PayloadTooLarge."""
        buffer = self.backend.allocate(self.length)
        if buffer is None:
            return False
        buffer.view[: self._filled] = self._small
        self._buffer, self._small = buffer, b""
        return True

    def rest(self) -> memoryview:
        """The part of the reserved memory that is still to be filled."""
        assert self._buffer is not None
        return self._buffer.view[self._filled : self.length]

    def filled_to(self, nbytes: int) -> bool:
        """Counts bytes that were received straight into `rest()`; True when the body is whole."""
        self._filled += nbytes
        return self._filled == self.length

    def take(self) -> Any:
        """The body: `bytes`, or the Buffer, which now belongs to the caller. Ready for the next one."""
        buffer, small, filled = self._buffer, self._small, self._filled
        self._buffer, self._small, self._filled = None, b"", 0
        if buffer is None:
            return small if isinstance(small, bytes) else bytes(small)
        if filled < len(buffer.view):
            buffer.shrink(filled)
        return buffer

    def release(self) -> None:
        """Gives back what was gathered of a body that will not be whole."""
        payload = self.take()
        if not isinstance(payload, bytes):
            payload.release()
