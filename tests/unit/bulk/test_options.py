from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bulk.options import CHUNK_BYTES, HEADER_BYTES, JobPlan, make_plan
from penstock.bulk.types import Pixels
from penstock.errors import ConfigError
from support.bulk import job_options, server_info


def planned(
    servers: int = 1, cores: int = 4, videos: int = 1000, flags: dict[str, Any] | None = None, **server: Any
) -> JobPlan:
    options = job_options(Path("x"), "a", **{"decoders": None, "memory_bytes": 64 << 20, **(flags or {})})
    return make_plan(options, [server_info(**{"height": 224, "width": 224, **server})] * servers, videos, cores)


def test_a_chunk_is_a_server_batch_if_enough_chunks_fit_into_memory() -> None:
    small = planned(height=64, width=64, max_batch_size=64)
    assert (small.chunk_size, small.frame_bytes, small.block_bytes) == (64, 64 * 64 * 3, 64 * 64 * 64 * 3)
    assert planned(max_batch_size=16).chunk_size == 16
    assert planned(max_batch_size=512, cores=2).chunk_size == 64
    assert planned(max_batch_size=512, cores=8).chunk_size == 32, "two make a batch; 40 would fit"
    assert planned(max_batch_size=None).chunk_size == 32
    many = planned(servers=2, max_batch_size=64, instances=4)
    under_way = many.pool_bytes // many.block_bytes
    assert under_way >= 2 * (2 * 4 + 1) + many.decoders
    assert planned(height=1080, width=1920, max_batch_size=64).block_bytes <= CHUNK_BYTES


def test_a_chunk_fits_into_a_request_of_every_server() -> None:
    limit = 10 * 224 * 224 * 3 + HEADER_BYTES + 5
    assert planned(max_batch_size=64, max_request_bytes=limit).chunk_size == 9, "seven make a batch"
    assert planned(max_batch_size=30, max_request_bytes=limit).chunk_size == 10
    assert planned(flags={"prebatch_size": 10}, max_request_bytes=limit).chunk_size == 10
    with pytest.raises(ConfigError, match="--prebatch-size 11"):
        planned(flags={"prebatch_size": 11}, max_request_bytes=limit)
    assert planned(flags={"prebatch_size": 60, "pixels": "jpeg"}, max_request_bytes=limit).chunk_size == 60


def test_pixels_follow_the_server() -> None:
    assert planned().pixels == Pixels("server-size", "fast", 224, 224)
    source = planned(flags={"pixels": "source"})
    assert source.pixels == Pixels("source", "fast", None, None)
    assert source.frame_bytes == 0
    assert source.block_bytes <= CHUNK_BYTES
    with pytest.raises(ConfigError, match="takes no 'jpeg'"):
        planned(flags={"pixels": "jpeg"}, inputs=frozenset({"frames"}))


def test_the_other_modes_send_single_frames() -> None:
    assert planned(flags={"mode": "stream-single"}).chunk_size == 1
    own = planned(flags={"mode": "stream-single", "pixels": "source"})
    assert own.block_bytes < 480 * 270 * 3  # small unscaled frames take no more memory than they need
    single = planned(flags={"mode": "single", "decoders": 4}, height=1080, width=1920)
    assert (single.chunk_size, single.decoders) == (1, 1)
    assert single.pool_bytes >= 50 * single.block_bytes  # a round is decoded before it is sent


@pytest.mark.parametrize(("cores", "decoders", "threads"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (16, 8, 2), (64, 8, 8)])
def test_decoders_share_the_cores(cores: int, decoders: int, threads: int) -> None:
    found = planned(cores=cores)
    assert (found.decoders, found.threads) == (decoders, threads)
    assert planned(cores=cores, flags={"decoders": 7}).decoders == 7
    one = planned(cores=cores, videos=1)
    assert (one.decoders, one.threads) == (1, cores)


def test_memory_grows_with_the_capacity_of_the_servers() -> None:
    unsaid = {"memory_bytes": None}
    assert planned(flags=unsaid, cores=2, max_batch_size=64, instances=2).pool_bytes == 64 << 20
    frame = 224 * 224 * 3
    gpus = planned(flags=unsaid, cores=8, servers=2, max_batch_size=256, instances=2)
    assert gpus.chunk_size == 64
    assert gpus.pool_bytes >= 8 * gpus.block_bytes + 2 * 2 * 2 * 256 * frame
    assert planned(flags=unsaid, servers=9, max_batch_size=1024, instances=8).pool_bytes == 512 << 20
    assert planned(flags={"pixels": "source", **unsaid}).pool_bytes >= 64 << 20


def test_too_little_memory_still_makes_progress() -> None:
    tiny = planned(flags={"memory_bytes": 1})
    assert tiny.chunk_size == 1
    assert tiny.pool_bytes >= 2 * tiny.block_bytes
