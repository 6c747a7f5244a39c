"""The values that the parts of a bulk job hand to each other: videos -> chunks of frames -> captions -> rows.

A chunk's pixels lie in a block of a bounded pool from the moment they are decoded until their captions are known; rows
are kept in a spool, a video each, in frame order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct

from penstock.errors import PenstockError

if TYPE_CHECKING:
    import numpy as np

PixelMode = Literal["server-size", "source", "jpeg"]
Kernel = Literal["fast", "exact"]


class Sampling(Struct, frozen=True):
    """Which frames of a video are captioned. `every` and `fps` exclude each other; times are from its first frame."""

    every: int = 1
    fps: float | None = None
    start_s: float = 0.0
    end_s: float | None = None
    max_frames: int | None = None


class Pixels(Struct, frozen=True):
    """How frames travel: `height` x `width` RGB as the server asks for, or their own size (both are None).

    "server-size": raw at that size; "jpeg": compressed at that size; "source": raw, unscaled. Kernel "fast" is
    swscale's area average straight from YUV, "exact" antialiased bicubic on RGB, equal to the Hugging Face processor's
    within one level.
    """

    mode: PixelMode = "server-size"
    kernel: Kernel = "fast"
    height: int | None = None
    width: int | None = None


class Video(Struct, frozen=True):
    """A file of the job. `name` is its path as valid text, the key of its rows; size and time tell if it changed."""

    path: str
    name: str
    bytes: int
    mtime_ns: int


class Position(Struct, frozen=True):
    """The last frame that was sampled: its number in the video, its pts (None: it has none), and how many were."""

    frame: int
    pts: int | None
    taken: int


class Row(Struct, frozen=True):
    """One caption. `time_s` is from the video's first frame; `pts` in the units of its stream."""

    frame: int
    time_s: float
    pts: int | None
    caption: str


class Block(Protocol):
    """Memory of the pool, in use by one chunk."""

    def release(self) -> None:
        """Gives it back. Called once, by any thread."""
        ...


class Chunk(Struct, eq=False):
    """Neighbouring samples of one video, the unit of sending.

    `pixels` is `[n, height, width, 3]` uint8 inside the block, or n JPEG files; `frames`, `times_s` and `pts` are n
    long. `number` counts the chunks of one video in one run from 0, without a gap.
    """

    video: Video
    number: int
    pixels: np.ndarray[Any, Any] | list[bytes]
    frames: list[int]
    times_s: list[float]
    pts: list[int | None]
    block: Block


class Ended(Struct, frozen=True):
    """A video was read to its end, or to its damage: `error` is what stopped it, after `chunks` chunks."""

    chunks: int
    seen: int
    error: PenstockError | None = None


Answered = Callable[[Chunk, "list[str] | PenstockError"], None]
"""Takes the captions of a chunk, one for each frame, or why there are none after every retry. Called in the sender's
thread, once a chunk; the pixels are not needed any more, the taker releases the block."""


class Sending(Protocol):
    """What the decoders hand chunks to."""

    def send(self, chunk: Chunk) -> None:
        """Takes a chunk; does not block (the pool of blocks is the bound). Called from any thread."""
        ...


class Stopped(Exception):
    """The job is ending: raised in a decoder that waits for memory."""


Stop = threading.Event
