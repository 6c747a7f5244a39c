"""Observer: hooks that the engine calls. Metrics, traces and the record of batches are only observers.

Hooks run on the event loop's thread, once a batch wherever that is possible; they must not block. One that raises is
logged and costs nobody an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from penstock.errors import PenstockError
from penstock.types import MetricDelta, ModelStatus

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
    bucket: str = ""


class ModelReading(Struct):
    """One model version as it stands. `told` is what its scheduler explains, `pids` its worker processes by slot."""

    status: ModelStatus
    in_flight: int = 0
    queue_rows: int = 0
    queue_bytes: int = 0
    max_queue_rows: int = 0
    told: Mapping[str, Any] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)


class HttpReading(Struct):
    """The inference listener as it stands; `answers` counts them by status // 100."""

    connections: int
    refused: int
    answers: Mapping[int, int]


class Reading(Struct):
    """The whole server as it stands: what gauges show."""

    models: Sequence[ModelReading] = ()
    pool_used_bytes: int = 0
    pool_capacity_bytes: int = 0
    http: HttpReading | None = None


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
        """`state` is "ready", "died", "failed" (to load), or "removed": the slot was taken away for good."""

    def on_unload(self, model: str, version: str) -> None:
        """No handle of this version is left: nothing is told of it any more, unless it is loaded anew."""

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        """The model's own counters and timers changed."""


def hearing(observers: Sequence[Observer], hook: str) -> list[Observer]:
    """Those that override a hook: the others need not be called for every request."""
    return [o for o in observers if getattr(type(o), hook, None) not in (None, getattr(Observer, hook))]


def tell(observers: Sequence[Observer], hook: str, *arguments: object) -> None:
    """Calls one hook of every observer."""
    for observer in observers:
        try:
            getattr(observer, hook)(*arguments)
        except Exception:
            log.exception("observer_failed hook=%s observer=%s", hook, type(observer).__name__)
