"""One gRPC call on an HTTP/2 stream: messages in, messages and a status out.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from struct import Struct as Packing
from typing import Any, Final, Protocol
from urllib.parse import quote

from penstock.request import pseudo_headers
from penstock.serving.grpc.messages import (
    ENCODINGS,
    PREFIX,
    CallHead,
    Code,
    Compressed,
    GrpcError,
    MessageReader,
    payload_of,
    refused,
    unpack,
)
from penstock.serving.http.listener import INF, Listener
from penstock.serving.http2.frames import (
    DATA,
    EMPTY_TABLE,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    NO_ERROR,
    encode_headers,
    frame,
    rst_stream,
)
from penstock.serving.http2.streams import NO_SPACE, RECEIVE_WINDOW, Stream, StreamSet
from penstock.serving.protocols.bodies import data_of, free
from penstock.types import Headers, Trace

SPACE_BYTES: Final = 2**30  # granted at once: a window has less than 2^31
SMALL_HEAD: Final = 2**10  # decoded metadata up to this size is not counted
MESSAGE: Final = 4  # units of `turn` for a message of a client's stream
DETAILS_BYTES: Final = 2400  # of a status, three times as much in the trailers: clients take 8 KiB of headers
_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_HEAD: Final = encode_headers(
    [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity,deflate,gzip")]
)
_OK: Final = encode_headers([("grpc-status", "0")])
# headers and the head of a DATA frame with one message; and the trailers of a call without an error
_BEGIN: Final = Packing(f">5sI{len(_HEAD)}sIBIBI")
_END: Final = Packing(f">5sI{len(_OK)}s")
_BEGIN_HEAD: Final = frame(HEADERS, END_HEADERS, 0, _HEAD)[:5]  # all but the number of the stream
_END_HEAD: Final = frame(HEADERS, END_HEADERS | END_STREAM, 0, _OK)[:5]


class CallOwner(Protocol):
    """A connection, as its calls see it."""

    listener: Listener
    transport: asyncio.Transport
    sent: tuple[str, str | None]  # model and version of the last response

    def check(self, head: CallHead) -> None:
        """Raises GrpcError for a call that is not served."""

    def start(self, call: GrpcCall) -> None:
        """Runs a call: its message has arrived, or it is a stream of messages."""

    def settle(self) -> None:
        """A call has ended on a connection that takes no others."""


class GrpcCall(Stream):
    """A call, from its headers to its status. Methods get it as their second argument."""

    trace: Trace | None = None  # of its last request that is traced
    on_cancel: Callable[[], object] | None = None  # ends the work for a client that left
    asked: tuple[str, str | None] = ("", None)  # model and version
    seen = 0  # bytes received up to the last sweep
    rest_at = INF  # the time by which the rest of a message must arrive
    _untaken = 0  # bytes of `messages`
    _held = 0  # bytes in the budget of the listener
    _begun = False  # the headers of the response were sent
    _reader: MessageReader | None = None  # of messages in pieces
    _waiting = False  # for memory
    _arrival: asyncio.Future[None] | None = None
    _sent: asyncio.Future[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _due_s = 0.0

    def __init__(self, connection: StreamSet, id: int, head: CallHead, owner: CallOwner) -> None:
        super().__init__(connection, id)
        self.head = head
        self.owner = owner
        self.messages: list[Any] = []  # received, not taken by the method yet

    # ---- for the method

    @property
    def metadata(self) -> Headers:
        return self.head.metadata

    @property
    def traceparent(self) -> str:
        """Of the caller's span, "" without one."""
        return self.head.traceparent

    def pseudo_headers(self) -> Headers:
        """What the metadata do not say, see `penstock.request`."""
        return pseudo_headers(b"POST", self.head.path.encode(), self.owner.transport.get_extra_info("peername"))

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None without one."""
        return None if self.head.timeout_s is None else max(0.0, self._due_s - self.owner.listener.now())

    def __aiter__(self) -> GrpcCall:
        return self

    async def __anext__(self) -> Any:
        """The next message of the client: `bytes`, or a Buffer that the caller releases. Raises GrpcError."""
        while not self.messages:
            if self.ended or self.closed:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return await self.take()

    async def take(self) -> Any:
        """The first received message, unpacked. Raises GrpcError."""
        message = self.pop()
        self._replenish()
        if isinstance(message, Compressed):
            listener = self.owner.listener
            return await unpack(message, listener.unpacking, listener.config.max_body_bytes)
        return message

    def pop(self) -> Any:
        """The first received message."""
        message = self.messages.pop(0)
        if self._held or self.messages or not self.ended:  # not of the usual call, whose one message is here
            self._untaken -= len(data_of(payload_of(message)))
            self.count()
        return message

    def reply(self, body: bytes | memoryview) -> None:
        """Ends the call with one message, which is copied if it cannot be sent at once."""
        size, id, outbox = len(body), self.id, self.connection.outbox
        length = size + PREFIX.size
        if self.closed or self.last:
            return
        if self._begun or not self.ended or not outbox.admits(self, length):
            self._send(bytes(body), _OK)
            return
        begin = _BEGIN.pack(_BEGIN_HEAD, id, _HEAD, length << 8 | DATA, 0, id, 0, size)
        end = _END.pack(_END_HEAD, id, _OK)
        self.window -= length
        outbox.window -= length
        outbox.sent += 1
        self.owner.sent = self.asked
        outbox.write(b"".join((begin, body, end)))
        self.connection.forget(self)
        self._release()

    async def write(self, message: bytes) -> None:
        """Sends one of several messages. Waits while the client does not read."""
        self._send(message)
        if self.unsent and not self.closed:
            self._sent = asyncio.get_running_loop().create_future()
            await self._sent

    def finish(self) -> None:
        """Ends the call without an error."""
        if not (self.closed or self.last):
            self._end(_OK)

    def fail(self, error: GrpcError) -> None:
        """Ends the call with the status of an error."""
        if self.closed or self.last:
            return
        self.owner.listener.count_error(error.error_code or error.code.name.lower())
        text = error.details.encode(errors="replace")[:DETAILS_BYTES].decode(errors="ignore")
        fields = [("grpc-status", str(int(error.code))), ("grpc-message", quote(text, safe=_PRINTABLE))]
        self._end(encode_headers([*fields, *error.trailing()]))

    # ---- for the connection

    def on_open(self) -> None:
        head = self.head
        if head.status:
            last = frame(HEADERS, END_HEADERS | END_STREAM, self.id, encode_headers([(":status", str(head.status))]))
            self.connection.outbox.send(self, (), last + (b"" if self.ended else rst_stream(self.id, NO_ERROR)))
            self._release()
            return
        if head.timeout_s is not None:
            self._due_s = self.owner.listener.now() + head.timeout_s
            self._timer = asyncio.get_running_loop().call_later(head.timeout_s, self._expire)
        try:
            self.owner.check(head)
            if head.nbytes > SMALL_HEAD:
                self.count()
        except GrpcError as error:
            self.fail(error)
            return
        assert head.method is not None
        if head.method.client_streaming:
            self.owner.start(self)
        elif self.ended:
            self.on_end()
        else:
            self.rest_at = self.owner.listener.clock.body_at

    def on_data(self, data: memoryview, last: bool) -> int:
        whole = len(data)
        if self.last:  # it was answered before
            return whole
        listener, reader, size = self.owner.listener, self._reader, whole
        if reader is None:
            if last and size >= PREFIX.size:
                flag, length = PREFIX.unpack_from(data)
                if size == length + PREFIX.size and length <= listener.small_bytes:
                    self._take(flag, data[PREFIX.size :].tobytes())  # nearly every small message comes in one piece
                    return whole
            reader = self._reader = MessageReader(listener.backend, listener.config.max_body_bytes, self._take)
        try:
            while len(data) and self.connection.turn > 0:
                if self.closed or self.last:
                    return whole
                if self.space:
                    size = self.fill(data)
                else:
                    size = reader.add(data)
                    if reader.missing or reader.part:
                        self._begin(reader)
                data = data[size:]
            self.count()
        except GrpcError as error:
            self.fail(error)
            return whole
        return whole - len(data)

    def on_filled(self) -> None:
        reader = self._reader
        assert reader is not None
        assert reader.space is not None
        reader.space = reader.space[SPACE_BYTES:]
        self.space = reader.space[:SPACE_BYTES]
        if self.space:
            self._replenish()
        else:
            reader.filled()

    def on_end(self) -> None:
        if self.last:  # it was answered before
            return
        method = self.head.method
        assert method is not None
        self.rest_at = INF
        if self._reader is not None and (self._reader.missing or self._reader.part):
            self.fail(GrpcError(Code.INTERNAL, "the stream ended within a message"))
        elif method.client_streaming:
            self._wake()
        elif self.messages:
            self.owner.start(self)
        else:
            self.fail(GrpcError(Code.INTERNAL, "the call has no message; send one"))

    def on_sent(self) -> None:
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def on_closed(self) -> None:
        self._cancel()
        self._release()

    # ---- messages

    def _begin(self, reader: MessageReader) -> None:
        """Called when a part of a message has arrived. Raises GrpcError."""
        if not reader.starved:
            self._expect()
            self._replenish()
        elif not self._waiting:
            memory = self.owner.listener.memory
            if memory or not self.reserve():
                self._waiting = True
                self.rest_at = INF  # the server does not read: the client is not late
                memory.add(self)

    def reserve(self) -> bool:
        """Gets memory for a large message; False while there is none. True also when it is no longer wanted."""
        reader = self._reader
        if reader is None or not reader.starved:
            self._waiting = False
            return True
        try:
            if not reader.reserve():
                return False
        except GrpcError as error:
            self.fail(error)
            return True
        assert reader.space is not None
        self.space, self._waiting = reader.space[:SPACE_BYTES], False
        self._expect()
        self._replenish()
        return True

    def count(self) -> None:
        """Brings the budget of the listener up to date. Raises GrpcError if it is full."""
        if self.closed or self.last:
            return
        head = self.head.nbytes if self.head.nbytes > SMALL_HEAD else 0
        kept = head + self._untaken + (len(self._reader.part) if self._reader is not None else 0)
        budget, more, self._held = self.owner.listener.budget, kept - self._held, kept
        budget.count(more)
        if budget.full and more > 0:
            raise refused(budget.refusal())

    def _expect(self) -> None:
        """Sets the deadline for the rest of a message; steady data moves it, see `Clock.extended`."""
        if self.rest_at == INF:
            self.rest_at = self.owner.listener.clock.body_at

    def _take(self, flag: int, payload: Any) -> None:
        """Called when a whole message has arrived."""
        method, message = self.head.method, payload
        assert method is not None
        try:
            if flag:
                message = Compressed(payload, self._coding(flag))
            if self.messages and not method.client_streaming:
                raise GrpcError(Code.INTERNAL, "found a second message, expected one")
        except GrpcError as error:
            free(payload)
            self.fail(error)
            return
        self.messages.append(message)
        self._untaken += len(data_of(payload))
        if method.client_streaming:
            self.connection.turn -= MESSAGE  # thousands may come in one frame
            self.rest_at = INF
            self._wake()

    def _coding(self, flag: int) -> str:
        """The coding of a message with this flag, which is not 0. Raises GrpcError."""
        coding = ENCODINGS.get(self.head.encoding)
        if coding is None and self.head.encoding != b"identity":
            raise GrpcError(Code.UNIMPLEMENTED, "found another grpc-encoding, expected identity, gzip or deflate")
        if coding is None or flag > 1:
            raise GrpcError(Code.INTERNAL, "found a compressed message, but grpc-encoding names no compression")
        return coding

    def _replenish(self) -> None:
        """Lets the client send the rest of its message, and otherwise a window full of bytes that are not taken yet."""
        if self.ended or self.closed:
            return
        kept, missing, reader = self._untaken, len(self.space), self._reader
        if reader is not None and not self.space:
            kept += len(reader.part)
            missing = 0 if reader.starved else reader.missing
        want = max(RECEIVE_WINDOW - kept, missing)
        if want - self.credit >= RECEIVE_WINDOW // 2 or missing > self.credit:
            self.grant(want - self.credit)

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    # ---- the end

    def _expire(self) -> None:
        self.fail(GrpcError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _trailers(self, block: bytes) -> bytes:
        """The frames that end the stream on both sides."""
        whole = block if self._begun else _HEAD + block.removeprefix(EMPTY_TABLE)
        last = frame(HEADERS, END_HEADERS | END_STREAM, self.id, whole)
        return last if self.ended else last + rst_stream(self.id, NO_ERROR)

    def _send(self, message: bytes, block: bytes = b"") -> None:
        """Sends a message, and `block` as the trailers of the call."""
        if self.closed:
            return
        self.owner.sent = self.asked
        if not self._begun:
            self._begun = True
            self.connection.outbox.write(frame(HEADERS, END_HEADERS, self.id, _HEAD))
        prefix = PREFIX.pack(0, len(message))
        parts = (prefix + message,) if len(message) < 2**14 else (prefix, message)
        self.connection.outbox.send(self, parts, self._trailers(block) if block else b"")
        if block:
            self._release()

    def _end(self, block: bytes) -> None:
        last = self._trailers(block)
        self._cancel()
        self.connection.outbox.send(self, (), last)
        self._release()

    def _cancel(self) -> None:
        cancel, self.on_cancel = self.on_cancel, None
        if cancel is not None:
            cancel()

    def _release(self) -> None:
        """Frees everything that an ended call holds."""
        self.on_cancel = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.rest_at, self.space = INF, NO_SPACE
        if self._reader is not None:
            self._reader.release()
            self._reader = None  # breaks a reference cycle
            if self._waiting:
                self.owner.listener.memory.discard(self)
        if self._held:
            self.owner.listener.budget.count(-self._held)
            self._held = 0
        while self.messages:
            free(payload_of(self.messages.pop()))
        if self._arrival is not None:
            self._wake()
        if self._sent is not None:
            self.on_sent()
        if self.connection.drained:
            self.owner.settle()
