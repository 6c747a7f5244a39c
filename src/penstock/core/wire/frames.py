"""Pure framing: messages of a head and raw buffers to bytes and back. No I/O, no copies of what is large when sending.

A frame is `u32 head length | u32 number of buffers | u64 length of each buffer | head | buffers`, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec import Struct

Buffer = bytes | bytearray | memoryview

MAX_BUFFERS = 65536
_PREFIX = struct.Struct("<II")


class FrameError(Exception):
    """The peer sent what is no frame: the connection is of no more use."""


class Frame(Struct):
    """One received message. The buffers are the receiver's own, and writable."""

    head: bytes
    buffers: list[bytearray]


def encode(head: bytes, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """The pieces of one frame, in order; large buffers are not copied. Buffers must be one-dimensional bytes."""
    if not buffers:
        return [_PREFIX.pack(len(head), 0) + head]
    lengths = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return [b"".join((_PREFIX.pack(len(head), len(buffers)), lengths, head)), *buffers]


class Decoder:
    """Gives back the frames in a stream of bytes, cut anywhere. Raises FrameError; then it must not be fed again.

    `max_bytes` bounds one frame, so that a broken peer cannot make this side reserve memory.
    """

    def __init__(self, max_bytes: int = 2**32) -> None:
        self._max_bytes = max_bytes
        self._reset()

    def _reset(self) -> None:
        self._sizes: list[int] = []  # of the parts that follow the present one
        self._done: list[bytearray] = []  # parts that are complete: head, then buffers
        self._part = bytearray(_PREFIX.size)
        self._filled = 0
        self._stage = 0  # 0 prefix, 1 table of lengths, 2 head and buffers

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes, oldest first. `data` may be reused afterwards."""
        frames: list[Frame] = []
        view = memoryview(data)
        at = 0
        while at < len(view):
            if self._stage == 0 and self._filled == 0:
                at = self._whole(view, at, frames)
                if at >= len(view):
                    break
            take = min(len(self._part) - self._filled, len(view) - at)
            self._part[self._filled : self._filled + take] = view[at : at + take]
            self._filled += take
            at += take
            while self._filled == len(self._part):
                frame = self._next_part()
                if frame is not None:
                    frames.append(frame)
                    break
        return frames

    def _whole(self, view: memoryview, at: int, frames: list[Frame]) -> int:
        """Takes the complete frames without buffers that start at `at`: the common case, without the state machine."""
        end = len(view)
        while end - at >= _PREFIX.size:
            head_bytes, count = _PREFIX.unpack_from(view, at)
            start = at + _PREFIX.size
            if count or end - start < head_bytes:
                break
            self._check(head_bytes)
            frames.append(Frame(bytes(view[start : start + head_bytes]), []))
            at = start + head_bytes
        return at

    def _next_part(self) -> Frame | None:
        """Called with a full part: prepares the next one, or gives back the frame that it completes."""
        if self._stage == 0:
            head_bytes, count = _PREFIX.unpack(self._part)
            if count > MAX_BUFFERS:
                raise FrameError(f"frame announces {count} buffers, expected at most {MAX_BUFFERS}")
            self._check(head_bytes)
            self._sizes = [head_bytes]
            self._stage, self._part, self._filled = 1, bytearray(8 * count), 0
            return None
        if self._stage == 1:
            self._sizes += struct.unpack(f"<{len(self._part) // 8}Q", self._part)
            self._check(sum(self._sizes))
            self._stage = 2
        else:
            self._done.append(self._part)
        if self._sizes:
            self._part, self._filled = bytearray(self._sizes.pop(0)), 0
            return None
        frame = Frame(bytes(self._done[0]), self._done[1:])
        self._reset()
        return frame

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise FrameError(f"frame announces {size} bytes, expected at most {self._max_bytes}")
