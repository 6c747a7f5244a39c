"""The memory of a job's pixels: one buffer of a fixed size, lent in pieces; who finds none left waits."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from penstock.bulk.types import Stopped


class PoolBlock:
    """Some bytes of the pool, one chunk's. `memory` is `[n]` uint8, n at least what was asked for."""

    def __init__(self, pool: BlockPool, start: int, count: int) -> None:
        self._pool = pool
        self._start = start
        self._count = count
        size = pool.block_bytes
        self.memory: np.ndarray[Any, np.dtype[np.uint8]] = pool.buffer[start * size : (start + count) * size]

    def release(self) -> None:
        """Gives it back; a second call does nothing. From any thread."""
        count, self._count = self._count, 0
        if count:
            self._pool.give(self._start, count)


class BlockPool:
    """`total_bytes` in blocks of `block_bytes`, at least one. Pages are touched only when pixels are written to them.

    Waiters are served in the order of their coming, so that one that needs several adjacent blocks gets them.
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
        """The most that one block may hold."""
        return self.blocks * self.block_bytes

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds at this moment."""
        return sum(self._free)

    def take(self, size_bytes: int = 1) -> PoolBlock:
        """A block of at least `size_bytes`. Blocks until there is one; raises Stopped after `stop()`."""
        count = -(-size_bytes // self.block_bytes)
        if count > self.blocks:
            raise ValueError(f"{size_bytes} bytes were asked for; the pool has {self.total_bytes}")
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                start: int | None = None
                while not self._stopped:
                    if self._waiting[0] is ticket and (start := self._adjacent(count)) is not None:
                        break
                    self._changed.wait()
                if start is None:
                    raise Stopped
                self._free[start : start + count] = [False] * count
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return PoolBlock(self, start, count)

    def give(self, start: int, count: int) -> None:
        """Takes blocks back."""
        with self._changed:
            self._free[start : start + count] = [True] * count
            self._changed.notify_all()

    def stop(self) -> None:
        """From now on nobody is given a block; who waits for one meets Stopped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _adjacent(self, count: int) -> int | None:
        run = 0
        for place, free in enumerate(self._free):
            run = run + 1 if free else 0
            if run == count:
                return place - count + 1
        return None
