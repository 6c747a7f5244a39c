"""The values that the parts of a bulk job pass to each other: videos -> chunks of frames -> captions -> rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from penstock.errors import PenstockError

if TYPE_CHECKING:
    import numpy as np

PixelMode = Literal["server-size", "source", "jpeg", "file"]
Kernel = Literal["fast", "exact"]
OnDamage = Literal["skip", "stop"]
Decoder = Literal["pyav", "torchcodec"]
SendMode = Literal["stream-prebatch", "stream-single", "single"]


class Sampling(Struct, frozen=True):
    """Which frames of a video are captioned. Times count from the first frame.

    `every`, `fps`, `keyframes` and `scene` exclude each other; `scene` is the threshold of PySceneDetect's content
    detector, and selects the first frame of each scene. `clip_frames` of the frames that `fps` selects are a clip.
    `stream` is the index of the stream in its file; None leaves the choice to FFmpeg. Of the selected frames, `dedupe`
    drops those whose difference hash is within so many bits of the last caption's frame; with `carry`, they get its
    caption.
    """

    every: int = 1
    fps: float | None = None
    start_s: float = 0.0
    end_s: float | None = None
    max_frames: int | None = None
    stream: int | None = None
    keyframes: bool = False
    scene: float | None = None
    clip_frames: int | None = None
    dedupe: int | None = None
    carry: bool = False


class Pixels(Struct, frozen=True):
    """How frames travel: `height` x `width` RGB as the server asks, or at their own size if both are None.

    "server-size" sends raw pixels at that size, "jpeg" compresses them, "source" sends raw pixels unscaled, "file"
    sends the address of an image on a disk that the server reads. Kernel "fast" is swscale's area average directly
    from YUV; "exact" is antialiased bicubic on RGB and matches the Hugging Face processor within one level.
    `tone_map` converts HDR to the colours of ordinary video; `deinterlace` keeps one field of interlaced frames.
    `max_pixels` scales frames of their own size down to that many pixels, in their own proportions. `base64`: JPEG
    files travel as base64, the form of data URLs. `decoder` decodes where both give the same frames and times.
    """

    mode: PixelMode = "server-size"
    kernel: Kernel = "fast"
    height: int | None = None
    width: int | None = None
    tone_map: bool = False
    deinterlace: bool = False
    max_pixels: int | None = None
    base64: bool = False
    decoder: Decoder = "pyav"


class Again(Struct, frozen=True):
    """What another attempt at a video captions: `frames`, whose rows have an error, and all after `known_to`.

    With None, the video was read to its end before.
    """

    frames: frozenset[int]
    known_to: int | None

    def asks(self, frame: int) -> bool:
        """Whether a frame is among them."""
        return frame in self.frames or (self.known_to is not None and frame > self.known_to)

    def ends_before(self, frame: int) -> bool:
        """Whether none of them is at a frame or after it."""
        return self.known_to is None and frame > max(self.frames, default=-1)

    def without(self, done: Sequence[Sample]) -> Again:
        """What is left after some of them, in order."""
        last = None if self.known_to is None else max(self.known_to, done[-1].frame)
        return Again(self.frames - {sample.frame for sample in done}, last)


class ReadPlan(Struct, frozen=True, kw_only=True):
    """How a video is read: which frames, as which pixels, how many in a chunk, by how many threads.

    With `by_clip`, a chunk has the frames of one clip, at most `chunk_size`, and gets one caption. `again` leaves out
    what an earlier attempt captioned.
    """

    sampling: Sampling = Sampling()
    pixels: Pixels
    chunk_size: int
    threads: int = 1
    on_damage: OnDamage = "skip"
    by_clip: bool = False
    again: Again | None = None


class Video(Struct, frozen=True):
    """An input file. `name`, its path as valid text, is the key of its rows; size and time reveal changes."""

    path: str
    name: str
    bytes: int
    mtime_ns: int


class Position(Struct, frozen=True):
    """The last captioned frame: its number in the video, its pts if it has one, and how many frames were captioned.

    Its caption was carried to the near-duplicates up to frame `carried_to`.
    """

    frame: int
    pts: int | None
    taken: int
    carried_to: int = -1


class Sample(NamedTuple):
    """A frame by its number, the time from the video's first frame, and its pts in units of the stream, if any."""

    frame: int
    time_s: float
    pts: int | None


