"""The parent's end of a worker's socket: frames in and out on the event loop, without a task or a copy."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from penstock.core.wire.messages import Buffer, Frame, FrameDecoder

RECEIVE_BYTES = 256 * 2**10
MAX_PIECES = 64  # per system call, far below IOV_MAX


class Channel:
    """Sends at once, and the rest when the socket is writable again. Calls `on_end` once, at EOF."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent: deque[memoryview] = deque()
        self._open = True
        self._blocked = False  # the socket is full: `_writable` is called when it takes more
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, pieces: list[Buffer], more: bool = False) -> None:
        """Sends one frame; with `more`, waits for the next one or `flush`. Does nothing after the end of the stream."""
        if not self._open:
            return
        self._unsent.extend(map(memoryview, pieces))
        if not more:
            self.flush()

    def flush(self) -> None:
        if not self._blocked:
            self._flush()
            if self._unsent:
                self._blocked = True
                self._loop.add_writer(self._sock.fileno(), self._writable)

    def drain(self) -> None:
        """Reads everything that has arrived: the answers of a worker before its death."""
        while self._open and self._receive():
            pass

    def close(self) -> None:
        """Leaves the loop; the owner closes the socket."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._unsent.clear()

    def _writable(self) -> None:
        self._flush()
        if not self._unsent and self._open:
            self._blocked = False
            self._loop.remove_writer(self._sock.fileno())

    def _flush(self) -> None:
        unsent = self._unsent
        while unsent:
            try:
                count = self._sock.sendmsg([unsent[i] for i in range(min(len(unsent), MAX_PIECES))])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                unsent.clear()  # broken pipe: the reader sees the end
                return
            while unsent and count >= len(unsent[0]):
                count -= len(unsent.popleft())
            if count:
                unsent[0] = unsent[0][count:]

    def _readable(self) -> None:
        self._receive()

    def _receive(self) -> bool:
        """Handles the data of one read; False if there is none."""
        try:
            count = self._sock.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            count = 0
        if count == 0:
            self.close()
            self._on_end()
            return False
        for frame in self._decoder.feed(self._buffer[:count]):
            self._on_frame(frame)
        return True
