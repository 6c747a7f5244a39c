"""A video as chunks of sampled frames in memory from a bounded pool."""

from __future__ import annotations

import binascii
import logging
import math
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.bulk.frames import DecodedFrame, FrameReader, GapList
from penstock.bulk.pixels import JPEG_SHARE, Array, DifferenceHash, FrameConverter, SceneStarts, jpeg_encoder, within
from penstock.bulk.types import Chunk, Pixels, Position, ReadPlan, ReadResult, Sample, Sampling, Stopped, Video
from penstock.bulk.video import VideoError, VideoProbe, av_library, is_image, reason, require_regular_file
from penstock.errors import DecodeError
from penstock.images import JPEG, decode_image, jpeg_header

_logger = logging.getLogger("penstock.bulk")

Decision = Literal["take", "similar", "skip", "end"]

_said: set[str] = set()  # warnings: a disk may hold thousands of such videos
MAX_SIMILAR = 500  # near-duplicates in a row: bounds what waits for the next caption, and its age
SCENE_S = 5.0  # a usual length of scenes, for estimates
ROUNDING_S = 1e-6  # times are floats of exact fractions: far above their error, far below the duration of any frame


def read_chunks(
    video: Video, plan: ReadPlan, pool: BlockPool, resume: Position | None = None
) -> Generator[Chunk, None, ReadResult]:
    """Yields the sampled frames of a video, at most `plan.chunk_size` in a chunk; returns how it ended.

    After `resume` the same frames follow as in an uninterrupted run. The receiver owns a chunk's block. The block
    being filled returns to the pool when the generator is closed, or when Stopped interrupts its wait for memory.
    """
    sampling = plan.sampling
    if plan.pixels.mode == "file":
        return (yield from _address(video, pool, resume))
    reader: FrameReader | ImageReader
    if is_image(video.path):
        reader = ImageReader(video.path, plan.pixels)
    else:
        how = sampling.stream, sampling.keyframes, plan.pixels.decoder
        reader = FrameReader(video.path, plan.threads, resume, plan.on_damage, *how)
    builder = _ChunkBuilder(video, plan, pool, reader.gaps)
    error: VideoError | None = None
    again, last_clip, asked = plan.again, None, True
    try:
        with closing(reader.frames()) as frames:
            try:
                for frame, decision, clip in _chosen(reader, frames, plan, resume):
                    if again is not None and decision in ("take", "similar") and not (clip and clip == last_clip):
                        last_clip, asked = clip, again.asks(frame.number)
                    if not asked and again is not None and again.ends_before(frame.number):
                        break
                    if decision == "similar" and asked:
                        builder.similar.append(Sample(frame.number, frame.time_s, frame.pts))
                    if decision != "take" or not asked:
                        continue
                    if builder.differs(frame, clip):
                        yield builder.chunk()
                    builder.add(frame, clip)
                    if builder.full:
                        yield builder.chunk()
                if reader.seen == 0:
                    raise VideoError("contains no frames", frame=0, detail=video.path)
            except VideoError as damage:
                error = damage
        if builder.started:
            yield builder.chunk()
        reader.gaps.end()
        return ReadResult(builder.chunks, reader.seen, error, reader.gaps.take(), builder.similar)
    finally:
        builder.drop()


Clip = tuple[float, float] | None


def _address(video: Video, pool: BlockPool, resume: Position | None) -> Generator[Chunk, None, ReadResult]:
    """An image by its address, for a server that reads the same disk."""
    if not is_image(video.path):
        return ReadResult(0, 0, VideoError("is not an image; choose other --pixels", stage="open", detail=video.path))
    if resume is None:
        address = Path(video.path).absolute().as_uri().encode()
        yield Chunk(video, 0, [address], [0], [0.0], [None], pool.take())
    return ReadResult(int(resume is None), 1)