class Gap(Struct, frozen=True, omit_defaults=True):
    """`frames` frames of a video without a caption, from number `frame` on, because they are damaged.

    Frames after them may show traces of the damage up to frame `clean`, which depends on no earlier one; None: up to
    the end.
    """

    frame: int
    frames: int
    error: str
    clean: int | None = None

    def covers(self, other: Gap) -> bool:
        """Whether the other gap begins in it; then they are the same."""
        return self.frame <= other.frame < self.frame + max(1, self.frames)


class CaptionRow(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One caption, or the `error` in its place. `time_s` counts from the video's first frame; `pts` is in units of its
    stream; `tokens` counts the prompt's and the completion's tokens, if the server does.

    Rows are numbered from 0. `gaps` became known since the row before, and so many `similar` frames were dropped; a
    `carried` row is of such a frame, with the caption of the row before.
    """

    frame: int
    time_s: float = msgspec.field(name="time")
    pts: int | None
    caption: str
    error: str = ""
    tokens: tuple[int, int] | None = None
    row: int = 0
    gaps: list[Gap] = []
    similar: int = 0
    carried: bool = False


class Answer(Struct, frozen=True):
    """What a model answered for one row: its caption, or the `error` that no further attempt would change."""

    caption: str = ""
    error: str = ""
    tokens: tuple[int, int] | None = None


class Block(Protocol):
    """Memory from the pool that one chunk uses."""

    def release(self) -> None:
        """Returns it to the pool. Called once, by any thread."""


class Chunk(Struct, eq=False):
    """Consecutive samples of one video, the unit of sending.

    `pixels` is `[n, height, width, 3]` uint8 inside the block, or n JPEG files, perhaps as base64; `frames`, `times_s`
    and `pts` have n entries. `number` counts the chunks of one video in one run from 0, all of them. `gaps` are those
    that became complete since the last chunk. `similar` are the near-duplicates dropped between the last chunk and its
    last frame. `clip` is the start and end of the clip that gets one caption for all its frames.
    """

    video: Video
    number: int
    pixels: np.ndarray[Any, Any] | list[bytes]
    frames: list[int]
    times_s: list[float]
    pts: list[int | None]
    block: Block
    gaps: list[Gap] = []
    similar: list[Sample] = []
    clip: tuple[float, float] | None = None

    @property
    def captioned(self) -> list[Sample]:
        """The frames that get a caption: each, or the first of a clip."""
        samples = list(map(Sample, self.frames, self.times_s, self.pts))
        return samples if self.clip is None else samples[:1]


class ReadResult(Struct, frozen=True):
    """How reading a video ended: after `chunks` chunks and `seen` frames, at its end or with `error`.

    `gaps` are those that became complete since the last chunk, and `similar` the near-duplicates dropped after it.
    """

    chunks: int
    seen: int
    error: PenstockError | None = None
    gaps: list[Gap] = []
    similar: list[Sample] = []


Answers = Sequence[str | Answer]
"""One for each of a chunk's `captioned` frames; a text is a caption about which nothing else is known."""

ChunkResult = Answers | PenstockError
"""The answers of a chunk, or the error that remained after every retry."""

OnResult = Callable[[Chunk, ChunkResult], None]
"""Receives the result of a chunk, once, in the sender's thread. The receiver releases the chunk's block."""


class SendOptions(Struct, frozen=True, kw_only=True):
    """`rows` is the size of a full chunk, if known; `attempts` limits the failed attempts of one chunk.

    `rpm` and `tpm` are the most requests and tokens a minute, at all servers together.
    """

    mode: SendMode = "stream-prebatch"
    fingerprint: str = ""
    rows: int | None = None
    attempts: int = 8
    give_up_s: float = 600.0
    request_timeout_s: float = 300.0
    connect_timeout_s: float = 10.0
    max_response_bytes: int = 4 * 2**20  # 8 KiB for each of 512 captions
    backoff_s: float = 0.5
    longest_backoff_s: float = 30.0
    rpm: float | None = None
    tpm: float | None = None


class EndpointStats(Struct, frozen=True):
    """One server as the sender sees it. `state` is "up", "rests" or "away"; `answered` counts chunks."""

    url: str
    state: str
    in_flight: int
    window: int
    answered: int


class SendStats(Struct, frozen=True):
    """`answered` and `retries` of chunks and `sent_bytes` of bodies count from the start; the rest is current."""

    in_flight: int
    window: int
    waiting: int
    answered: int
    retries: int
    sent_bytes: int
    servers: tuple[EndpointStats, ...]


class Stopped(Exception):
    """The job is ending: raised in a decoder that waits for memory."""
