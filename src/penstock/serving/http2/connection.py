"""The server's side of one HTTP/2 connection: frames in, frames out, flow control both ways, everything bounded.

It does no I/O and reads no clock: `receive` takes what arrived, and `Outbox` passes outgoing bytes to a function.
"""

# A client opens a connection with a fixed preface and its settings; after that both sides send frames. A frame has a
# head of nine bytes: its length, its kind, its flags and the number of its stream. A stream is one request and its
# response: HEADERS (and CONTINUATION, if they are long) open it, DATA frames carry its body, and the flag END_STREAM
# ends one direction of it. Many streams share the connection; within a block of headers no other frame may come.
#
# DATA is subject to two windows, one for the stream and one for the connection: the receiver grants bytes, the sender
# spends them. Here the window of the connection is practically infinite; the window of each stream bounds the bytes
# that wait for it. Bytes of a large message go straight to the memory where they belong (`Stream.space`); nothing else
# is gathered, except a block of headers.
#
# Everything else that a client may send costs it less than it costs the server: resets, pings, settings, empty frames.
# Such frames are counted as trifles, and what explains them (streams opened, data sent) is subtracted; too many end the
# connection. A broken rule ends the stream if only the stream is concerned, else the connection, with an error code.
# One call of `receive` does a bounded amount of work, its turn: then other connections have theirs.
#
# To close without losing a request the server says GOAWAY with the highest number and sends a PING. When the PING comes
# back, every stream that the client had opened is known, and a second GOAWAY names the last one.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from hyperframe import frame as frames

from penstock.serving.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITIZED,
    PRIORITY,
    PROTOCOL_ERROR,
    RECEIVE_FRAME,
    REFUSED_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WORD,
    HeaderReader,
    Http2Error,
    are_trailers,
    block_of,
    check_size,
    frame,
    goaway,
    parse_frame,
    settings,
    window_update,
)
from penstock.serving.http2.streams import CALL, EXPLAINED, MAX_TRIFLES, RECEIVE_WINDOW, TURN, Outbox, Stream, StreamSet

CONNECTION_WINDOW: Final = 2**30  # half of what RFC 9113 allows: the windows of the streams bound what waits
USEFUL_BYTES: Final = 2**10  # a choice: a smaller window lets data drip, which explains nothing
PREMATURE_S: Final = 0.01  # a choice: a stream that was reset within this time had no use, and explains nothing
_DRAINED: Final = b"drained?"  # in a PING: its acknowledgement follows all streams that the client opened before
_DRAIN: Final = goaway(MAX_WINDOW, NO_ERROR) + frame(PING, 0, 0, _DRAINED)


class Bounds(Protocol):
    """The settings of a connection."""

    max_streams: int
    max_header_bytes: int


