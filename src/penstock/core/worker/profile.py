"""The warm-up: runs of growing size before the first request, the first samples of the cost model.

The runs of one and of two rows also show whether a row's result depends on the other rows; they cost nothing more.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from penstock.config.schema import BatchingConfig
from penstock.core.batching.ladder import Ladder
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.predict import copied
from penstock.errors import LoadFailed, OutOfMemory, PenstockError, WrongRowCount
from penstock.types import BatchPart, Item

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("penstock.worker")

# ---- whether rows depend on each other
#
# In a softmax over axis 0, for instance, a row depends on the other rows of its batch. Such rows must not share a
# batch: a caller would get values of other callers. To find out, the same row runs alone and with others. Results that
# already differ between equal runs are random (dropout, a sampler), which proves nothing. Only floats are compared: the
# last bit of a float may turn a whole number or a text into another one. The order of sums in a batched matrix product,
# TF32 and quantization by the range of a batch change floats a little, which the tolerance allows; a coupling changes
# them by about their own size.

TOLERANCE: Final = 0.1
"""Share of the largest value by which results may differ. Dynamic int8 quantization, whose steps follow the range of a
batch, changed the results of 24 layers by 6 %. BF16 and TF32 change them less, the order of sums in FP32 far less."""
STEADY: Final = TOLERANCE / 10  # the same between equal runs: what drifts from run to run stays within it in all runs
NEGLIGIBLE: Final = 1e-6  # zero, for sums that cancel out


def coupled(alone: Sequence[Any], together: Sequence[Any]) -> bool:
    """Whether the results of one row differ between its runs alone and its runs in batches.

    The first and last of `together` are runs of equal batches.
    """
    runs = [*pairwise(alone), (together[0], together[-1])]
    return all(_agree(*run, STEADY) for run in runs) and not all(_agree(alone[0], t, TOLERANCE) for t in together)


def _agree(a: Any, b: Any, share: float) -> bool:
    """Whether all floats in two results are about equal; results that cannot be compared are."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_agree(a[name], b[name], share) for name in a.keys() & b.keys())
    try:
        x, y = _floats(a), _floats(b)
    except Exception:  # ragged lists, objects of the user
        x = y = None
    if x is None or y is None:
        lists = isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b)
        return not lists or all(_agree(m, n, share) for m, n in zip(a, b, strict=True))
    if x.shape != y.shape:
        return True
    import numpy as np

    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    limit = NEGLIGIBLE + share * max(float(np.abs(v).max(initial=0)) for v in (x, y))
    # equal values in another order are ties that were broken otherwise, as in a list of the best boxes
    return any(float(np.abs(m - n).max(initial=0)) <= limit for m, n in ((x, y), (np.sort(x), np.sort(y))))


def _floats(value: Any) -> np.ndarray[Any, Any] | None:
    """The floats of an array, a PyTorch tensor or nested lists, flat; None for anything else."""
    import numpy as np

    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    array = np.asarray(value)
    return array.ravel().astype(np.float64) if array.dtype.kind == "f" else None


STEPS = (1, -1, 1)  # order of the samples in the runs of a size
COMPARED = 2  # largest batch in which rows are compared with rows alone
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


class RowsCoupled(Exception):
    """A row's result depends on the other rows; the text says how."""


