"""Observer: hooks that the engine calls. Metrics, traces and the record of batches are only observers.

Hooks run on the event loop's thread, once a batch wherever that is possible; they must not block. One that raises is
logged and costs nobody an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from penstock.core.batching.entry import Dispatch
from penstock.errors import PenstockError
from penstock.types import BatchPart, MetricDelta, ModelStatus

log = logging.getLogger("penstock.observe")


class BatchRecord(Struct):
    """One finished batch. `waits_s` is how long each of its requests, or parts of requests, was in the queue.

    `outcome` is "ok" (it was answered), "died" (its worker did, under it) or "lost" (its worker died before it began).
    `run_s` is the worker's own time, `stages_s` that of its stages (see BatchPart), `seconds` that from sending to the
    end; `failed` counts items.
    """

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
    failed: int
    bucket: str = ""
    outcome: str = "ok"
    stages_s: tuple[float, float, float] | None = None


def record_of(
    model: str,
    version: str,
    sent: Dispatch,
    part: BatchPart,
    sent_s: float,
    now: float,
    *,
    max_batch_size: int,
    failed: int,
    outcome: str,
) -> BatchRecord:
    """The record of a batch that was sent at `sent_s` and ended now with `part`."""
    return BatchRecord(
        model=model,
        version=version,
        slot=sent.slot,
        rows=sent.rows,
        max_batch_size=max_batch_size,
        reason=sent.reason,
        ahead=sent.ahead,
        run_s=part.run_s,
        seconds=now - sent_s,
        waits_s=[sent_s - e.arrival_s for e in sent.entries],
        failed=failed,
        bucket=sent.entries[0].bucket,
        outcome=outcome,
        stages_s=part.stages_s,
    )


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
        """A request came. It ends with exactly one answer or rejection; until then it is in flight."""

    def on_request(self, model: str, version: str, rows: int, size_bytes: int) -> None:
        """A request of this size is about to be queued, which may still be refused; after its `on_arrival`."""

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        """Requests were answered by the model, so long after they came; `failed` of them with an error."""

    def on_served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        """Of those of `on_answer` that did not fail: what each one's front-end called its version, how long it had
        waited when it was sent (for the last time), and how long after it came it was answered."""

    def on_reject(self, model: str, version: str, reason: str) -> None:
        """A request ended without an answer of the model; see `docs/metrics.md` for the reasons."""

    def on_complete(self, record: BatchRecord) -> None:
        """A batch ended."""

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        """One item failed, alone or among those of a request of many."""

    def on_load(self, model: str, version: str, slot: int, seconds: float) -> None:
        """A worker came up, so long after it was started; `on_worker` follows."""

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
