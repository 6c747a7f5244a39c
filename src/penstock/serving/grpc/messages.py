"""Messages of a gRPC call that arrive in pieces or compressed: small ones in plain memory, large ones in a Buffer."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from struct import Struct as Packing
from typing import Any, Final, NamedTuple

from penstock.core.contracts import Backend, Buffer
from penstock.errors import PayloadTooLarge, QueueFull
from penstock.serving.grpc.calls import Code, GrpcError, refused
from penstock.serving.http.intake import BIG_BYTES

PREFIX: Final = Packing(">BI")  # of a message: whether it is compressed, and its length
ENCODINGS: Final = {b"gzip": 31, b"deflate": 15}  # zlib's wbits
ALIGNMENT: Final = 64
MAX_RATIO: Final = 128  # of an unpacked message to the packed one: text and padded tensors reach 20 to 100 ...
FREE_BYTES: Final = 2**20  # ... and a mask of zeros 1000, which is welcome up to this size
STEP: Final = 2**20  # unpacked in a thread before the event loop has its turn

Payload = bytes | Buffer


class Compressed(NamedTuple):
    """A message that is not unpacked yet."""

    payload: Payload
    wbits: int


class MessageReader:
    """Cuts the data of one stream into messages. `take` receives flag and payload of each.

    A large message waits for memory: `starved` is then true, until `reserve` returns True. Its data goes to `space`,
    from where `filled` counts it.
    """

    def __init__(self, backend: Backend, most: int, take: Callable[[int, Any], None]) -> None:
        self.space: memoryview | None = None  # the part of a large message that is not here yet
        self.starved = False
        self.missing = 0  # bytes of the message that have not come
        self.part = bytearray()  # those of a small or starved message that have, or of a prefix
        self._backend = backend
        self._most = most
        self._take = take
        self._flag = 0
        self._buffer: Buffer | None = None

    def add(self, data: memoryview) -> int:
        """Takes data up to the end of a prefix or message. Returns how much. Raises GrpcError for a bad prefix."""
        if not self.missing:
            size = PREFIX.size - len(self.part)
            self.part += data[:size]
            if len(self.part) == PREFIX.size:
                flag, length = PREFIX.unpack(self.part)
                self.part.clear()
                self._begin(flag, length)
            return min(size, len(data))
        size = min(len(data), self.missing)
        self.part += data[:size]
        self.missing -= size
        if not self.missing:
            part, self.starved = bytes(self.part), False
            self.part.clear()
            self._take(self._flag, part)
        return size

    def _begin(self, flag: int, length: int) -> None:
        if length > self._most:
            text = f"found a message of {length} bytes, which is larger than max_body_bytes ({self._most})"
            raise GrpcError(Code.RESOURCE_EXHAUSTED, text)
        if not length:
            self._take(flag, b"")
            return
        self._flag, self.missing = flag, length
        self.starved = length > BIG_BYTES

    def reserve(self) -> bool:
        """Gets memory for a large message; False while there is none. Raises GrpcError if there will never be."""
        begun = len(self.part)
        buffer = allocate(self._backend, begun + self.missing)
        if buffer is None:
            return False
        buffer.view[:begun] = self.part
        self.part.clear()
        self.space, self._buffer, self.starved = buffer.view[begun:], buffer, False
        return True

    def filled(self) -> None:
        """The memory of a large message is full."""
        buffer, self._buffer, self.space, self.missing = self._buffer, None, None, 0
        self._take(self._flag, buffer)

    def release(self) -> None:
        """Frees the memory of an incomplete message."""
        self.part.clear()
        self.missing, self.space, self.starved = 0, None, False
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            buffer.release()


def allocate(backend: Backend, length: int) -> Buffer | None:
    """Memory for a large message; None while there is none. Raises GrpcError if there will never be."""
    before = -length % ALIGNMENT  # the last tensor commonly ends the message: aligned, no worker copies it
    try:
        buffer = backend.allocate(length + before)
    except PayloadTooLarge as error:
        raise GrpcError(Code.RESOURCE_EXHAUSTED, error.message) from None
    if buffer is not None:
        buffer.skip(before)
    return buffer


def size_of(message: Payload | Compressed) -> int:
    payload = message.payload if isinstance(message, Compressed) else message
    return len(payload) if isinstance(payload, bytes) else len(payload.view)


def free(message: Payload | Compressed) -> None:
    payload = message.payload if isinstance(message, Compressed) else message
    if not isinstance(payload, bytes):
        payload.release()


async def unpack(message: Compressed, backend: Backend, most: int) -> Payload:
    """The message as it was, at most `most` bytes. Raises GrpcError.

    It is unpacked twice: first to measure it, so that a large one is never anywhere but in shared memory.
    """
    payload = message.payload
    data = memoryview(payload) if isinstance(payload, bytes) else payload.view
    most = min(most, max(MAX_RATIO * len(data), FREE_BYTES))
    buffer: Buffer | None = None
    try:
        length = await asyncio.to_thread(_measure, data, message.wbits, most)
        if length <= BIG_BYTES:
            return b"".join(_pieces(data, message.wbits))
        buffer = allocate(backend, length)
        if buffer is None:
            raise refused(QueueFull("the memory for messages is full; send again later", retry_after_s=1.0))
        pieces, at = _pieces(data, message.wbits), 0
        while piece := await asyncio.to_thread(next, pieces, b""):  # a thread that outlives the call writes nothing
            buffer.view[at : at + len(piece)] = memoryview(piece)
            at += len(piece)
        found, buffer = buffer, None
        return found
    finally:
        if buffer is not None:
            buffer.release()
        free(message)  # here, because who waits for the memory belongs to the event loop


def _pieces(data: memoryview, wbits: int) -> Iterator[bytes]:
    """The unpacked message, a step at a time. Raises GrpcError if it is damaged or cut."""
    unzip, step = zlib.decompressobj(wbits), max(STEP, len(data) // 8)  # each step copies what is left
    rest: bytes | memoryview = data
    try:
        while not unzip.eof and (piece := unzip.decompress(rest, step)):
            yield piece
            rest = unzip.unconsumed_tail
    except zlib.error as error:
        raise GrpcError(Code.INTERNAL, f"the message cannot be unpacked: {error}") from None
    if not unzip.eof:
        raise GrpcError(Code.INTERNAL, "the compressed message is not complete")


def _measure(data: memoryview, wbits: int, most: int) -> int:
    """The length of the unpacked message. Raises GrpcError."""
    length = 0
    for piece in _pieces(data, wbits):
        length += len(piece)
        if length > most:
            bound = f"limits.max_body_bytes, or {MAX_RATIO} times its size"
            raise GrpcError(Code.RESOURCE_EXHAUSTED, f"unpacked, the message is larger than {most} bytes: {bound}")
    return length