class Http2Connection(StreamSet):
    """Parses what a client sends and calls the methods of its streams, which `open_stream` makes.

    `open_stream` receives the connection, the number of the stream and what `reader` found in its headers; None means
    that they are malformed.
    """

    def __init__(
        self,
        bounds: Bounds,
        outbox: Outbox,
        reader: HeaderReader[Any],
        open_stream: Callable[[Http2Connection, int, Any], Stream],
    ) -> None:
        super().__init__(outbox)
        self.begun = 0  # 0: the preface is due; 1: the settings are due; 2: both have come
        self.draining = False
        self._bounds = bounds
        self._reader = reader
        self._open_stream = open_stream
        self._block: tuple[int, int, bytearray] = (0, 0, bytearray())  # stream, flags, headers until END_HEADERS
        self._now = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of an open header block."""
        return len(self._block[2]) if self.partial_head else 0

    def receive(self, data: memoryview, now: float) -> int:
        """The number of bytes of `data` that were handled. The rest comes again: with more behind it, or, if `turn` is
        not positive, after the turns of others. Raises Http2Error; the connection is then useless.
        """
        at, end, unpack = 0, len(data), HEAD.unpack_from
        self.turn, self._now = TURN, now
        if self.begun < 2:
            at = self._begin(data)
            if self.begun < 2:
                return at
        while at < end and self.turn > 0:
            self.turn -= 1
            if left := self._target[2]:
                at += self._receive_data(data[at : at + left])
                continue
            if self._skip:
                size = min(self._skip, end - at)
                at, self._skip = at + size, self._skip - size
                continue
            if (begin := at + HEAD_BYTES) > end:
                break
            high, low, kind, flags, id = unpack(data, at)
            size, id = high << 8 | low, id & MAX_WINDOW
            if kind == WINDOW_UPDATE and size == WORD.size and begin + size <= end and not self.partial_head:
                self._window_update(id, WORD.unpack_from(data, begin)[0] & MAX_WINDOW)
                at = begin + size
                continue
            if kind == DATA and not flags & PADDED:
                found = self.streams.get(id) if size and begin + size <= end and not self.partial_head else None
                if found is None or found.ended or size > found.credit:
                    self._data(id, flags, size, size)
                    at = begin
                else:
                    at = begin + self._whole_data(found, flags, data[begin : begin + size])
                continue
            if kind == DATA and size:
                if end == begin:
                    break
                self._padded(id, flags, size, data[begin])
                at = begin + 1
                continue
            if size > DEFAULT_FRAME:
                check_size(kind, size, self._bounds.max_header_bytes)
            if kind > CONTINUATION:
                self._ignore(kind, size)
                at = begin
                continue
            if end - begin < size:
                break
            at = begin + size
            if kind == HEADERS and not flags & (PADDED | PRIORITIZED):
                self._headers(id, flags, data[begin:at].tobytes())
            else:
                self._frame(kind, flags, id, data[begin - HEAD_BYTES : at])
            self.turn, self._reader.work = self.turn - self._reader.work, 0
        if self._credit < CONNECTION_WINDOW // 2:
            self._refill()
        if at == end:
            self.turn = max(self.turn, 1)
        return at

    def _refill(self) -> None:
        """Grants what the client has spent of the connection's window."""
        self.outbox.write(window_update(0, CONNECTION_WINDOW - self._credit))
        self._credit = CONNECTION_WINDOW

    def drain(self) -> None:
        """Asks the client to open no further streams. `drained` becomes true when those that it has opened are here."""
        if not self.draining:
            self.draining = True
            if self.begun:
                self.outbox.write(_DRAIN)

    def fail(self, error: Http2Error) -> None:
        """Tells the client why the connection ends."""
        if not self.begun:
            self._start()
        self.outbox.write(goaway(self.last, error.code, str(error)))

    # ---- what arrives

    def _begin(self, data: memoryview) -> int:
        """Reads the preface, and the head of the first frame. Returns the bytes that were used."""
        at = 0
        if not self.begun:
            given = bytes(data[: len(PREFACE)])
            if not PREFACE.startswith(given):
                raise Http2Error(PROTOCOL_ERROR, "the preface of HTTP/2 is missing")
            if len(given) < len(PREFACE):
                return 0
            self.begun, at = 1, len(PREFACE)
            self._start()
            if self.draining:
                self.outbox.write(_DRAIN)
        if len(data) - at >= HEAD_BYTES:
            kind, flags = data[at + 3], data[at + 4]
            if kind != SETTINGS or flags & ACK:
                raise Http2Error(PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self.begun = 2
        return at

    def _start(self) -> None:
        """Sends the settings, first of all."""
        bounds = self._bounds
        values = {MAX_CONCURRENT_STREAMS: bounds.max_streams, MAX_FRAME_SIZE: RECEIVE_FRAME}
        values |= {MAX_HEADER_LIST_SIZE: bounds.max_header_bytes, INITIAL_WINDOW_SIZE: RECEIVE_WINDOW}
        self.outbox.write(settings(values))
        self._refill()

    def _frame(self, kind: int, flags: int, id: int, whole: memoryview) -> None:
        """A frame that is not on the path of every call: hyperframe parses most of them."""
        if kind == HEADERS:
            self._headers(id, flags, bytes(block_of(id, flags, whole[HEAD_BYTES:])))
        elif kind == PRIORITY and len(whole) != HEAD_BYTES + 5 and id in self.streams and not self.partial_head:
            self._breach(self.streams[id], FRAME_SIZE_ERROR)
        elif kind == SETTINGS and flags & ACK and len(whole) > HEAD_BYTES:
            raise Http2Error(FRAME_SIZE_ERROR, "found an acknowledgement of SETTINGS with a payload")
        else:
            self._control(flags, parse_frame(whole))

    def _ignore(self, kind: int, size: int) -> None:
        """The head of a frame of an unknown kind, which may be long."""
        if self.partial_head:
            raise Http2Error(PROTOCOL_ERROR, f"found a frame of kind {kind}, expected CONTINUATION")
        self._skip = size
        self._trifle()

    def _headers(self, id: int, flags: int, block: bytes) -> None:
        if self.partial_head:
            raise Http2Error(PROTOCOL_ERROR, "found HEADERS, expected CONTINUATION")
        if not flags & END_HEADERS:
            self.partial_head = id
            self._block = (id, flags, bytearray(block))
            return
        self.turn -= CALL
        if id <= self.last or not id & 1:
            self._late_headers(id, flags, block)
            return
        found, length = self._reader.read(block)
        self.last = id
        if self.drained or len(self.streams) >= self._bounds.max_streams:
            self._refuse(id, REFUSED_STREAM)
        elif found is None or (length > 0 and flags & END_STREAM):
            self._refuse(id, PROTOCOL_ERROR)
        else:
            self._trifles -= EXPLAINED
            stream = self.streams[id] = self._open_stream(self, id, found)
            stream.length, stream.opened = length, self._now
            stream.ended = bool(flags & END_STREAM)
            stream.on_open()

    def _late_headers(self, id: int, flags: int, block: bytes) -> None:
        """Headers that open no stream: trailers, which gRPC does not use, or an error."""
        stream = self.streams.get(id)
        if stream is None and id not in self._cut:
            code = STREAM_CLOSED if id == self.last > 0 else PROTOCOL_ERROR
            raise Http2Error(code, f"found HEADERS of stream {id}, expected an odd number above {self.last}")
        headers = self._reader.decode(block)
        if stream is None:
            self._trifle()
        elif stream.ended:
            self._breach(stream, STREAM_CLOSED)
        elif not flags & END_STREAM or not are_trailers(headers):
            self._breach(stream, PROTOCOL_ERROR)
        else:
            self._end(stream)

    def _control(self, flags: int, found: frames.Frame) -> None:
        """A frame that hyperframe has parsed."""
        if self.partial_head and not isinstance(found, frames.ContinuationFrame):
            raise Http2Error(PROTOCOL_ERROR, f"found {type(found).__name__}, expected CONTINUATION")
        match found:
            case frames.ContinuationFrame():
                self._continuation(found.stream_id, flags, found.data)
            case frames.SettingsFrame():
                if not flags & ACK:
                    self._settings(found.settings)
                    self.outbox.write(frame(SETTINGS, ACK, 0))
            case frames.PingFrame():
                if not flags & ACK:
                    self.outbox.write(frame(PING, ACK, 0, found.opaque_data))
                elif found.opaque_data == _DRAINED and self.draining:
                    self.drained = True
                    self.outbox.write(goaway(self.last, NO_ERROR))
            case frames.RstStreamFrame():
                stream = self._known(found.stream_id)
                if stream is not None:
                    stream.ended = True
                    self.forget(stream)
                    stream.on_closed()
                    if self._now - stream.opened < PREMATURE_S:
                        self._trifle(EXPLAINED)
            case frames.PushPromiseFrame():
                raise Http2Error(PROTOCOL_ERROR, "found PUSH_PROMISE of a client")
            case frames.PriorityFrame():
                if found.depends_on == found.stream_id:
                    raise Http2Error(PROTOCOL_ERROR, f"stream {found.stream_id} depends on itself")
        self._trifle()

    def _continuation(self, id: int, flags: int, data: bytes) -> None:
        begun, first_flags, block = self._block
        if not self.partial_head or begun != id:
            raise Http2Error(PROTOCOL_ERROR, f"found CONTINUATION of stream {id}, which has no open headers")
        block += data
        if len(block) > self._bounds.max_header_bytes:
            most = self._bounds.max_header_bytes
            raise Http2Error(ENHANCE_YOUR_CALM, f"the headers have more than {most} bytes (limits.max_header_bytes)")
        if flags & END_HEADERS:
            self.partial_head = 0
            self._headers(id, first_flags | END_HEADERS, bytes(block))

    def _window_update(self, id: int, more: int) -> None:
        outbox, sent = self.outbox, self.outbox.sent
        self._trifles += 1  # clients send two of these frames with each call
        if self._trifles > MAX_TRIFLES:
            self._trifle(0)
        if id == 0:
            outbox.widen(more)
        elif (stream := self.streams.get(id) or self._known(id)) is not None:
            stream.window += more
            if not more or stream.window > MAX_WINDOW:
                self._breach(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            elif stream.unsent:
                outbox.send(stream, (), stream.last)
        if more < USEFUL_BYTES:
            outbox.sent = sent

    def _settings(self, values: dict[int, int]) -> None:
        sent = self.outbox.sent
        if self.outbox.configure(values, self.streams.values()):
            self._trifle(len(self.streams) // 16)
        self.outbox.sent = sent
