"""What a job is asked to do, and what follows from it and from the server: pixels, sizes of chunks, threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from penstock.bulk.outputs import Wanted
from penstock.bulk.servers import ServerInfo
from penstock.bulk.types import Kernel, PixelMode, Pixels, Sampling
from penstock.errors import ConfigError

Mode = Literal["stream-prebatch", "stream-single", "single"]

MOST_DECODERS: Final = 8  # unless more are asked for: each holds some 30 MB of 1080p frames
ROUND: Final = 50  # frames of a round of mode "single", as the published client has it
MOST_ROWS: Final = 64
CHUNK_BYTES: Final = 10_000_000
LEAST_MEMORY: Final = 64 << 20  # of pixels, unless it is said how much,
MOST_MEMORY: Final = 512 << 20  # that many servers may need
PIECE_BYTES: Final = 262_144  # blocks that a single frame of its own size takes some of
JPEG_SHARE: Final = 8  # a JPEG of quality 90 has far less than an eighth of its pixels' bytes
HEADER_BYTES: Final = 65_536  # of a request, beside its pixels


class Options(Struct, frozen=True, kw_only=True):
    """One job. None means: chosen by the job."""

    inputs: tuple[str, ...]
    wanted: Wanted
    work: Path
    failures: Path
    servers: tuple[str, ...] = ()
    model: str = "captioner"
    token: str | None = None
    ca: str | None = None
    sampling: Sampling = Sampling()
    pixels: PixelMode = "server-size"
    kernel: Kernel = "fast"
    mode: Mode = "stream-prebatch"
    prebatch_size: int | None = None
    decoders: int | None = None
    memory_bytes: int | None = None
    give_up_s: float = 600.0
    wait_s: float = 60.0
    from0: bool = False
    restart: bool = False
    retry_failed: bool = False


class Plan(Struct, frozen=True):
    """How frames travel."""

    pixels: Pixels
    chunk_size: int
    frame_bytes: int  # of one frame on the wire; 0 when every video has its own
    pool_bytes: int
    block_bytes: int
    decoders: int
    threads: int  # of each decoder


def plan(options: Options, servers: list[ServerInfo], videos: int, cores: int | None = None) -> Plan:
    """What the options and the servers, which agree, come to for so many videos.

    Raises ConfigError for what cannot be.
    """
    first = servers[0]
    need = "jpeg" if options.pixels == "jpeg" else "frames"
    if need not in first.inputs:
        raise ConfigError(f"{first.url}: model '{first.model}' takes no '{need}'; choose other --pixels")
    source = options.pixels == "source"
    size = (None, None) if source else (first.height, first.width)
    pixels = Pixels(options.pixels, options.kernel, *size)
    cores = cores or usable_cores()
    # A core each while there are videos for all: threads that share one cost 1080p 14 % more, and leave cores idle.
    decoders = options.decoders or min(MOST_DECODERS, cores)
    decoders = 1 if options.mode == "single" else min(decoders, videos)
    frame_bytes = 0 if source else first.height * first.width * 3
    most_bytes = _chunk_bytes(options, servers, decoders)
    rows = _rows(options, servers, frame_bytes, most_bytes)
    chunk_bytes = rows * frame_bytes or most_bytes
    block_bytes = min(chunk_bytes, PIECE_BYTES) if source and rows == 1 else chunk_bytes
    memory_bytes = options.memory_bytes
    if memory_bytes is None:  # a chunk for each decoder, and two batches for each instance: one runs, one is on its way
        batches = sum(2 * s.instances * (s.max_batch_size or rows) for s in servers)
        needed = decoders * chunk_bytes + batches * (frame_bytes or chunk_bytes // rows)
        memory_bytes = min(max(LEAST_MEMORY, needed), MOST_MEMORY)
    pool_bytes = max(memory_bytes, chunk_bytes * (ROUND if options.mode == "single" else 2))
    return Plan(pixels, rows, frame_bytes, pool_bytes, block_bytes, decoders, max(1, cores // decoders))


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunk_bytes(options: Options, servers: list[ServerInfo], decoders: int) -> int:
    """The most bytes of a chunk, so that enough of them fit into memory to keep every instance busy."""
    memory_bytes = MOST_MEMORY if options.memory_bytes is None else options.memory_bytes
    under_way = decoders + sum(2 * s.instances + 1 for s in servers)
    limit = min((s.max_request_bytes - HEADER_BYTES for s in servers if s.max_request_bytes), default=CHUNK_BYTES)
    return max(1, min(CHUNK_BYTES, memory_bytes // under_way, limit))


def _rows(options: Options, servers: list[ServerInfo], frame_bytes: int, most_bytes: int) -> int:
    """Frames a chunk: by default those of the server's batch, in one chunk or in several that are alike.

    Those of their own size are counted in bytes only.
    """
    if options.mode != "stream-prebatch":
        return 1
    if options.prebatch_size is None:
        batch = min((s.max_batch_size for s in servers if s.max_batch_size), default=32)
        rows = min(MOST_ROWS, batch)
        fit = max(1, most_bytes // frame_bytes) if frame_bytes else rows
        return max(1, rows // -(-rows // fit))
    wire_bytes = options.prebatch_size * frame_bytes // (JPEG_SHARE if options.pixels == "jpeg" else 1)
    for server in servers:
        if server.max_request_bytes is not None and wire_bytes + HEADER_BYTES > server.max_request_bytes:
            raise ConfigError(
                f"--prebatch-size {options.prebatch_size} makes requests of {wire_bytes:,} bytes; "
                f"{server.url} takes {server.max_request_bytes:,}"
            )
    return options.prebatch_size
