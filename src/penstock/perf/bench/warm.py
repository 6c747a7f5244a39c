"""Warming up before what counts: caches, compilers, the server's own estimates; and what changes in a run that counts.

A run says something only if its end is like its beginning. So the load is sent uncounted until it gets no faster, and
a counted run that gets slower, or whose server takes more and more memory, is told apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

SLICE_S: Final = 0.5
LONGEST_S: Final = 10.0
STILL: Final = 1.05  # faster by more than this: not warm yet

TREND_S: Final = 5.0  # a shorter run tells nothing of time
WINDOWS: Final = 9  # a run is looked at in so many, one after the other
FEW: Final = 10 * WINDOWS  # samples of fewer answers tell nothing
SLOWER: Final = 1.25
GROWN: Final = 0.05  # of the memory at the beginning
GROWN_BYTES: Final = 16 * 2**20  # less is how any allocator breathes


async def warm_up(
    run: Callable[[float], Awaitable[float]],
    seconds: float | None = None,
    *,
    slice_s: float = SLICE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Has the load `run` for so many seconds; None: by slices until it is settled, at most ten seconds.

    `run(seconds)` gives the speed that it saw: more is faster.
    """
    if seconds is not None:
        if seconds > 0:
            await run(seconds)
        return
    start = clock()
    speeds: list[float] = []
    while not settled(speeds) and clock() - start < LONGEST_S:
        speeds.append(await run(slice_s))


def settled(speeds: Sequence[float]) -> bool:
    """Whether the last is hardly faster than the two before it."""
    return len(speeds) >= 3 and speeds[-1] <= max(speeds[-3:-1]) * STILL


def slower(latencies_s: Sequence[float]) -> str:
    """What to tell of good answers, in the order of their sending, that took ever longer; "" when they did not.

    All windows of the last third must be slower than all of the first: one stall, wherever it is, is no trend.
    """
    if len(latencies_s) < FEW:
        return ""
    medians = [float(np.median(window)) for window in np.array_split(np.asarray(latencies_s), WINDOWS)]
    third = WINDOWS // 3
    first, last = statistics.median(medians[:third]), statistics.median(medians[-third:])
    if last < first * SLOWER or min(medians[-third:]) <= max(medians[:third]):
        return ""
    return (
        f"it got slower: the median latency was {first * 1e3:.4g} ms in the first third of the run and "
        f"{last * 1e3:.4g} ms in the last; either the server falls behind under this load, or the model slows down "
        "with time: run longer with less load to tell them apart"
    )


def leaking(memory: Sequence[tuple[float, int]]) -> str:
    """What to tell of a server whose memory, as (seconds, bytes), grows steadily; "" when it does not.

    It must grow in the second half of the run by at least half of what it did in the first: a cache fills, a leak
    goes on.
    """
    if len(memory) < WINDOWS:
        return ""
    third = len(memory) // 3
    parts = [memory[:third], memory[third:-third], memory[-third:]]
    first, middle, last = (statistics.median(b for _, b in part) for part in parts)
    grown = last - first
    if grown < max(GROWN_BYTES, first * GROWN) or last - middle < (middle - first) / 2 or middle <= first:
        return ""
    between_s = statistics.median(t for t, _ in parts[2]) - statistics.median(t for t, _ in parts[0])
    return (
        f"its memory grows steadily: by {grown / 2**20:,.0f} MiB in {between_s:.3g} s "
        f"({grown / between_s * 3600 / 2**30:.3g} GiB an hour), to {last / 2**20:,.0f} MiB"
    )
