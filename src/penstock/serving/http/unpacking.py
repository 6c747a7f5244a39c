"""Bodies and messages in a content coding, unpacked before they wait in a queue.

A packed body may become a thousand times as long. It is unpacked in the server process, because only then does every
bound count what it really takes: `limits.max_body_bytes`, the pool of shared memory, and the bytes of a queue. The
worker, the codecs and whatever looks at bodies know nothing of codings. A small body costs the event loop a fraction of
a millisecond. A large one is unpacked twice in a thread, without the interpreter: it is measured first, so that it is
never anywhere but in shared memory, of which it takes no more than it needs. Few are unpacked at once; the others wait
as they came. A body that unpacks to more than `MOST_RATIO` times its size is refused.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from penstock.core.contracts import Backend, Buffer
from penstock.errors import BadRequest, Cancelled, PayloadTooLarge, QueueFull
from penstock.serving.http.intake import BIG_BYTES, Budget, aligned
from penstock.serving.protocols.codings import CONTENT_ENCODING, unpacker
from penstock.types import Headers

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
        data = memoryview(payload if isinstance(payload, bytes) else payload.view)
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
            if not isinstance(payload, bytes):
                payload.release()

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
