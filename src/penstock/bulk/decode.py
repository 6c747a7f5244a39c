"""A video as chunks of sampled frames in blocks of the pool, until its end or its damage."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

import numpy as np

from penstock.bulk.blocks import BlockPool, PoolBlock
from penstock.bulk.frames import Reading, Seen
from penstock.bulk.pixels import Array, Painter, jpeg_encoder
from penstock.bulk.sampling import Sampler
from penstock.bulk.types import Chunk, Ended, Pixels, Position, Sampling, Video
from penstock.bulk.video import VideoError


def read_chunks(
    video: Video,
    sampling: Sampling,
    pixels: Pixels,
    chunk_size: int,
    pool: BlockPool,
    resume: Position | None = None,
    threads: int = 1,
) -> Generator[Chunk, None, Ended]:
    """Yields the sampled frames of a video, at most `chunk_size` a chunk; returns how it ended, whatever the file.

    After `resume` the same frames follow as in an undisturbed run. A chunk's block is its taker's; the one that is
    being filled goes back to the pool when the generator is closed, or meets Stopped while it waits for memory.
    """
    filler = _Filler(video, pixels, chunk_size, pool)
    reading = Reading(video.path, threads, resume)
    error: VideoError | None = None
    count = 0
    try:
        with closing(reading.frames()) as frames:
            try:
                for seen, wanted in _judged(reading, frames, sampling, resume):
                    count = seen.number + 1
                    if not wanted:
                        continue
                    if filler.differs(seen):
                        yield filler.chunk()
                    filler.add(seen)
                    if filler.full:
                        yield filler.chunk()
                if count == 0:
                    raise VideoError("holds no frames", frame=0, detail=video.path)
            except VideoError as damage:
                error = damage
        if filler.begun:
            yield filler.chunk()
        return Ended(filler.chunks, count, error)
    finally:
        filler.drop()


def _judged(
    reading: Reading, frames: Iterable[Seen], sampling: Sampling, resume: Position | None
) -> Iterator[tuple[Seen, bool]]:
    """Each frame with whether it is a sample, up to the last one that may be."""
    sampler: Sampler | None = None
    for seen in frames:
        if sampler is None:
            sampler = Sampler(sampling, reading.tick_s)
            if resume is not None:  # its own frame comes first: it tells where sampling stood
                sampler.resume(seen.time_s, resume.taken)
                yield seen, False
                if sampler.full:
                    return
                continue
        verdict = sampler.tell(seen.number, seen.time_s)
        yield seen, verdict == "take"
        if verdict == "over" or sampler.full:
            return


class _Filler:
    """The chunk that is being filled."""

    def __init__(self, video: Video, pixels: Pixels, chunk_size: int, pool: BlockPool) -> None:
        self._video = video
        self._size = chunk_size
        self._pool = pool
        self._painter = Painter(pixels)
        self._encode = jpeg_encoder() if pixels.mode == "jpeg" else None
        self._block: PoolBlock | None = None
        self._rows: Array = np.empty((0, 0, 0, 3), np.uint8)
        self._files: list[bytes] = []
        self._seen: list[tuple[int, float, int | None]] = []
        self.chunks = 0

    @property
    def begun(self) -> bool:
        return bool(self._seen)

    @property
    def full(self) -> bool:
        return len(self._seen) == len(self._rows)

    def differs(self, seen: Seen) -> bool:
        """Whether a frame is of another size than those that are in it."""
        return self.begun and self._painter.size(seen.picture) != self._rows.shape[1:3]

    def add(self, seen: Seen) -> None:
        """Paints a frame. Waits for memory if it is a chunk's first; raises VideoError, Stopped."""
        if not self.begun:
            self._begin(*self._painter.size(seen.picture), seen.number)
        row = self._rows[0 if self._encode is not None else len(self._seen)]
        try:
            self._painter.paint(seen.picture, row)
        except VideoError as error:
            error.frame = seen.number
            raise
        if self._encode is not None:
            self._files.append(self._encode(row))
        self._seen.append((seen.number, seen.time_s, seen.pts))

    def _begin(self, height: int, width: int, number: int) -> None:
        self.drop()
        frame_bytes = height * width * 3
        if frame_bytes > self._pool.total_bytes:
            raise VideoError(
                f"a frame of {width}x{height} takes {frame_bytes} bytes; all frames together may take "
                f"{self._pool.total_bytes}: give more memory, or send another size",
                frame=number,
            )
        rows = max(1, min(self._size, self._pool.block_bytes // frame_bytes))
        self._block = self._pool.take(rows * frame_bytes)
        self._rows = self._block.memory[: rows * frame_bytes].reshape(rows, height, width, 3)

    def chunk(self) -> Chunk:
        """What was filled; the next frame begins another."""
        assert self._block is not None
        frames, times_s, pts = (list(column) for column in zip(*self._seen, strict=True))
        pixels = self._files if self._encode is not None else self._rows[: len(frames)]
        chunk = Chunk(self._video, self.chunks, pixels, frames, times_s, pts, self._block)
        self.chunks += 1
        self._block, self._files, self._seen = None, [], []
        return chunk

    def drop(self) -> None:
        """Gives back the block of a chunk that nobody took."""
        if self._block is not None:
            self._block.release()
            self._block = None
