"""Observer: hooks that the engine calls. Metrics, traces and the record of batches are only observers.

Hooks run on the event loop's thread, once a batch wherever that is possible; they must not block. One that raises is
logged and costs nobody an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec import Struct

from penstock.errors import PenstockError
from penstock.types import MetricDelta

log = logging.getLogger("penstock.observe")


class BatchRecord(Struct):
    """One finished batch. `waits_s` (queue) and `latencies_s` (arrival to answer) are aligned, one a request."""

    model: str
    version: str
    slot: int
    rows: int
    max_batch_size: int
    reason: str
    ahead: bool
    run_s: float
    seconds: float
    waits_s: Sequence[float]
    latencies_s: Sequence[float]
    failed: int


class Observer:
    """Every hook does nothing; a subclass overrides what it wants."""

    def on_arrival(self, model: str, version: str) -> None:
        """A request was queued."""

    def on_reject(self, model: str, version: str, code: str) -> None:
        """A request ended without being run: `code` is that of its error, or "cancelled"."""

    def on_complete(self, record: BatchRecord) -> None:
        """A batch ended."""

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        """One item failed."""

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        """`state` is "ready", "died" or "failed"."""

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        """The model's own counters and timers changed."""


def tell(observers: Sequence[Observer], hook: str, *arguments: object) -> None:
    """Calls one hook of every observer."""
    for observer in observers:
        try:
            getattr(observer, hook)(*arguments)
        except Exception:
            log.exception("observer_failed hook=%s observer=%s", hook, type(observer).__name__)
