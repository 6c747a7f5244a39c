"""Bodies on their way in: small ones in plain memory, large ones in a Buffer (shared memory), packed ones unpacked."""

import asyncio
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from penstock.core.contracts import Backend, Buffer
from penstock.errors import BadRequest, Cancelled, PayloadTooLarge, QueueFull
from penstock.serving.http.responses import ListenerFull
from penstock.serving.protocols.bodies import CONTENT_ENCODING, data_of, free, unpacker
from penstock.types import Headers

BIG_BYTES: Final = 64 * 1024  # larger bodies go into a Buffer
ALIGNMENT: Final = 64  # of the first binary tensor in Open Inference bodies


def aligned(backend: Backend, length: int) -> Buffer | None:
    """Memory with an aligned end, so that no worker has to copy the last tensor; None while the pool is full.

    Raises PayloadTooLarge for more than the pool holds."""
    before = -length % ALIGNMENT
    buffer = backend.allocate(length + before)
    if buffer is not None:
        buffer.skip(before)
    return buffer


class Budget:
    """The bytes that all clients of a listener occupy while they send requests or read responses.

    Parts of requests count at once, unread responses and open calls from one sweep of the clock to the next. A small
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
        free(self.take())


# A packed body may become a thousand times as long. It is unpacked in the server process before it waits in a queue,
# because only then does every bound count what the body really takes: `limits.max_body_bytes`, the pool of shared
# memory, and the bytes of a queue. The worker, the codecs and whatever looks at bodies know nothing of codings. A small
# body costs the event loop a fraction of a millisecond. A large body is unpacked twice in a thread, which needs no
# interpreter: the first pass measures it, so that the second one takes exactly the shared memory that it needs. At most
# AT_ONCE bodies are unpacked at once; the others wait in packed form.
MOST_RATIO: Final = 200  # as Apache's DeflateInflateRatioLimit; text and padded tensors reach 20 to 100 ...
FREE_BYTES: Final = 2**20  # ... and a mask of zeros 1000, which is welcome up to this size
PIECE_BYTES: Final = 2**20  # 2 to 4 ms of a core, in a thread
AT_ONCE: Final = 2
PACKED: Final = (CONTENT_ENCODING, b"content-length")  # headers that describe a packed body


class Unpacking:
    """Unpacks bodies into the memory of `backend`."""

    def __init__(self, backend: Backend, budget: Budget | None = None) -> None:
        self._backend = backend
        self._budget = budget or Budget()
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def unpack(
        self, payload: bytes | Buffer, coding: str, most: int, left: Callable[[], bool] = lambda: False
    ) -> bytes | Buffer:
        """The body of at most `most` bytes, in a Buffer if it is large. `payload` is freed.

        Raises BadRequest if the stream is damaged or truncated, or if anything follows it, PayloadTooLarge, QueueFull
        while the pool is full, ListenerFull, and Cancelled once the client has `left`.
        """
        data = memoryview(data_of(payload))
        try:
            if len(data) <= BIG_BYTES:  # a longer one may hold much work and few bytes
                found = _pieces(data, coding, BIG_BYTES)
                first = next(found, b"")
                if next(found, None) is None:
                    _check(len(first), most, len(data))
                    return first
            held = len(data) if isinstance(payload, bytes) else 0
            self._budget.count(held)
            try:
                if self._budget.full:
                    raise self._budget.refusal()
                async with self._turns:
                    if left():
                        raise Cancelled("the client has left")
                    return await self._unpack_large(data, coding, most)
            finally:
                self._budget.count(-held)
        finally:
            free(payload)

    async def _unpack_large(self, data: memoryview, coding: str, most: int) -> bytes | Buffer:
        size = await asyncio.to_thread(_measure, data, coding, most)
        if not size:
            return b""
        buffer = aligned(self._backend, size)
        if buffer is None:
            raise QueueFull("the memory for large bodies is full; send again later, or uncompressed", retry_after_s=1.0)
        try:
            pieces, at = _pieces(data, coding, PIECE_BYTES), 0
            while piece := await asyncio.to_thread(next, pieces, b""):  # a thread that outlives the call writes nothing
                buffer.view[at : at + len(piece)] = memoryview(piece)
                at += len(piece)
        except BaseException:
            buffer.release()
            raise
        return buffer


def _pieces(data: memoryview, coding: str, most: int) -> Iterator[bytes]:
    """The unpacked body in pieces of at most `most` bytes. Raises BadRequest."""
    stream, at = unpacker(data[:2], coding), 0
    try:
        while not stream.eof:
            rest = stream.unconsumed_tail
            if not rest:
                rest, at = bytes(data[at : at + BIG_BYTES]), at + BIG_BYTES
            if piece := stream.decompress(rest, most):
                yield piece
            elif not (rest or stream.eof):
                raise BadRequest(f"the {coding} stream of the body is truncated: it ends after {len(data)} bytes")
    except zlib.error as error:
        raise BadRequest(f"the body is not a valid {coding} stream: {error}") from None
    if extra := len(stream.unused_data) + max(0, len(data) - at):
        raise BadRequest(f"{extra} bytes follow the {coding} stream; send exactly one")


def _measure(data: memoryview, coding: str, most: int) -> int:
    """The size of the unpacked body. Raises BadRequest, PayloadTooLarge."""
    size = 0
    for piece in _pieces(data, coding, PIECE_BYTES):
        size += len(piece)
        _check(size, most, len(data))
    return size


def _check(size: int, most: int, packed: int) -> None:
    if size > max(FREE_BYTES, MOST_RATIO * packed):
        raise PayloadTooLarge(f"unpacked, the body has more than {MOST_RATIO} times its size; send it uncompressed")
    if size > most:
        key = " (limits.max_body_bytes)" if most > BIG_BYTES else ""
        raise PayloadTooLarge(f"unpacked, the body is larger than {most} bytes{key}")


def unpacked_headers(headers: Headers) -> Headers:
    """The headers without those that describe a packed body."""
    return [header for header in headers if header[0].lower() not in PACKED]
