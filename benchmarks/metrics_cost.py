"""What do the metrics cost: a batch of 64 counted and recorded, and a page of 50 models rendered?

CPU time of this process, least of five. `python benchmarks/metrics_cost.py`
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.observe.base import BatchRecord, HttpReading, ModelReading, Observer, Reading, tell
from penstock.observe.prometheus import PrometheusObserver
from penstock.observe.records import BatchRecords
from penstock.types import ModelStatus

BATCHES = 1280  # so many that the counting into buckets is in it


def least(run: Callable[[], object]) -> float:
    """CPU seconds of the fastest of five runs."""
    took = []
    for _ in range(5):
        start = time.thread_time()
        run()
        took.append(time.thread_time() - start)
    return min(took)


def record(model: str) -> BatchRecord:
    return BatchRecord(model, "1", 0, 64, 64, "full", False, 0.018, 0.019, [0.001] * 64, 0)


def reading() -> Reading:
    models = [ModelReading(ModelStatus(f"m{i}", "1", "READY", 1, 1, 64, ("cpu",))) for i in range(50)]
    return Reading(models, 1, 2, HttpReading(1, 0, {2: 5}))


def main() -> None:
    observers: list[Observer] = [PrometheusObserver(), BatchRecords()]
    one = record("m")
    latencies = [0.02] * 64

    def count() -> None:
        for _ in range(BATCHES):
            tell(observers, "on_answer", "m", "1", latencies, 0)
            tell(observers, "on_complete", one)

    batches = least(count)
    print(f"a batch of 64, counted and recorded: {batches / BATCHES * 1e6:.1f} us (wanted: < 10)")
    observer = PrometheusObserver(reading)
    for i in range(50):
        observer.on_complete(record(f"m{i}"))
        observer.on_answer(f"m{i}", "1", latencies, 0)
    observer.render()
    print(f"a page of 50 models: {least(observer.render) * 1e3:.1f} ms (wanted: < 20)")


if __name__ == "__main__":
    main()
