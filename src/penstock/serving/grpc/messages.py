"""The headers of a gRPC call, and its messages, which arrive in pieces or compressed.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from struct import Struct as Packing
from typing import Any, Final, NamedTuple

from msgspec import Struct

from penstock.core.contracts import Backend, Buffer
from penstock.errors import BadRequest, PayloadTooLarge, QueueFull
from penstock.serving.grpc.calls import Code, GrpcError, refused
from penstock.serving.http.intake import BIG_BYTES, Unpacking, aligned
from penstock.serving.http.responses import ListenerFull
from penstock.serving.http2.frames import FIELD_BYTES
from penstock.types import Headers

UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
LONGEST_S: Final = 1e8  # three years
_OWN: Final = frozenset({b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"})


class Method(Struct, frozen=True):
    """What serves the calls of one path. `read` parses a message, `write` serializes one."""

    function: Any
    guard: str  # the group whose token opens it; empty: open to all
    refused: GrpcError | None  # how all calls fail
    read: Callable[[Any], Any]
    write: Callable[[Any], bytes]
    client_streaming: bool
    server_streaming: bool
    direct: bool


class CallHead(NamedTuple):
    """The headers of a call. A client's later calls commonly share it."""

    path: str
    method: Method | None
    metadata: Headers
    timeout_s: float | None
    encoding: bytes
    status: int  # of HTTP, for a request that is not gRPC; 0 for a call
    nbytes: int  # of the decoded metadata

    @property
    def authorization(self) -> bytes | None:
        return next((value for name, value in self.metadata if name == b"authorization"), None)


def read_head(headers: Headers, find: Callable[[str], Method | None]) -> CallHead | None:
    """What the headers of a request say; None for a time-out that is none. `find` returns the method of a path."""
    own: dict[bytes, bytes] = {}
    metadata: Headers = []
    for name, value in headers:
        if name[:1] == b":" or name in _OWN:
            own[name] = value
        else:
            metadata.append((name, _decoded(value) if name.endswith(b"-bin") else value))
    path = own.get(b":path", b"").decode("latin-1")
    status = 0
    if own[b":method"] != b"POST":
        status = 405
    elif not own.get(b"content-type", b"").startswith(b"application/grpc"):
        status = 415
    timeout, timeout_s = own.get(b"grpc-timeout"), None
    if timeout is not None:
        if not (timeout[:-1].isdigit() and len(timeout) <= 9 and timeout[-1:] in UNITS):
            return None
        timeout_s = min(int(timeout[:-1]) * UNITS[timeout[-1:]], LONGEST_S)
    nbytes = len(path) + sum([FIELD_BYTES + len(name) + len(value) for name, value in metadata])
    return CallHead(path, find(path), metadata, timeout_s, own.get(b"grpc-encoding", b"identity"), status, nbytes)


def _decoded(value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return value


PREFIX: Final = Packing(">BI")  # of a message: whether it is compressed, and its length
ENCODINGS: Final = {b"gzip": "gzip", b"deflate": "deflate"}

Payload = bytes | Buffer


class Compressed(NamedTuple):
    """A message that is not unpacked yet."""

    payload: Payload
    coding: str


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
        try:
            buffer = aligned(self._backend, begun + self.missing)
        except PayloadTooLarge as error:
            raise GrpcError(Code.RESOURCE_EXHAUSTED, error.message) from None
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


def size_of(message: Payload | Compressed) -> int:
    payload = message.payload if isinstance(message, Compressed) else message
    return len(payload) if isinstance(payload, bytes) else len(payload.view)


def free(message: Payload | Compressed) -> None:
    payload = message.payload if isinstance(message, Compressed) else message
    if not isinstance(payload, bytes):
        payload.release()


async def unpack(message: Compressed, unpacking: Unpacking, most: int) -> Payload:
    """The message as it was, at most `most` bytes. Raises GrpcError."""
    try:
        return await unpacking.unpack(message.payload, message.coding, most)
    except (PayloadTooLarge, QueueFull, ListenerFull) as error:
        raise refused(error) from None
    except BadRequest as error:
        raise GrpcError(Code.INTERNAL, f"the message cannot be unpacked: {error.message}") from None