def warm_up(runner: BatchRunner, batching: BatchingConfig) -> tuple[list[tuple[int, float]], int | None]:
    """((rows, seconds) of the runs, the best batch size or None). No samples without sample items.

    Sizes double up to `max_batch_size`. With "auto" they stop when throughput gains less than 2 % twice, memory runs
    out, or a batch takes longer than half the SLO. A model with a ladder runs all of its sizes, and keeps those that
    memory allows. Raises LoadFailed when the model fails on its own samples, and RowsCoupled, unless the configuration
    says what the rows are.
    """
    hook = runner.model.warmup
    found = hook() if hook is not None else None
    samples = [] if found is None else list(found)
    if not samples:
        return [], None
    ladder = runner.model.ladder
    auto = batching.max_batch_size == "auto" and ladder is None
    # what prepares itself for each size, does so in its first run, which is no sample
    sized = ladder is not None or batching.sizes == "auto"
    sizes = [] if ladder is None else [n for n in ladder.sizes if n > COMPARED]
    largest = MAX_AUTO if batching.max_batch_size == "auto" else batching.max_batch_size
    largest = 1 if batching.rows == "none" else largest if ladder is None else ladder.top
    alone: list[Any] = []
    limit_s = batching.slo_s / 2 if batching.slo_s else 0.0
    profile: list[tuple[int, float]] = []
    best, best_rate, without_gain = None, 0.0, 0
    size, started, budget_s = 1, time.monotonic(), 0.0
    while True:
        items = [samples[i % len(samples)] for i in range(size)]
        # the first sample comes first, last and first again: a running sum changes later rows only
        steps: tuple[int, ...] = (1, *STEPS) if sized else STEPS
        if budget_s and time.monotonic() > started + budget_s:
            steps = (1,)
        parts = [_run(runner, items[::step]) for step in steps]
        if batching.rows == "auto":
            results = [part.results[-1 if step < 0 else 0] for step, part in zip(steps, parts, strict=True)]
            alone = alone or results
            _check_rows(size, alone, parts, results)
        runs = [_seconds(part) for part in parts]
        fits = [s for s in runs if s is not None]
        if len(fits) < len(runs):
            if ladder is not None:
                _shorten(runner, ladder, size)
            return profile[COLD_RUNS:], best  # out of memory: the previous size was the best
        measured = fits[1:] if sized else fits
        started += fits[0] if sized else 0.0  # compilation has no limit here but that of the load
        profile += [(size if ladder is None else ladder.up(size), s) for s in measured]
        seconds = min(measured or fits)
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
        if ladder is not None:
            size = size + 1 if size < min(COMPARED, largest) else sizes.pop(0) if sizes else 0
            if not size:
                break
            continue
        if size >= largest or time.monotonic() > started + budget_s:
            break
        size = min(2 * size, largest)
    return profile[COLD_RUNS:], best if auto else None


def _shorten(runner: BatchRunner, ladder: Ladder, size: int) -> None:
    """Leaves the sizes from `size` on out of the model's ladder, unless there are no others."""
    if fitting := ladder.sizes[: bisect_left(ladder.sizes, size)]:
        runner.model.pad(Ladder(fitting))
    log.warning(
        "sizes_out_of_memory model=%s size=%d: batches are at most %d rows",
        runner.metadata.name,
        size,
        (fitting or (1,))[-1],
    )


def _check_rows(size: int, alone: Sequence[Any], parts: Sequence[BatchPart], together: Sequence[Any]) -> None:
    """Raises RowsCoupled. `alone` and `together` are results of the same sample."""
    errors = [_error(part) for part in parts]
    if size <= COMPARED and (any(part.miscounted for part in parts) or isinstance(errors[0], WrongRowCount)):
        raise RowsCoupled(f"{size} rows gave another number of rows")
    compared = 1 < size <= COMPARED and not any(errors)
    if compared and coupled([r.body for r in alone], [r.body for r in together]):
        raise RowsCoupled("a row has other results beside another")


def _run(runner: BatchRunner, values: list[Any]) -> BatchPart:
    """The final part of one run, with copies: a model may change its items, and one sample may be several items."""
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([Item(copied(value)) for value in values]), parts.append)
    return parts[-1]


def _error(part: BatchPart) -> PenstockError | None:
    return next((r.error for r in part.results if r is not None and r.error), None)


def _seconds(part: BatchPart) -> float | None:
    """The time of a run, or None if it ran out of memory. Raises LoadFailed."""
    error = _error(part)
    if part.oom is not None or isinstance(error, OutOfMemory):
        return None
    if error is not None:
        raise LoadFailed(f"the model fails on its own warm-up items: {error.message}", detail=error.detail)
    return part.run_s
