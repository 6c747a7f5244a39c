"""The server's side of one HTTP/2 connection: frames in, frames out, flow control both ways, everything bounded.

It does no I/O and reads no clock: `receive` takes what arrived, and `Outbox` passes outgoing bytes to a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from hyperframe import frame as frames

from penstock.serving.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
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
    NO_LENGTH,
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
    HeaderReader,
    Http2Error,
    are_trailers,
    block_of,
    check_size,
    frame,
    goaway,
    parse_frame,
    rst_stream,
    settings,
    window_update,
)
from penstock.serving.http2.streams import RECEIVE_WINDOW, Outbox, Stream
from penstock.types import Headers

CONNECTION_WINDOW: Final = 2**30  # what waits is bounded by the windows of the streams
DIRECT_BYTES: Final = 2**16
MAX_TRIFLES: Final = 2048  # resets, pings, settings and other frames without data between two calls of `tick` ...
EXPLAINED: Final = 4  # ... and so many more for each stream that was opened and each DATA frame that was sent
USEFUL_BYTES: Final = 2**10  # a smaller window lets data drip, which explains nothing
PREMATURE_S: Final = 0.01  # a stream that was reset within this time had no use: it explains nothing
TURN: Final = 512  # work of one call of `receive`, in units of about 3 us: 32 whole calls, or 64 that are rejected
CALL: Final = 8  # units for the begin of a call, and for its end
MAX_CUT: Final = 1024  # streams that were ended before the client had: it may still send what it began
_DRAINED: Final = b"drained?"  # in a PING: its answer comes after all streams that the client began before it
_DRAIN: Final = goaway(MAX_WINDOW, NO_ERROR) + frame(PING, 0, 0, _DRAINED)


class Bounds(Protocol):
    """The settings of a connection."""

    max_streams: int
    max_header_bytes: int


class Http2Connection:
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
        self.outbox = outbox
        self.streams: dict[int, Stream] = {}
        self.last = 0  # the highest number of a stream that was opened
        self.draining = False
        self.drained = False  # no further stream will come
        self.partial_head = 0  # the stream whose block of headers has begun
        self._bounds = bounds
        self._reader = reader
        self._open_stream = open_stream
        self.turn = 0  # work that is left, see TURN
        self.begun = 0  # 0: the preface is due; 1: the settings are due
        self._credit = DEFAULT_WINDOW
        self._target: tuple[Stream | None, int, int] = (None, 0, 0)  # of data: stream, flags, bytes to come
        self._skip = 0  # bytes to come that mean nothing: padding, or a frame of an unknown kind
        self._block: tuple[int, int, bytearray] = (0, 0, bytearray())  # stream, flags, headers until END_HEADERS
        self._cut: dict[int, None] = {}  # see MAX_CUT
        self._trifles = 0
        self._now = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of an open header block."""
        return len(self._block[2]) if self.partial_head else 0

    def receive(self, data: memoryview, now: float) -> int:
        """Handles frames in `data`. Returns how many bytes were used: the rest comes again, with more behind it, or, if
        `turn` is not positive, without: the others have their turn first.

        Raises Http2Error; the connection is then of no more use.
        """
        at, end = 0, len(data)
        self.turn, self._now = TURN, now
        streams = self.streams
        if self.begun < 2:
            at = self._begin(data)
            if self.begun < 2:
                return at
        while at < end and self.turn > 0:
            self.turn -= 1
            left = self._target[2]
            if left:
                at += self._receive_data(data[at : at + left])
                continue
            if self._skip:
                size = min(self._skip, end - at)
                at += size
                self._skip -= size
                continue
            if end - at < HEAD_BYTES:
                break
            high, low, kind, flags, id = HEAD.unpack_from(data, at)
            size, id = high << 8 | low, id & MAX_WINDOW
            if kind == DATA and not (flags or self.partial_head):  # most likely the rest of a message
                found = streams.get(id)
                begin = at + HEAD_BYTES
                if found is not None and begin + size <= end and 0 < size <= min(len(found.space), found.credit):
                    at = begin + size
                    found.space[:size] = data[begin:at]
                    found.space = found.space[size:]
                    found.credit -= size
                    self._credit -= size
                    if not found.space:
                        found.on_filled()
                    continue
            if kind == DATA and not flags & PADDED:
                at += HEAD_BYTES
                self._data(id, flags, size, size)
                continue
            if kind == DATA and size:
                if end - at == HEAD_BYTES:
                    break
                padding = data[at + HEAD_BYTES]
                if padding >= size:
                    raise Http2Error(PROTOCOL_ERROR, f"found {padding} bytes of padding in a frame of {size}")
                at += HEAD_BYTES + 1
                self._data(id, flags, size - 1 - padding, size)
                self._skip = padding
                continue
            check_size(kind, size, self._bounds.max_header_bytes)
            if kind > CONTINUATION:  # it may be long, and is ignored
                if self.partial_head:
                    raise Http2Error(PROTOCOL_ERROR, f"found a frame of kind {kind}, expected CONTINUATION")
                at += HEAD_BYTES
                self._skip = size
                self._trifle()
                continue
            if end - at - HEAD_BYTES < size:
                break
            self._frame(kind, flags, id, data[at : at + HEAD_BYTES + size])
            at += HEAD_BYTES + size
            if self._reader.work:
                self.turn, self._reader.work = self.turn - self._reader.work, 0
        if self._credit < CONNECTION_WINDOW // 2:
            self.outbox.write(window_update(0, CONNECTION_WINDOW - self._credit))
            self._credit = CONNECTION_WINDOW
        if at == end:
            self.turn = max(self.turn, 1)
        return at

    def direct(self) -> memoryview | None:
        """Where the next bytes belong, if these are many: received there, they need not be copied. See `filled`."""
        stream, _, left = self._target
        if stream is None or min(left, len(stream.space)) < DIRECT_BYTES:
            return None
        return stream.space[:left]

    def filled(self, count: int) -> None:
        """Counts bytes that were received into `direct()`."""
        stream, flags, left = self._target
        assert stream is not None
        self._target = (stream, flags, left - count)
        stream.space = stream.space[count:]
        if not stream.space:
            stream.on_filled()
        self._end_data(stream)

    def tick(self) -> None:
        """Begins another span of time, in which the client may again send some frames without data."""
        self._trifles = self.outbox.sent = 0

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

    def close(self) -> None:
        """The client left. Nothing may be sent any more."""
        streams = list(self.streams.values())
        for stream in streams:
            self.forget(stream)
        for stream in streams:  # all are closed: memory that one frees lets no other one write
            stream.on_closed()
        self._target = (None, 0, self._target[2])  # breaks a reference cycle

    def forget(self, stream: Stream) -> None:
        """Closes a stream without telling the client."""
        stream.closed = True
        self.streams.pop(stream.id, None)
        if not stream.ended:
            self._cut_off(stream.id)
        if stream.unsent:
            self.outbox.drop(stream)

    def _cut_off(self, id: int) -> None:
        self._cut[id] = None
        if len(self._cut) > MAX_CUT:
            del self._cut[next(iter(self._cut))]

    def _refuse(self, id: int, code: int) -> None:
        """Ends a stream that was not opened, or is closed; what else comes on it is ignored."""
        self.outbox.write(rst_stream(id, code))
        self._cut_off(id)
        self._trifle()

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
        more = CONNECTION_WINDOW - self._credit
        self._credit = CONNECTION_WINDOW
        self.outbox.write(settings(values) + window_update(0, more))

    def _frame(self, kind: int, flags: int, id: int, whole: memoryview) -> None:
        """Any frame but data. hyperframe parses those that are not on the path of every call."""
        if kind == HEADERS:
            payload = whole[HEAD_BYTES:]
            self._headers(id, flags, bytes(block_of(id, flags, payload) if flags & (PADDED | PRIORITIZED) else payload))
        elif kind == WINDOW_UPDATE and len(whole) == HEAD_BYTES + 4 and not self.partial_head:
            self._window_update(id, int.from_bytes(whole[HEAD_BYTES:], "big") & MAX_WINDOW)
        elif kind == PRIORITY and len(whole) != HEAD_BYTES + 5 and id in self.streams and not self.partial_head:
            self._breach(self.streams[id], FRAME_SIZE_ERROR)
        elif kind == SETTINGS and flags & ACK and len(whole) > HEAD_BYTES:
            raise Http2Error(FRAME_SIZE_ERROR, "found an acknowledgement of SETTINGS with a payload")
        else:
            self._control(flags, parse_frame(whole))

    def _data(self, id: int, flags: int, size: int, counted: int) -> None:
        """The head of a DATA frame with `size` bytes of data, and with its padding `counted` bytes."""
        if self.partial_head:
            raise Http2Error(PROTOCOL_ERROR, "found DATA, expected CONTINUATION")
        if size > RECEIVE_FRAME:
            raise Http2Error(FRAME_SIZE_ERROR, f"found a frame of {size} bytes, at most {RECEIVE_FRAME} are taken")
        self._credit -= counted
        stream = self._known(id)
        if stream is not None:
            stream.credit -= counted
            if stream.ended:
                self._breach(stream, STREAM_CLOSED)
                stream = None
            elif stream.credit < 0:
                raise Http2Error(FLOW_CONTROL_ERROR, f"found {-stream.credit} bytes more than stream {id} may send")
            elif counted > size:
                stream.granted -= counted - size  # padding belongs to no message
                if not flags & END_STREAM:
                    stream.grant(counted - size)
        elif id not in self._cut:
            self._refuse(id, STREAM_CLOSED)
        self._target = (stream, flags, size)
        if not size:
            if flags & END_STREAM and stream is not None:
                self._end(stream)
            elif not flags & END_STREAM:
                self._trifle()

    def _receive_data(self, data: memoryview) -> int:
        """Takes data of the frame that has begun. Returns how much that was."""
        stream, flags, left = self._target
        size = len(data)
        if stream is None or stream.closed:
            self._target = (None, flags, left - size)
            return size
        if stream.space:
            size = min(size, len(stream.space))
            stream.space[:size] = data[:size]
            stream.space = stream.space[size:]
            if not stream.space:
                stream.on_filled()
        else:
            size = stream.on_data(data, size == left and bool(flags & END_STREAM))
        self._target = (stream, flags, left - size)
        self._end_data(stream)
        return size

    def _end_data(self, stream: Stream) -> None:
        _, flags, left = self._target
        if not left and flags & END_STREAM and not stream.closed:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        """The client has sent everything."""
        self.turn -= CALL
        stream.ended = True
        if stream.length != NO_LENGTH and stream.length != stream.received:
            self._breach(stream, PROTOCOL_ERROR)
        else:
            stream.on_end()

    def _breach(self, stream: Stream, code: int) -> None:
        """Ends a stream whose client broke a rule; the others go on."""
        stream.reset(code)
        stream.on_closed()
        self._trifle()

    def _known(self, id: int) -> Stream | None:
        """An open stream; None for a closed one, whose frames may still be under way. Raises Http2Error for others."""
        stream = self.streams.get(id)
        if stream is None and (id > self.last or not id & 1):
            raise Http2Error(PROTOCOL_ERROR, f"found a frame of stream {id}, which is not open")
        return stream

    def _headers(self, id: int, flags: int, block: bytes) -> None:
        if self.partial_head:
            raise Http2Error(PROTOCOL_ERROR, "found HEADERS, expected CONTINUATION")
        if not flags & END_HEADERS:
            self.partial_head = id
            self._block = (id, flags, bytearray(block))
            return
        self.turn -= CALL
        stream = self.streams.get(id)
        if stream is not None:
            self._trailers(stream, flags, self._reader.decode(block))
            return
        if id in self._cut:
            self._reader.decode(block)
            self._trifle()
            return
        if id <= self.last or not id & 1:
            code = STREAM_CLOSED if id == self.last > 0 else PROTOCOL_ERROR
            raise Http2Error(code, f"found HEADERS of stream {id}, expected an odd number above {self.last}")
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

    def _trailers(self, stream: Stream, flags: int, headers: Headers) -> None:
        """Further headers of an open stream, which gRPC does not use."""
        if stream.ended:
            self._breach(stream, STREAM_CLOSED)
        elif not flags & END_STREAM or not are_trailers(headers):
            self._breach(stream, PROTOCOL_ERROR)
        else:
            self._end(stream)

    def _trifle(self, cost: int = 1) -> None:
        """Counts a frame that costs the server more than the client."""
        self._trifles += cost
        if self._trifles - EXPLAINED * self.outbox.sent > MAX_TRIFLES:
            raise Http2Error(ENHANCE_YOUR_CALM, "too many frames without data, or resets")

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
        self._trifle()
        if id == 0:
            outbox.widen(more)
        elif (stream := self._known(id)) is not None:
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
