"""A chunk on its way: the request that it becomes, made once for all its tries."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from penstock.bulk.types import Chunk, Video
from penstock.serving.protocols.oip import HEADER_LENGTH
from penstock.serving.protocols.oip_binary import Buffer, encode_request

if TYPE_CHECKING:
    from penstock.bulk.lane import Lane

OUTPUTS = ("caption", "frame_index")


class Parcel:
    """`order` is that of coming: the oldest is sent first. `attempts` counts those that failed on the way."""

    __slots__ = ("attempts", "body", "body_bytes", "chunk", "headers", "last", "order")

    def __init__(self, chunk: Chunk, order: int, job: str) -> None:
        self.chunk = chunk
        self.order = order
        self.attempts = 0
        self.last: Lane | None = None  # the server of the last try
        head, buffers = encode_request(_inputs(chunk), outputs=OUTPUTS)
        if isinstance(chunk.pixels, list):  # many small files: one write costs less than the copy saves
            buffers = [b"".join(buffers)]
        self.body: Sequence[Buffer] = (head, *buffers)
        self.body_bytes = sum([len(part) for part in self.body])
        self.headers = [
            ("Content-Type", "application/octet-stream"),
            (HEADER_LENGTH, str(len(head))),
            ("Idempotency-Key", key_of(chunk, job)),
        ]

    def __lt__(self, other: Parcel) -> bool:
        return self.order < other.order


def key_of(chunk: Chunk, job: str) -> str:
    """Of all tries of this chunk, and of no other: job, video, first frame and number of frames."""
    return f"{job}-{_hash(chunk.video)}-{chunk.frames[0]}-{len(chunk.frames)}"


def _hash(video: Video) -> str:
    text = f"{video.name}\0{video.bytes}\0{video.mtime_ns}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _inputs(chunk: Chunk) -> list[tuple[str, str, tuple[int, ...], Buffer | Sequence[bytes]]]:
    count = len(chunk.frames)
    index = struct.pack(f"<{count}q", *chunk.frames)
    pixels = chunk.pixels
    if isinstance(pixels, list):
        return [("jpeg", "BYTES", (len(pixels),), pixels), ("frame_index", "INT64", (count,), index)]
    return [("frames", "UINT8", pixels.shape, pixels.data.cast("B")), ("frame_index", "INT64", (count,), index)]
