"""The warm-up: runs of growing size before the first request, the first samples of the cost model."""

import time
from typing import Any

from penstock.config.schema import BatchingConfig
from penstock.core.worker.loop import BatchRunner
from penstock.errors import LoadFailed, OutOfMemory, PenstockError
from penstock.types import BatchPart, Item

RUNS = 3
COLD_RUNS = 2  # the first ones pay for caches, allocators and lazy imports
MAX_AUTO = 1024
MIN_GAIN = 1.02
POOR_SIZES = 2  # consecutive sizes without gain end it; a single one may be noise from other processes
# Longest batch if the size is chosen here without an SLO: this many seconds, or the time of this many single rows.
# Batches pay off most where one row takes long, as in text generation.
MAX_RUN_S = 0.1
MAX_RUN_ROWS = 4
# Limit of the whole warm-up: seconds, or this many runs of one row.
BUDGET_S = 5.0
BUDGET_RUNS = 50


def warm_up(runner: BatchRunner, batching: BatchingConfig) -> tuple[list[tuple[int, float]], int | None]:
    """((rows, seconds) of the runs, the best batch size or None). No samples without sample items.

    Sizes double up to `max_batch_size`. With "auto" they stop when throughput gains less than 2 % twice, memory runs
    out, or a batch takes longer than half the SLO. Raises LoadFailed when the model fails on its own samples.
    """
    hook = runner.model.warmup
    found = hook() if hook is not None else None
    samples = [] if found is None else list(found)
    if not samples:
        return [], None
    auto = batching.max_batch_size == "auto"
    largest = MAX_AUTO if batching.max_batch_size == "auto" else batching.max_batch_size
    limit_s = batching.slo_s / 2 if batching.slo_s else 0.0
    profile: list[tuple[int, float]] = []
    best, best_rate, without_gain = None, 0.0, 0
    size, started, budget_s = 1, time.monotonic(), 0.0
    while True:
        items = [samples[i % len(samples)] for i in range(size)]
        runs = [_seconds(runner, items) for _ in range(RUNS)]
        fits = [s for s in runs if s is not None]
        if len(fits) < RUNS:
            return profile[COLD_RUNS:], best  # out of memory: the previous size was the best
        profile += [(size, s) for s in fits]
        seconds = min(fits)
        limit_s = limit_s or max(MAX_RUN_S, MAX_RUN_ROWS * seconds)
        budget_s = budget_s or max(BUDGET_S, BUDGET_RUNS * seconds)
        rate = size / seconds if seconds > 0 else float("inf")
        if auto and best is not None and seconds > limit_s:
            break
        if not auto or rate >= MIN_GAIN ** (1 + without_gain) * best_rate:
            best, best_rate, without_gain = size, rate, 0
        else:
            without_gain += 1
            if without_gain == POOR_SIZES:
                break
        if size >= largest or time.monotonic() > started + budget_s:
            break
        size = min(2 * size, largest)
    return profile[COLD_RUNS:], best if auto else None


def _seconds(runner: BatchRunner, values: list[Any]) -> float | None:
    """The time of one run, or None if it ran out of memory. Raises LoadFailed."""
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([Item(value) for value in values]), parts.append)
    final = parts[-1]
    error: PenstockError | None = next((r.error for r in final.results if r is not None and r.error), None)
    if final.oom is not None or isinstance(error, OutOfMemory):
        return None
    if error is not None:
        raise LoadFailed(f"the model fails on its own warm-up items: {error.message}", detail=error.detail)
    return final.run_s
