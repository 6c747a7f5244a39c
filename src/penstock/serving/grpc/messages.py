"""What gRPC calls consist of: headers, messages in pieces or compressed, the parts of a response, and a status.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import base64
import binascii
from collections import deque
from collections.abc import AsyncGenerator, Callable
from enum import IntEnum
from struct import Struct as Packing
from typing import Any, Final, NamedTuple

from msgspec import Struct

from penstock.core.contracts import Backend, Buffer, Ticket
from penstock.errors import BadRequest, PayloadTooLarge, PenstockError, QueueFull
from penstock.serving.http.intake import BIG_BYTES, Budget, Unpacking, aligned
from penstock.serving.http.responses import ListenerFull
from penstock.serving.http2.frames import FIELD_BYTES
from penstock.serving.protocols.bodies import ERROR_CODE
from penstock.types import Headers, ItemResult, Sink

PUSHBACK: Final = "grpc-retry-pushback-ms"  # when a client should try again (gRFC A6)
UNREAD_BYTES: Final = 16 * 2**20  # parts of a response that wait for a slow client


class Code(IntEnum):
    """gRPC's statuses."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_CODES: Final = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    413: Code.RESOURCE_EXHAUSTED,
    416: Code.OUT_OF_RANGE,
    422: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    499: Code.CANCELLED,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}


class GrpcError(Exception):
    """Ends a call with this status and text."""

    def __init__(self, code: Code, details: str, retry_after_s: float | None = None, error_code: str = "") -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.retry_after_s = retry_after_s
        self.error_code = error_code  # of a PenstockError

    def trailing(self) -> list[tuple[str, str]]:
        """The metadata behind the status."""
        found = [(ERROR_CODE, self.error_code)] if self.error_code else []
        if self.retry_after_s is not None:
            found.append((PUSHBACK, str(round(self.retry_after_s * 1000))))
        return found


def refused(error: PenstockError) -> GrpcError:
    """The status of a listener or pool that is full."""
    return GrpcError(Code.RESOURCE_EXHAUSTED, error.message, error.retry_after_s, error.code)


def code_of(status: int) -> Code:
    """The gRPC code for an HTTP status of 400 or above."""
    return _CODES.get(status) or (Code.FAILED_PRECONDITION if status < 500 else Code.INTERNAL)


class ResponseParts:
    """The sink of one or more requests. It copies bodies, which may be views that are valid only during the call."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._waiting: deque[ItemResult] = deque()
        self._bytes = 0  # of the waiting parts
        self._overflow = False  # the client left too much unread: unsent parts are dropped
        self._arrival: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """How many parts wait."""
        return len(self._waiting)

    def put(self, result: ItemResult) -> None:
        if self._overflow:
            return
        if self._waiting and (self._bytes - len(self._waiting[0].body) > UNREAD_BYTES or self._budget.full):
            self.close()
            return
        result.body = bytes(result.body)
        self._count(len(result.body))
        self._waiting.append(result)
        self.wake()

    def close(self) -> None:
        """Drops the waiting parts and all later ones."""
        self._overflow = True
        self._waiting.clear()
        self._count(-self._bytes)

    def _count(self, more: int) -> None:
        self._bytes += more
        self._budget.count(more)

    def wake(self) -> None:
        """Ends the wait of `next`, with or without a part."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> ItemResult | None:
        """The next part; None if `wake` was called without one. Raises QueueFull if the client left too much unread."""
        if not self._waiting and not self._overflow:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if self._overflow:
            raise QueueFull(f"the client left more than {UNREAD_BYTES} bytes of its answer unread, or the port is full")
        if not self._waiting:
            return None
        result = self._waiting.popleft()
        self._count(-len(result.body))
        return result


async def parts_of(submit: Callable[[Sink], Ticket], budget: Budget) -> AsyncGenerator[ItemResult, None]:
    """The results of one request, which ends if its caller leaves. Raises the errors of `submit`, and QueueFull."""
    answer = ResponseParts(budget)
    ticket = submit(answer.put)
    final = False
    try:
        while not final:
            result = await answer.next()
            if result is not None:
                final = result.final
                yield result
    finally:
        answer.close()
        if not final:
            ticket.cancel()


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


class CallHead(Struct):
    """The headers of a call. A client's later calls commonly share it."""

    path: str
    method: Method | None
    metadata: Headers
    timeout_s: float | None
    encoding: bytes
    status: int  # of HTTP, for a request that is not gRPC; 0 for a call
    nbytes: int  # of the decoded metadata
    authorization: bytes | None
    traceparent: str = ""
    terms: Any = None  # what a service has read of the metadata, and keeps for the later calls


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
    token = next((value for name, value in metadata if name == b"authorization"), None)  # the first one decides
    trace = next((value for name, value in metadata if name == b"traceparent"), b"").decode("latin-1")
    encoding = own.get(b"grpc-encoding", b"identity")
    return CallHead(path, find(path), metadata, timeout_s, encoding, status, nbytes, token, trace)


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
    """Cuts the data of one stream into messages, and passes the flag and payload of each to `take`.

    A large message waits for memory: `starved` is then true, until `reserve` returns True. Its data goes to `space`,
    from where `filled` counts it.
    """

    def __init__(self, backend: Backend, most: int, take: Callable[[int, Any], None]) -> None:
        self.space: memoryview | None = None  # memory for the missing part of a large message
        self.starved = False
        self.missing = 0  # bytes of the message that have not arrived
        self.part = bytearray()  # received bytes of a small or starved message, or of a prefix
        self._backend = backend
        self._most = most
        self._take = take
        self._flag = 0
        self._buffer: Buffer | None = None

    def add(self, data: memoryview) -> int:
        """The number of bytes taken, up to the end of a prefix or message. Raises GrpcError for a bad prefix."""
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
        """Completes a large message: all its bytes have arrived."""
        buffer, self._buffer, self.space, self.missing = self._buffer, None, None, 0
        self._take(self._flag, buffer)

    def release(self) -> None:
        """Frees the memory of an incomplete message."""
        self.part.clear()
        self.missing, self.space, self.starved = 0, None, False
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            buffer.release()


def payload_of(message: Payload | Compressed) -> Payload:
    """The received bytes of a message."""
    return message.payload if isinstance(message, Compressed) else message


async def unpack(message: Compressed, unpacking: Unpacking, most: int) -> Payload:
    """The message as it was, at most `most` bytes. Raises GrpcError."""
    try:
        return await unpacking.unpack(message.payload, message.coding, most)
    except (PayloadTooLarge, QueueFull, ListenerFull) as error:
        raise refused(error) from None
    except BadRequest as error:
        raise GrpcError(Code.INTERNAL, f"the message cannot be unpacked: {error.message}") from None