class ImageReader:
    """An image file as a video of one frame. A JPEG is decoded at a part of its size if `pixels` are fewer."""

    tick_s = 0.0
    seen = 1

    def __init__(self, path: str, pixels: Pixels) -> None:
        self._path, self._pixels = path, pixels
        self.gaps = GapList()

    def frames(self) -> Generator[DecodedFrame, None, None]:
        """Raises VideoError."""
        require_regular_file(self._path)
        try:
            data = Path(self._path).read_bytes()
            rgb = decode_image(data, at_least=self._needed(data))
        except (OSError, DecodeError, ValueError) as error:
            why = error.message if isinstance(error, DecodeError) else reason(error)
            raise VideoError(f"cannot be opened as an image: {why}", stage="open", detail=self._path) from error
        yield DecodedFrame(0, 0.0, None, av_library().VideoFrame.from_ndarray(rgb, format="rgb24"))

    def _needed(self, data: bytes) -> tuple[int, int] | None:
        """The height and width that suffice, if fewer can be decoded. Raises ValueError for a broken header."""
        pixels = self._pixels
        if pixels.height is not None and pixels.width is not None:
            return pixels.height, pixels.width
        if pixels.max_pixels is None or not data.startswith(JPEG):
            return None
        header = jpeg_header(data)
        turned = header.orientation > 4
        sides = (header.width, header.height) if turned else (header.height, header.width)
        return within(pixels.max_pixels, *sides)


def _chosen(
    reader: FrameReader | ImageReader, frames: Iterable[DecodedFrame], plan: ReadPlan, resume: Position | None
) -> Iterator[tuple[DecodedFrame, Decision, Clip]]:
    """Each frame with the decision about it, and the clip that it is sent with, up to the last possible sample."""
    sampling = plan.sampling
    sampler: FrameSampler | None = None
    last = None if sampling.dedupe is None else LastHash(sampling.dedupe)
    scenes = None if sampling.scene is None else SceneStarts(sampling.scene)
    for frame in frames:
        if sampler is None:
            sampler = FrameSampler(sampling, reader.tick_s, by_clip=plan.by_clip)
            if resume is not None:  # the position's own frame comes first and restores the state of sampling
                sampler.resume(frame.time_s, resume.taken)
                if scenes is not None:
                    scenes.begins(frame.picture, frame.time_s)
                if last is not None:
                    last.resembles(frame.picture)
                yield frame, "skip", None
                if sampler.full:
                    return
                continue
        decision = sampler.decide(frame.number, frame.time_s)
        if decision == "take" and scenes is not None and not scenes.begins(frame.picture, frame.time_s):
            sampler.taken -= 1
            decision = "skip"
        if decision == "take" and last is not None and last.resembles(frame.picture):
            sampler.taken -= 1
            decision = "skip" if resume is not None and frame.number <= resume.carried_to else "similar"
        yield frame, decision, sampler.clip(frame.time_s) if plan.by_clip else None
        if decision == "end" or sampler.full:
            return


class LastHash:
    """The difference hash of the last frame that resembled none before it within `tolerance` bits."""

    def __init__(self, tolerance: int) -> None:
        self._tolerance, self._hash_of = tolerance, DifferenceHash()
        self._hash: int | None = None
        self._similar = MAX_SIMILAR

    def resembles(self, picture: Any) -> bool:
        """Whether a frame does. Otherwise, and after `MAX_SIMILAR` frames that do, it becomes the last."""
        found = self._hash_of(picture)
        if self._hash is not None and self._similar < MAX_SIMILAR:
            self._similar += 1
            if (self._hash ^ found).bit_count() <= self._tolerance:
                return True
        self._hash, self._similar = found, 0
        return False


