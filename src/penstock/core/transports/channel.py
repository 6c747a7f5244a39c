"""The parent's end of a worker's socket: frames in and out on the event loop, no task and no copy of what is sent."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from penstock.core.wire.messages import Buffer, Frame, FrameDecoder

RECEIVE_BYTES = 256 * 2**10
MAX_PIECES = 64  # of one system call, far below IOV_MAX


class Channel:
    """Sends at once, and what the socket does not take when it is writable again. `on_end` is called once, at EOF."""

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
        self._blocked = False  # the socket took not all: `_writable` is called when it takes more
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, pieces: list[Buffer], more: bool = False) -> None:
        """Sends one frame; with `more` not before the next one, or `flush`.

        After the end of the stream it does nothing: the death of the worker is on its way.
        """
        if not self._open:
            return
        self._unsent.extend(map(memoryview, pieces))
        if not more:
            self.flush()

    def flush(self) -> None:
        """Sends what waits for more."""
        if not self._blocked:
            self._flush()
            if self._unsent:
                self._blocked = True
                self._loop.add_writer(self._sock.fileno(), self._writable)

    def drain(self) -> None:
        """Reads all that has arrived: the answers that a worker gave before it died."""
        while self._open and self._receive():
            pass

    def close(self) -> None:
        """Leaves the loop; the socket itself is its owner's."""
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
        """Handles what one call gives; False when there is nothing."""
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
