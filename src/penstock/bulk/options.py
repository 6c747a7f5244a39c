"""The options of a job, and the plan that follows from them and the servers: pixels, chunk size, memory, threads."""

from pathlib import Path
from typing import Final

from msgspec import Struct

from penstock.bulk.endpoints import MAX_CONCURRENT
from penstock.bulk.outputs import OutputPaths
from penstock.bulk.pixels import JPEG_SHARE
from penstock.bulk.servers import PENSTOCK, Backend, ServerInfo
from penstock.bulk.shards import Shard
from penstock.bulk.types import Decoder, Kernel, OnDamage, PixelMode, Pixels, ReadPlan, Sampling, SendMode
from penstock.core.os_threads import usable_cores
from penstock.errors import ConfigError

MAX_DECODERS: Final = 8  # unless more are requested: each holds some 30 MB of 1080p frames
ROUND: Final = 50  # frames in a round of mode "single", as in the published client
MAX_ROWS: Final = 64
CHUNK_BYTES: Final = 10_000_000
MIN_MEMORY: Final = 64 << 20  # of pixels, unless the user sets it
MAX_MEMORY: Final = 512 << 20  # the default for many servers
PIECE_BYTES: Final = 262_144  # size of a block when a single frame of its own size takes several
HEADER_BYTES: Final = 65_536  # of a request, in addition to its pixels


class JobOptions(Struct, frozen=True, kw_only=True):
    """The options of the command, one field each. None leaves the choice to the job."""

    inputs: tuple[str, ...]
    outputs: OutputPaths
    work: Path
    failures: Path
    servers: tuple[str, ...] = ()
    model: str = "captioner"
    token: str | None = None
    ca: str | None = None
    sampling: Sampling = Sampling()
    backend: Backend = PENSTOCK
    pixels: PixelMode = "server-size"
    kernel: Kernel = "fast"
    tone_map: bool = False
    deinterlace: bool = False
    decoder: Decoder = "pyav"
    on_damage: OnDamage = "skip"
    mode: SendMode = "stream-prebatch"
    prebatch_size: int | None = None
    decoders: int | None = None
    memory_bytes: int | None = None
    give_up_s: float = 600.0
    request_timeout_s: float = 300.0
    wait_s: float = 60.0
    rpm: float | None = None
    tpm: float | None = None
    engine: str | None = None  # the command of a server that the job runs
    from0: bool = False
    extensions: frozenset[str] = frozenset()
    allowed_urls: tuple[str, ...] = ()
    shard: Shard | None = None
    ray: str | None = None  # the address of a cluster, or "auto"
    restart: bool = False
    retry_failed: bool = False
    price: tuple[float, float] | None = None


class JobPlan(ReadPlan, frozen=True, kw_only=True):
    """How frames are read and sent. In `rounds`, a decoder waits for one round's captions before the next round."""

    frame_bytes: int  # of a raw frame on the wire; 0 if every video has its own size
    pool_bytes: int
    block_bytes: int
    decoders: int
    rounds: bool = False


def make_plan(options: JobOptions, servers: list[ServerInfo], videos: int, cores: int | None = None) -> JobPlan:
    """The plan for so many videos. Raises ConfigError for options that the servers do not support."""
    first = servers[0]
    needed = options.pixels if options.pixels in ("jpeg", "file") else "frames"
    if needed not in first.inputs:
        raise ConfigError(f"{first.url}: model '{first.model}' takes no '{needed}'; choose other --pixels")
    source, rounds = options.pixels == "source", options.mode == "single"
    cores = cores or usable_cores()
    # One core each while there are enough videos: threads that share one cost 1080p 14 % more, and leave cores idle.
    decoders = options.decoders or min(MAX_DECODERS, cores)
    decoders = 1 if rounds else min(decoders, videos)
    frame_bytes = 0 if source else first.height * first.width * 3
    limit_bytes = _chunk_limit(options, servers, decoders)
    if first.max_pixels is None:
        rows = _chunk_rows(options, servers, frame_bytes, limit_bytes)
        chunk_bytes = rows * frame_bytes or limit_bytes
    else:  # a request is about one frame or one clip, as JPEG
        rows = options.sampling.clip_frames or 1
        chunk_bytes = rows * max(1, first.max_pixels * 3 // JPEG_SHARE)
    block_bytes = min(chunk_bytes, PIECE_BYTES) if source and rows == 1 else chunk_bytes
    memory_bytes = options.memory_bytes
    if memory_bytes is None:  # a chunk for each decoder, and two batches for each instance: one runs, one is on its way
        batches = sum(MAX_CONCURRENT if s.concurrent else 2 * s.instances * (s.max_batch_size or rows) for s in servers)
        needed_bytes = decoders * chunk_bytes + batches * (frame_bytes or chunk_bytes // rows)
        memory_bytes = min(max(MIN_MEMORY, needed_bytes), MAX_MEMORY)
    height, width = (first.height, first.width) if frame_bytes else (None, None)
    return JobPlan(
        sampling=options.sampling,
        pixels=Pixels(
            options.pixels,
            options.kernel,
            height,
            width,
            options.tone_map,
            options.deinterlace,
            first.max_pixels,
            options.backend.base64,
            options.decoder,
        ),
        chunk_size=rows,
        by_clip=options.sampling.clip_frames is not None and first.max_pixels is not None,
        frame_bytes=frame_bytes,
        pool_bytes=max(memory_bytes, chunk_bytes * (ROUND if rounds else 2)),
        block_bytes=block_bytes,
        decoders=decoders,
        threads=max(1, cores // decoders),
        on_damage=options.on_damage,
        rounds=rounds,
    )


def _chunk_limit(options: JobOptions, servers: list[ServerInfo], decoders: int) -> int:
    """The largest chunk in bytes that still lets enough chunks fit into memory to keep every instance busy."""
    memory_bytes = MAX_MEMORY if options.memory_bytes is None else options.memory_bytes
    chunks = decoders + sum(2 * s.instances + 1 for s in servers)
    limit = min((s.max_request_bytes - HEADER_BYTES for s in servers if s.max_request_bytes), default=CHUNK_BYTES)
    return max(1, min(CHUNK_BYTES, memory_bytes // chunks, limit))


def _chunk_rows(options: JobOptions, servers: list[ServerInfo], frame_bytes: int, limit_bytes: int) -> int:
    """Frames in a chunk: by default one server batch, or equal parts of it. Frames of their own size have no limit."""
    if options.mode != "stream-prebatch":
        return 1
    if options.prebatch_size is None:
        batch = min((s.max_batch_size for s in servers if s.max_batch_size), default=32)
        rows = min(MAX_ROWS, batch)
        fit = max(1, limit_bytes // frame_bytes) if frame_bytes else rows
        return max(1, rows // -(-rows // fit))
    wire_bytes = options.prebatch_size * frame_bytes // (JPEG_SHARE if options.pixels == "jpeg" else 1)
    for server in servers:
        if server.max_request_bytes is not None and wire_bytes + HEADER_BYTES > server.max_request_bytes:
            raise ConfigError(
                f"--prebatch-size {options.prebatch_size} makes requests of {wire_bytes:,} bytes; "
                f"{server.url} takes {server.max_request_bytes:,}"
            )
    return options.prebatch_size