class _ChunkBuilder:
    """The chunk that is being filled."""

    def __init__(self, video: Video, plan: ReadPlan, pool: BlockPool, gaps: GapList) -> None:
        self._video = video
        self._size, self._by_clip = plan.chunk_size, plan.by_clip
        self._pool = pool
        self._gaps = gaps
        self._converter = FrameConverter(plan.pixels)
        self._encode = jpeg_encoder() if plan.pixels.mode == "jpeg" else None
        self._block: PoolBlock | None = None
        self._base64 = plan.pixels.base64
        self._rows: Array = np.empty((0, 0, 0, 3), np.uint8)  # of JPEG files, one whose pixels are being compressed
        self._room = 0
        self._files: list[bytes] = []
        self._samples: list[Sample] = []
        self._clip: Clip = None
        self.similar: list[Sample] = []  # since the last chunk
        self.chunks = 0

    @property
    def started(self) -> bool:
        return bool(self._samples)

    @property
    def full(self) -> bool:
        return len(self._samples) == self._room

    def differs(self, frame: DecodedFrame, clip: Clip) -> bool:
        """Whether a frame has another size than those in the chunk, or belongs to another clip."""
        other = self._clip != clip or self._converter.size(frame.picture) != self._rows.shape[1:3]
        return self.started and other

    def add(self, frame: DecodedFrame, clip: Clip) -> None:
        """Converts a frame. The first one of a chunk waits for memory. Raises VideoError, Stopped."""
        if not self.started:
            self._clip = clip
            self._start(*self._converter.size(frame.picture), frame.number)
            if (ignored := self._converter.ignores(frame.picture)) and ignored not in _said:
                _said.add(ignored)
                _logger.warning("%s is %s; further such videos are not named", self._video.name, ignored)
        row = self._rows[0 if self._encode is not None else len(self._samples)]
        try:
            self._converter.convert(frame.picture, row)
        except VideoError as error:
            error.frame = frame.number
            raise
        if self._encode is not None:
            file = self._encode(row)
            self._files.append(binascii.b2a_base64(file, newline=False) if self._base64 else file)
        self._samples.append(Sample(frame.number, frame.time_s, frame.pts))

    def _start(self, height: int, width: int, number: int) -> None:
        self.drop()
        frame_bytes = height * width * 3
        if self._encode is not None:
            frame_bytes = max(1, frame_bytes // JPEG_SHARE)
        whole_bytes = frame_bytes * (self._size if self._by_clip else 1)
        if whole_bytes > self._pool.total_bytes:
            frames = f"a clip of {self._size} frames" if self._by_clip else "a frame"
            raise VideoError(
                f"{frames} of {width}x{height} takes {whole_bytes} bytes, more than the {self._pool.total_bytes} "
                f"of all frames together: allow more memory, or send another size",
                frame=number,
            )
        rows = self._size if self._by_clip else max(1, min(self._size, self._pool.block_bytes // frame_bytes))
        self._room = rows
        self._block = self._pool.take(rows * frame_bytes)
        if self._encode is None:
            self._rows = self._block.memory[: rows * frame_bytes].reshape(rows, height, width, 3)
        elif self._rows.shape[1:3] != (height, width):
            self._rows = np.empty((1, height, width, 3), np.uint8)

    def chunk(self) -> Chunk:
        """The filled chunk; the next frame starts another."""
        assert self._block is not None
        frames, times_s, pts = (list(column) for column in zip(*self._samples, strict=True))
        pixels = self._files if self._encode is not None else self._rows[: len(frames)]
        similar = [sample for sample in self.similar if sample.frame < frames[-1]]
        block, gaps = self._block, self._gaps.take()
        chunk = Chunk(self._video, self.chunks, pixels, frames, times_s, pts, block, gaps, similar, self._clip)
        self.chunks += 1
        self._block, self._files, self._samples, self.similar = None, [], [], self.similar[len(similar) :]
        return chunk

    def drop(self) -> None:
        """Releases the block of an unfinished chunk."""
        if self._block is not None:
            self._block.release()
            self._block = None


# ---- sampling


class FrameSampler:
    """Takes the frames from `start_s` to before `end_s` that `every` or `fps` select, up to `max_frames`.

    `every` counts from the video's first frame, so a sample's number is a multiple of it. `fps` takes the first frame
    at or after each multiple of 1/fps of a second, and no frame twice. `tick_s` is the unit of the container's times,
    which may be rounded by half of it.
    """

    def __init__(self, sampling: Sampling, tick_s: float = 0.0, *, by_clip: bool = False) -> None:
        """`by_clip` resumes after the whole clip of the last sample."""
        self.sampling, self._by_clip = sampling, by_clip
        self.taken = 0
        self._slack_s = max(ROUNDING_S, tick_s / 2 * 1.01)
        self._next = 0  # the first multiple of 1/fps without a sample

    @property
    def full(self) -> bool:
        return self.sampling.max_frames is not None and self.taken >= self.sampling.max_frames

    def decide(self, frame: int, time_s: float) -> Decision:
        """For the next frame, by its number from 0 and its time from the first frame. "end" covers all later ones."""
        s = self.sampling
        if self.full or (s.end_s is not None and time_s >= s.end_s - ROUNDING_S):
            return "end"
        if time_s < s.start_s - ROUNDING_S:
            return "skip"
        if frame % s.every if s.fps is None else self._point(time_s) < self._next:
            return "skip"
        self._took(time_s, self.taken + 1)
        return "take"

    def resume(self, time_s: float, taken: int) -> None:
        """Restores the state after the `taken`-th caption, of the frame at `time_s` or of the clip that it begins."""
        self._took(time_s, taken)
        if self._by_clip and self.sampling.clip_frames is not None:
            self._next += -self._next % self.sampling.clip_frames

    def _took(self, time_s: float, taken: int) -> None:
        self.taken = taken
        if self.sampling.fps is not None:
            self._next = self._point(time_s) + 1

    def clip(self, time_s: float) -> tuple[float, float]:
        """The start and end of the clip with the frame at this time."""
        frames, fps = self.sampling.clip_frames, self.sampling.fps
        assert frames is not None
        assert fps is not None
        number = self._point(time_s) // frames
        return number * frames / fps, (number + 1) * frames / fps

    def _point(self, time_s: float) -> int:
        """The last multiple of 1/fps at or before this time."""
        assert self.sampling.fps is not None
        return math.floor((time_s + self._slack_s) * self.sampling.fps)


def estimate(sampling: Sampling, found: VideoProbe, *, by_clip: bool = False) -> int:
    """About how many frames of a video are captioned, from its header; `by_clip`, how many clips."""
    if sampling.max_frames == 0:
        return 0
    duration_s, frames = found.duration_s, found.keyframes if sampling.keyframes else found.frames
    share = 1.0
    if duration_s:
        end_s = duration_s if sampling.end_s is None else min(duration_s, sampling.end_s)
        share = max(0.0, end_s - sampling.start_s) / duration_s
    count = math.ceil(frames * share - ROUNDING_S)
    if sampling.scene is not None and duration_s:
        count = min(count, math.ceil(duration_s * share / SCENE_S))
    elif sampling.fps is not None and duration_s:
        count = min(count, math.ceil(duration_s * share * sampling.fps - ROUNDING_S))
    else:
        count = -(-count // sampling.every)
    if by_clip and sampling.clip_frames is not None:
        count = -(-count // sampling.clip_frames)
    return count if sampling.max_frames is None else min(count, sampling.max_frames)


# ---- memory


class PoolBlock:
    """Adjacent blocks of the pool for one chunk. `memory` is `[n]` uint8, n at least the requested size."""

    def __init__(self, pool: BlockPool, start: int, count: int) -> None:
        self._pool = pool
        self._start = start
        self._count = count
        size = pool.block_bytes
        self.memory: Array = pool.buffer[start * size : (start + count) * size]

    def release(self) -> None:
        """Returns the blocks; a second call does nothing. Called from any thread."""
        count, self._count = self._count, 0
        if count:
            self._pool.give_back(self._start, count)


class BlockPool:
    """`total_bytes` in at least one block of `block_bytes`. The system maps a page when pixels are written to it.

    Requests are served in the order of arrival, so that one that needs several adjacent blocks gets them.
    """

    def __init__(self, total_bytes: int, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}; a block holds at least one byte")
        self.block_bytes = block_bytes
        self.blocks = max(1, total_bytes // block_bytes)
        self.buffer = np.empty(self.blocks * block_bytes, np.uint8)
        self._free = [True] * self.blocks
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._stopped = False

    @property
    def total_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def free_blocks(self) -> int:
        return sum(self._free)

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return len(self._waiting)

    def take(self, size_bytes: int = 1) -> PoolBlock:
        """At least `size_bytes`. Waits until they are free; raises Stopped after `stop()`."""
        count = -(-size_bytes // self.block_bytes)
        if count > self.blocks:
            raise ValueError(f"{size_bytes} bytes were requested; the pool has {self.total_bytes}")
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                start: int | None = None
                while not self._stopped:
                    if self._waiting[0] is ticket and (start := self._find(count)) is not None:
                        break
                    self._changed.wait()
                if start is None:
                    raise Stopped
                self._free[start : start + count] = [False] * count
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return PoolBlock(self, start, count)

    def give_back(self, start: int, count: int) -> None:
        with self._changed:
            self._free[start : start + count] = [True] * count
            self._changed.notify_all()

    def stop(self) -> None:
        """Every current and later wait for memory raises Stopped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _find(self, count: int) -> int | None:
        """The first of `count` adjacent free blocks."""
        run = 0
        for place, free in enumerate(self._free):
            run = run + 1 if free else 0
            if run == count:
                return place - count + 1
        return None
