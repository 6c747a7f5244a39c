"""Streams of an HTTP/2 connection, and what sends their data within the windows of the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from penstock.serving.http2.frames import (
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    FLOW_CONTROL_ERROR,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    NO_LENGTH,
    PROTOCOL_ERROR,
    Http2Error,
    data_head,
    rst_stream,
    window_update,
)

WRITE_BYTES: Final = 2**18  # passed on at once, before the transport can say that it is full
NO_SPACE: Final = memoryview(b"")
RECEIVE_WINDOW: Final = 2**16 + 2**14  # of a stream: a tensor of 64 KiB with its names needs no further grant


class StreamOwner(Protocol):
    """A connection, as its streams see it."""

    outbox: Outbox
    turn: int  # work that is left in this turn of the event loop; a stream subtracts what it does beyond one call

    def forget(self, stream: Stream) -> None:
        """Closes a stream without telling the client."""


class Stream:
    """One request and its response. The connection calls the `on_` methods; `data` is valid only during the call.

    While `space` is not empty, data goes there, and `on_filled` is called when it is full.
    """

    def __init__(self, connection: StreamOwner, id: int) -> None:
        self.connection = connection
        self.id = id
        self.space = NO_SPACE
        self.credit = self.granted = RECEIVE_WINDOW  # bytes that the client may send now, and has been allowed in all
        self.length = NO_LENGTH  # of the content, as the headers state it
        self.opened = 0.0  # when its headers came
        self.window = connection.outbox.initial_window  # bytes that the client accepts
        self.ended = False  # the client sends no more
        self.closed = False
        self.unsent: deque[memoryview] = deque()
        self.last = b""  # the frame that follows `unsent` and ends the stream

    def on_open(self) -> None:
        """The headers are here."""

    def on_data(self, data: memoryview, last: bool) -> int:
        """Data in the order of the stream, in pieces of any size. Returns how much was taken; the rest comes again.

        After the `last` piece, `on_end` is next.
        """
        return len(data)

    def on_filled(self) -> None:
        """`space` is full; it is empty now."""

    def on_end(self) -> None:
        """The client has sent everything."""

    def on_sent(self) -> None:
        """Nothing is unsent any more."""

    def on_closed(self) -> None:
        """The client has reset the stream, or left."""

    @property
    def received(self) -> int:
        """Bytes of data that have come, without padding."""
        return self.granted - self.credit

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

    def room(self, stream: Stream) -> int:
        """Bytes that can be sent at once, in one frame."""
        if self.paused or stream.unsent:
            return -1
        return min(self.window, stream.window, self.max_frame)

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
                unsent.popleft()
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
