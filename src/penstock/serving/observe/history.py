"""History: what each model did in each of the last seconds, for the dashboard. It is bounded."""

# The charts of the dashboard begin in the past, so the server keeps a few minutes by itself. Counters come from the
# Prometheus observer, once a second. Only latencies are gathered here, because few buckets give no percentiles.
# A second takes one packed row of 4 bytes for each value.

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from struct import Struct as Packed
from typing import Final, NamedTuple

import numpy as np

from penstock.core.contracts import ModelSnapshot, Observer, ServerSnapshot

Key = tuple[str, str]  # model, version

KEPT: Final = 300  # seconds of each model
MODELS: Final = 200  # with a history, the last ones that were used
EVENTS: Final = 200


class Second(NamedTuple):
    """One second, or more, of one model version. Rates are per second; ages and latencies are in seconds.

    `busy` is the number of instances that ran a batch on average, `rows` the mean rows of a batch.
    """

    requests: float = 0.0
    answers: float = 0.0
    failed: float = 0.0
    rejected: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    queue: float = 0.0
    oldest_s: float = 0.0
    in_flight: float = 0.0
    rows: float = 0.0
    busy: float = 0.0


_AVERAGED: Final = frozenset({"requests", "answers", "failed", "rejected", "rows", "busy"})
_PACKED: Final = Packed(f"{len(Second._fields)}f")


class Totals(NamedTuple):
    """Counters of one model version since the start: requests, rows of batches, and seconds that batches ran."""

    arrived: int = 0
    answered: int = 0
    failed: int = 0
    rejected: int = 0
    batches: int = 0
    rows: float = 0.0
    run_s: float = 0.0


class Event(NamedTuple):
    """What changed on the server: `kind` is "ready", "died", "failed", "unloaded" ..."""

    time_s: float
    model: str
    version: str
    kind: str
    text: str


class History(Observer):
    """The last seconds of each model, and the last events. `tick` is called once a second."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.event_count = 0
        self.now: dict[Key, Second] = {}  # of the last second, of the loaded models
        self._rows: dict[Key, deque[bytes]] = {}  # the last used one last
        self._latencies_s: dict[Key, list[float]] = {}
        self._before: Mapping[Key, Totals] = {}

    # ---- Observer

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        self._latencies_s.setdefault((model, version), []).extend(latencies_s)

    def on_load(self, model: str, version: str, slot: int, seconds: float) -> None:
        self.note(model, version, "ready", f"instance {slot} loaded in {seconds:.1f} s")

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        if state != "ready":
            self.note(model, version, state, f"instance {slot}")

    def on_unload(self, model: str, version: str) -> None:
        self.note(model, version, "unloaded", "")

    def note(self, model: str, version: str, kind: str, text: str) -> None:
        self.events.append(Event(time.time(), model, version, kind, text))
        self.event_count += 1

    # ---- seconds

    def tick(self, snapshot: ServerSnapshot, totals: Mapping[Key, Totals], seconds: float) -> None:
        """Adds what happened in the last `seconds`."""
        self.now = {}
        for model in snapshot.models:
            key = model.key
            second = self._second(model, totals.get(key, Totals()), self._before.get(key, Totals()), seconds)
            self.now[key] = second
            if any(second) or key in self._rows:
                self._keep(key, second)
        self._before = totals
        self._latencies_s.clear()

    def _second(self, model: ModelSnapshot, now: Totals, before: Totals, seconds: float) -> Second:
        arrived, answered, failed, rejected, batches, rows, run_s = (a - b for a, b in zip(now, before, strict=True))
        latencies_s = self._latencies_s.get(model.key, ())
        p50_s, p99_s = np.percentile(latencies_s, (50, 99)).tolist() if latencies_s else (0.0, 0.0)
        requests, answers, failures, rejections = (
            max(0.0, count / seconds) for count in (arrived, answered, failed, rejected)
        )
        return Second(
            requests,
            answers,
            failures,
            rejections,
            p50_s,
            p99_s,
            model.status.queue,
            model.oldest_s,
            model.in_flight,
            rows / batches if batches else 0.0,
            run_s / seconds,
        )

    def _keep(self, key: Key, second: Second) -> None:
        rows = self._rows.pop(key, None) if any(second) else self._rows.get(key)
        if rows is None:
            rows = deque(maxlen=KEPT)
            if len(self._rows) >= MODELS:
                del self._rows[next(iter(self._rows))]
        self._rows.setdefault(key, rows).append(_PACKED.pack(*second))

    def last(self, key: Key, seconds: int) -> list[Second]:
        """The last seconds of a model, the newest last; fewer if it has fewer."""
        return [Second(*_PACKED.unpack(row)) for row in list(self._rows.get(key, ()))[-seconds:]]


def merged(seconds: Sequence[Second]) -> Second:
    """One row for several: rates are averaged, of the others the highest is kept."""
    return Second(
        *(
            sum(values) / len(values) if name in _AVERAGED else max(values)
            for name, values in zip(Second._fields, zip(*seconds, strict=True), strict=True)
        )
    )
