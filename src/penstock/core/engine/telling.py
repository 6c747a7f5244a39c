"""Teller: what observers hear of the requests and batches of one model version."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.engine.call import Call, Running
from penstock.errors import PenstockError
from penstock.serving.observe.base import Observer, hearing, record_of, tell
from penstock.types import BatchPart, ItemResult


class Teller:
    """Tells once a batch wherever that is possible. Without observers it costs next to nothing."""

    def __init__(self, name: str, version: str, observers: Sequence[Observer]) -> None:
        self._name, self._version = name, version
        self._observers = observers
        self._hear_served = hearing(observers, "on_served")

    def ended(self, calls: Sequence[Call], now: float) -> None:
        """These requests ended as their `end` says: each is told of once."""
        if not self._observers:
            return
        latencies, failed = [now - c.entry.arrival_s for c in calls if c.end == "ok"], 0
        if len(latencies) < len(calls):
            for call in calls:
                if call.end == "failed":
                    latencies.append(now - call.entry.arrival_s)
                    failed += 1
                elif call.end != "ok":
                    tell(self._observers, "on_reject", self._name, self._version, call.end)
        if latencies:
            tell(self._observers, "on_answer", self._name, self._version, latencies, failed)
            if self._hear_served and failed < len(latencies):
                self._served([c for c in calls if c.end == "ok"], now)

    def _served(self, calls: Sequence[Call], now: float) -> None:
        labels = [c.label for c in calls]
        waits_s = [c.sent_s - c.entry.arrival_s for c in calls]
        latencies_s = [now - c.entry.arrival_s for c in calls]
        tell(self._hear_served, "on_served", self._name, self._version, labels, waits_s, latencies_s)

    def failures(self, call: Call, result: ItemResult) -> int:
        """Tells of the items that failed with this final result: how many."""
        if result.error is not None:
            errors = [result.error]
        elif call.item.many:
            errors = [value for value in result.body if isinstance(value, PenstockError)]
        else:
            return 0
        for error in errors:
            tell(self._observers, "on_error", self._name, self._version, error)
        return len(errors)

    def batch(self, running: Running, part: BatchPart, now: float, outcome: str, max_batch_size: int) -> None:
        """A batch ended with `part`; see `BatchRecord`."""
        if not self._observers:
            return
        record = record_of(
            self._name,
            self._version,
            running.dispatch,
            part,
            running.sent_s,
            now,
            max_batch_size=max_batch_size,
            failed=running.failures,
            outcome=outcome,
        )
        tell(self._observers, "on_complete", record)
        if part.metrics:
            tell(self._observers, "on_model_metrics", self._name, self._version, record.slot, part.metrics)
