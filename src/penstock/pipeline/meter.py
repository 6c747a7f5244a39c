"""Meter: what a node counts of itself, and the news that a batch has ended.

The counts go the way of a model's own (`penstock.metrics`), a few times a second and not once an item: a call for each
would cost as much as a hand-over.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from penstock import metrics
from penstock.core.contracts import BatchRecord, Observer
from penstock.pipeline.node import Stamp

FLUSH_S = 0.05


class Meter(Observer):
    """Counts of one node: items by what became of them, batches by size, seconds of waiting and running.

    `on_batch` is called when a batch has left the node, `reading()` gives (items that wait, items that run).
    """

    def __init__(self, node: str, on_batch: Callable[[], None], reading: Callable[[], tuple[int, int]]) -> None:
        self._node = node
        self._on_batch, self._reading = on_batch, reading
        self._items: Counter[str] = Counter()
        self._sizes: Counter[int] = Counter()
        self._waits_s: list[float] = []
        self._runs_s: list[float] = []
        self._inlined: Stamp | None = None
        self._due = False

    def on_complete(self, record: BatchRecord) -> None:
        self._sizes[record.rows] += 1
        self._waits_s.append(max(record.waits_s))
        self._runs_s.append(record.run_s)
        self._on_batch()
        self._arm()

    def inlined(self, stamp: Stamp | None) -> None:
        """An item was here in the call of the node before: in a batch that `stamp` tells of, or it failed (None)."""
        self._items["failed" if stamp is None else "ok"] += 1
        if stamp is not None and stamp is not self._inlined:  # the first of its batch
            self._inlined = stamp
            self._sizes[stamp.size] += 1
            self._waits_s.append(0.0)
            self._runs_s.append(stamp.run_s)
        self._arm()

    def _arm(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        self._items["ok"] += len(latencies_s) - failed
        self._items["failed"] += failed

    def on_reject(self, model: str, version: str, reason: str) -> None:
        self._items[reason] += 1

    def flush(self) -> None:
        """Hands over what was counted since the last time."""
        self._due = False
        node = self._node
        for outcome, count in self._items.items():
            if count:
                metrics.counter("pipeline_items_total", count, node=node, outcome=outcome)
        for size, count in self._sizes.items():
            metrics.counter("pipeline_batches_total", count, node=node, size=size)
        metrics.timings("pipeline_wait", self._waits_s, node=node)
        metrics.timings("pipeline_run", self._runs_s, node=node)
        waiting, running = self._reading()
        metrics.gauge("pipeline_queue_items", waiting, node=node)
        metrics.gauge("pipeline_running_items", running, node=node)
        self._items, self._sizes = Counter(), Counter()
        self._waits_s, self._runs_s = [], []
