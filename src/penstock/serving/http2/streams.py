"""Streams of an HTTP/2 connection, what sends their data within the windows of the client, and what receives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from penstock.serving.http2.frames import (
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    NO_LENGTH,
    PROTOCOL_ERROR,
    RECEIVE_FRAME,
    STREAM_CLOSED,
    Http2Error,
    data_head,
    rst_stream,
    window_update,
)

WRITE_BYTES: Final = 2**18  # passed on at once, before the transport can say that it is full
NO_SPACE: Final = memoryview(b"")
DIRECT_BYTES: Final = 2**16  # a choice: fewer bytes are copied in less time than a read of their own costs
TURN: Final = 512  # work of one call of `receive`, in units of about 3 us: 32 whole calls, or 64 that are rejected
CALL: Final = 8  # units for the begin of a call, and for its end
# a choice: resets, pings, settings and other frames without data between two calls of `tick` (0.5 s) ...
MAX_TRIFLES: Final = 2048
EXPLAINED: Final = 4  # ... and so many more for each stream that was opened and each DATA frame that was sent
MAX_CUT: Final = 1024  # streams that were ended before the client had: it may still send what it began
RECEIVE_WINDOW: Final = 2**16 + 2**14  # of a stream: a tensor of 64 KiB with its names needs no further grant


class Stream:
    """One request and its response. The connection calls the `on_` methods; `data` is valid only during the call.

    While `space` is not empty, data goes there, and `on_filled` is called when it is full.
    """

    # how every stream begins; a small call changes few of these, so a class holds them for all
    space = NO_SPACE
    credit = granted = RECEIVE_WINDOW  # bytes that the client may send now, and has been allowed in all
    length = NO_LENGTH  # of the content, as the headers state it
    opened = 0.0  # when its headers came
    ended = False  # the client sends no more
    closed = False
    last = b""  # the frame that follows `unsent` and ends the stream

    def __init__(self, connection: StreamSet, id: int) -> None:
        self.connection = connection
        self.id = id
        self.window = connection.outbox.initial_window  # bytes that the client accepts
        self.unsent: list[memoryview] = []

    def on_open(self) -> None:
        """Called once the headers have arrived."""

    def on_data(self, data: memoryview, last: bool) -> int:
        """Called with data in order, in pieces of any size. Returns how much was taken; the rest comes again.

        After the `last` piece, `on_end` is next.
        """
        return len(data)

    def on_filled(self) -> None:
        """Called when `space` is full; it is empty now."""

    def on_end(self) -> None:
        """Called when the client has sent everything."""

    def on_sent(self) -> None:
        """Called when everything has been sent."""

    def on_closed(self) -> None:
        """Called when the client has reset the stream or left."""

    @property
    def received(self) -> int:
        """Received bytes of data, without padding."""
        return self.granted - self.credit

    def fill(self, data: memoryview) -> int:
        """Copies data to `space`, which is not empty. Returns how much that was."""
        size = min(len(data), len(self.space))
        self.space[:size] = data[:size]
        self.space = self.space[size:]
        if not self.space:
            self.on_filled()
        return size

    def grant(self, more: int) -> None:
        """Lets the client send more."""
        self.credit += more
        self.granted += more
        self.connection.outbox.write(window_update(self.id, more))

    def reset(self, code: int) -> None:
        """Ends the stream in both directions, without a response or before it is complete."""
        if not self.closed:
            self.connection.outbox.write(rst_stream(self.id, code))
            self.connection.forget(self)


class Outbox:
    """Sends the data of all streams as the windows of the client and the transport allow it."""

    def __init__(self, write: Callable[[Any], None], write_all: Callable[[Sequence[Any]], None]) -> None:
        self.write = write
        self.write_all = write_all
        self.window = self.initial_window = DEFAULT_WINDOW
        self.max_frame = DEFAULT_FRAME
        self.paused = False  # the transport is full
        self.sent = 0  # DATA frames since the connection's last `tick`
        self.unsent_bytes = 0
        self.waiting: dict[Stream, None] = {}  # streams with unsent data that their own windows admit

    def admits(self, stream: Stream, size: int) -> bool:
        """Whether so many bytes can be sent at once, in one frame."""
        if self.paused or stream.unsent:
            return False
        return size <= self.window and size <= stream.window and size <= self.max_frame

    def send(self, stream: Stream, parts: Sequence[bytes], last: bytes = b"") -> None:
        """Sends data, and `last` as the frame that ends the stream."""
        for part in parts:
            if part:
                stream.unsent.append(memoryview(part))
                self.unsent_bytes += len(part)
        stream.last = last
        self._flush(stream)

    def widen(self, more: int) -> None:
        """The client accepts more bytes over all streams. Raises Http2Error."""
        self.window += more
        if not more:
            raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE adds nothing")
        if self.window > MAX_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "the window of the connection is above 2^31-1")
        if self.waiting:
            self.flush()

    def configure(self, values: dict[int, int], streams: Iterable[Stream]) -> bool:
        """Applies the client's settings. Whether the windows of the open streams changed. Raises Http2Error."""
        if values.get(ENABLE_PUSH, 0) > 1:
            raise Http2Error(PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if not DEFAULT_FRAME <= (size := values.get(MAX_FRAME_SIZE, self.max_frame)) < 2**24:
            raise Http2Error(PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {size}, expected 2^14 to 2^24-1")
        initial = values.get(INITIAL_WINDOW_SIZE, self.initial_window)
        if initial > MAX_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2^31-1")
        more, self.initial_window, self.max_frame = initial - self.initial_window, initial, size
        for stream in list(streams) if more else ():
            stream.window += more
            if stream.window > MAX_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, f"the window of stream {stream.id} is above 2^31-1")
            if stream.unsent:
                self.send(stream, (), stream.last)
        return bool(more)

    def flush(self) -> None:
        """Sends what the transport or a window held back."""
        while self.waiting and self.window > 0 and not self.paused:
            self._flush(next(iter(self.waiting)))

    def _flush(self, stream: Stream) -> None:
        out: list[Any] = []
        unsent, size = stream.unsent, 0
        while unsent and not self.paused:
            part = unsent[0]
            length = min(len(part), stream.window, self.window, self.max_frame)
            if length <= 0:
                break
            out += (data_head(length, stream.id), part[:length])
            self.sent += 1
            if length == len(part):
                unsent.pop(0)
            else:
                unsent[0] = part[length:]
            stream.window -= length
            self.window -= length
            self.unsent_bytes -= length
            size += length
            if size >= WRITE_BYTES:
                self.write_all(out)
                out, size = [], 0
        if unsent and stream.window > 0:
            self.waiting[stream] = None
        else:
            self.waiting.pop(stream, None)
        if not unsent and stream.last:
            out.append(stream.last)
        if out:
            self.write_all(out)
        if not unsent:
            if stream.last:
                stream.connection.forget(stream)
            else:
                stream.on_sent()

    def drop(self, stream: Stream) -> None:
        """Forgets what a stream has not sent."""
        self.waiting.pop(stream, None)
        self.unsent_bytes -= sum(map(len, stream.unsent))
        stream.unsent.clear()


class StreamSet:
    """The streams of a connection, and the data that comes to them. `Http2Connection` adds all other frames."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.streams: dict[int, Stream] = {}
        self.last = 0  # the highest number of a stream that was opened
        self.partial_head = 0  # the stream whose block of headers has begun
        self.drained = False  # no further stream will come
        self.turn = 0  # work that is left, see TURN; a stream subtracts what it does beyond one call
        self._credit = DEFAULT_WINDOW  # bytes that the client may send over all streams
        self._target: tuple[Stream | None, int, int] = (None, 0, 0)  # of data: stream, flags, bytes to come
        self._skip = 0  # bytes to come that mean nothing: padding, or a frame of an unknown kind
        self._cut: dict[int, None] = {}  # see MAX_CUT
        self._trifles = 0  # see MAX_TRIFLES

    def direct(self) -> memoryview | None:
        """Where the next bytes belong, if these are many: received there, they need not be copied. See `filled`."""
        stream, _, left = self._target
        if left < DIRECT_BYTES or stream is None or len(stream.space) < DIRECT_BYTES:
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

    # ---- data

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

    def _padded(self, id: int, flags: int, size: int, padding: int) -> None:
        """The head of a DATA frame of `size` bytes, of which the last `padding` mean nothing."""
        if padding >= size:
            raise Http2Error(PROTOCOL_ERROR, f"found {padding} bytes of padding in a frame of {size}")
        self._data(id, flags, size - 1 - padding, size)
        self._skip = padding

    def _whole_data(self, stream: Stream, flags: int, data: memoryview) -> int:
        """Takes a DATA frame without padding that has come whole and within the windows. Returns how much was taken."""
        size = len(data)
        stream.credit -= size
        self._credit -= size
        taken = stream.fill(data) if stream.space else stream.on_data(data, bool(flags & END_STREAM))
        if taken < size:
            self._target = (stream, flags, size - taken)
        elif flags & END_STREAM and not stream.closed:
            self._end(stream)
        return taken

    def _receive_data(self, data: memoryview) -> int:
        """Takes data of the frame that has begun. Returns how much that was."""
        stream, flags, left = self._target
        size = len(data)
        if stream is None or stream.closed:
            self._target = (None, flags, left - size)
            return size
        size = stream.fill(data) if stream.space else stream.on_data(data, size == left and bool(flags & END_STREAM))
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

    # ---- what a client should not do

    def _known(self, id: int) -> Stream | None:
        """An open stream; None for a closed one, whose frames may still be under way. Raises Http2Error for others."""
        stream = self.streams.get(id)
        if stream is None and (id > self.last or not id & 1):
            raise Http2Error(PROTOCOL_ERROR, f"found a frame of stream {id}, which is not open")
        return stream

    def _breach(self, stream: Stream, code: int) -> None:
        """Ends a stream whose client broke a rule; the others go on."""
        stream.reset(code)
        stream.on_closed()
        self._trifle()

    def _refuse(self, id: int, code: int) -> None:
        """Ends a stream that was not opened, or is closed; what else comes on it is ignored."""
        self.outbox.write(rst_stream(id, code))
        self._cut_off(id)
        self._trifle()

    def _cut_off(self, id: int) -> None:
        self._cut[id] = None
        if len(self._cut) > MAX_CUT:
            del self._cut[next(iter(self._cut))]

    def _trifle(self, cost: int = 1) -> None:
        """Counts a frame that costs the server more than the client."""
        self._trifles += cost
        if self._trifles - EXPLAINED * self.outbox.sent > MAX_TRIFLES:
            raise Http2Error(ENHANCE_YOUR_CALM, "too many frames without data, or resets")
