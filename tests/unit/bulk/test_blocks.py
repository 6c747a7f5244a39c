"""The pool of blocks: bounded, shared without overlap, and nobody waits for ever."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from penstock.bulk.blocks import BlockPool, PoolBlock
from penstock.bulk.types import Stopped


def started(job: threading.Thread, pool: BlockPool, waiting: int = 1) -> None:
    """Starts a thread; returns when so many wait in the pool."""
    job.start()
    while len(pool._waiting) < waiting:
        time.sleep(0.001)


def test_blocks_are_apart_and_no_more_than_the_pool_has() -> None:
    pool = BlockPool(1000, 300)
    assert (pool.blocks, pool.total_bytes, pool.free_blocks) == (3, 900, 3)
    held = [pool.take() for _ in range(3)]
    for number, block in enumerate(held):
        assert block.memory.shape == (300,)
        block.memory[:] = number
    assert [int(block.memory[0]) for block in held] == [0, 1, 2]
    assert pool.free_blocks == 0


def test_one_who_finds_none_waits_until_one_is_given_back() -> None:
    pool = BlockPool(100, 100)
    first = pool.take()
    got: list[PoolBlock] = []
    job = threading.Thread(target=lambda: got.append(pool.take()))
    started(job, pool)
    assert not got
    first.release()
    job.join(10)
    assert len(got) == 1


def test_a_large_one_gets_adjacent_blocks_and_later_small_ones_do_not_overtake_it() -> None:
    pool = BlockPool(400, 100)
    held = [pool.take() for _ in range(4)]
    order: list[str] = []

    def take(name: str, size: int) -> None:
        block = pool.take(size)
        order.append(f"{name} {len(block.memory)}")
        block.release()

    large = threading.Thread(target=take, args=("large", 250))
    small = threading.Thread(target=take, args=("small", 1))
    started(large, pool)
    started(small, pool, waiting=2)
    for place in (0, 3, 1):  # three free ones, but only two of them side by side
        held[place].release()
    large.join(0.05)
    assert order == []
    held[2].release()
    large.join(10)
    small.join(10)
    assert order == ["large 300", "small 100"]


def test_stop_wakes_who_waits_and_refuses_who_comes_later() -> None:
    pool = BlockPool(100, 100)
    block = pool.take()
    met: list[type] = []

    def wait() -> None:
        try:
            pool.take()
        except Stopped:
            met.append(Stopped)

    job = threading.Thread(target=wait)
    started(job, pool)
    pool.stop()
    job.join(10)
    assert met == [Stopped]
    block.release()
    with pytest.raises(Stopped):
        pool.take()


def test_a_block_that_is_given_back_twice_is_not_lent_to_two() -> None:
    pool = BlockPool(200, 100)
    first, second = pool.take(), pool.take()
    first.release()
    third = pool.take()
    first.release()
    assert pool.free_blocks == 0
    assert not np.shares_memory(second.memory, third.memory)


def test_more_than_the_whole_pool_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="301 bytes were asked for; the pool has 300"):
        BlockPool(300, 100).take(301)
    with pytest.raises(ValueError, match="block_bytes is 0"):
        BlockPool(300, 0)
