"""Upkeep: notices workers that are due to be replaced, or whose memory grows without end."""

import logging
import os
import time
from collections.abc import Callable

from msgspec import Struct, field

from penstock.config.schema import ModelConfig
from penstock.core.engine.instances import Instances
from penstock.core.readings import resident_bytes

log = logging.getLogger("penstock.engine")

# choices
CHECK_S = 1.0  # between two readings of a worker's memory
RETRY_S = 60.0  # between two attempts to replace a worker
WINDOW_S = 20.0
MIN_RISES = 6  # windows with more memory than before, after which growth is reported
MIN_RISE_BYTES = 2**20  # of a window
MIN_GROWTH_BYTES = 48 * 2**20  # of all
MIN_DOUBLED_BYTES = 512 * 2**20  # of a worker whose memory has doubled: below it may be libraries and caches


class MemoryGrowth:
    """Finds steady growth in readings of memory: the lowest reading of a window rises, again and again.

    What a request allocates and frees does not change the lowest reading, and a cache that fills up rises only a few
    times. Time is an argument.
    """

    def __init__(self) -> None:
        self._ends_s = 0.0  # of the window
        self._low = 0  # lowest reading of the window
        self._base: int | None = None  # lowest reading of the first window
        self._last = 0  # of the last window that rose
        self._rises = 0

    def add(self, nbytes: int, now_s: float) -> int:
        """The growth in bytes since the first window, if it is steady; otherwise 0."""
        if now_s < self._ends_s:
            self._low = min(self._low, nbytes)
            return 0
        if self._ends_s:
            self._close_window()
        self._ends_s, self._low = now_s + WINDOW_S, nbytes
        grown = 0 if self._base is None else self._last - self._base
        return grown if self._rises >= MIN_RISES and grown >= MIN_GROWTH_BYTES else 0

    def _close_window(self) -> None:
        if self._base is None or self._low < self._last - MIN_RISE_BYTES:  # the first window, or memory was freed
            self._base, self._rises = self._low, 0
        elif self._low < self._last + MIN_RISE_BYTES:
            return
        else:
            self._rises += 1
        self._last = self._low


class _Usage(Struct):
    """The readings of one worker, and when it may be replaced."""

    pid: int
    growth: MemoryGrowth = field(default_factory=MemoryGrowth)
    check_at_s: float = 0.0
    replace_at_s: float = 0.0  # earliest time of the next attempt
    reported: bool = False  # its growth
    least_bytes: int = 0  # the lowest reading since the last report of doubled memory
    least_at_s: float = 0.0
    doubled: int = 0  # how often; a cache fills once
    hopeless: bool = False  # it needed more than `max_memory_bytes` from the beginning


class Upkeep:
    """Replaces workers of a model version after `max_requests` or above `max_memory_bytes`, and reports steadily
    growing memory. Reads the memory of each worker at most once a second."""

    def __init__(
        self,
        config: ModelConfig,
        instances: Instances,
        read: Callable[[int], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._instances, self._read, self._clock = config, instances, read, clock
        self._usages: dict[int, _Usage] = {}  # by slot

    def check(self, slot: int, requests: int) -> None:
        """Checks the slot's worker, which has answered this many requests."""
        pid = self._instances.pid(slot)
        if pid is None:  # it has ended, or is being replaced
            return
        usage = self._usages.get(slot)
        if usage is None or usage.pid != pid:
            usage = self._usages[slot] = _Usage(pid)
        limit = self._config.max_requests
        now_s = self._clock()
        if limit is not None and requests >= limit:
            self._replace(slot, usage, f"requests={requests} max_requests={limit}", now_s)
        if now_s >= usage.check_at_s and pid not in (0, os.getpid()):
            first, usage.check_at_s = not usage.check_at_s, now_s + CHECK_S
            if nbytes := self._read(pid):  # 0: the worker has just died
                self._check_memory(slot, usage, nbytes, now_s, first)

    def _replace(self, slot: int, usage: _Usage, why: str, now_s: float) -> None:
        if now_s >= usage.replace_at_s:
            usage.replace_at_s = now_s + RETRY_S
            self._instances.replace(slot, why)

    def _check_memory(self, slot: int, usage: _Usage, nbytes: int, now_s: float, first: bool) -> None:
        model, limit = self._instances.label, self._config.max_memory_bytes
        over = limit is not None and nbytes > limit
        if over and first:
            usage.hopeless = True
            log.warning(
                "memory_above_limit %s slot=%d resident_bytes=%d max_memory_bytes=%d: its worker is above the limit"
                " after the first batch, so that a new one would be too; raise max_memory_bytes",
                *(model, slot, nbytes, limit),
            )
        if over and not usage.hopeless:
            self._replace(slot, usage, f"resident_bytes={nbytes} max_memory_bytes={limit}", now_s)
        if not usage.least_bytes or nbytes < usage.least_bytes:
            usage.least_bytes, usage.least_at_s = nbytes, now_s
        elif nbytes >= max(2 * usage.least_bytes, MIN_DOUBLED_BYTES):
            log.warning(
                "event=memory_doubled %s slot=%d pid=%d resident_bytes=%d before_bytes=%d seconds=%.0f: if it is no"
                " cache that fills once, the model leaks; max_memory_bytes in its section replaces the worker in time",
                *(model, slot, usage.pid, nbytes, usage.least_bytes, now_s - usage.least_at_s),
            )
            usage.least_bytes, usage.least_at_s, usage.doubled = nbytes, now_s, usage.doubled + 1
            if usage.doubled > 1 and not usage.reported:
                usage.reported = True
                self._instances.note(slot, "leaking")
        grown = usage.growth.add(nbytes, now_s)
        if grown and not usage.reported:
            usage.reported = True
            self._instances.note(slot, "leaking")
            log.warning(
                "memory_grows %s slot=%d pid=%d resident_bytes=%d growth_bytes=%d: the model probably leaks; until it"
                " is mended, max_requests or max_memory_bytes in its section replaces the worker in time",
                *(model, slot, usage.pid, nbytes, grown),
            )
