"""History: what each model did in each of the last seconds, for the dashboard. It is bounded."""

# The charts of the dashboard begin in the past, so the server keeps an hour by itself: the last minutes second by
# second, and all of it in steps of ten seconds. Counters come from the Prometheus observer and Triton's statistics,
# once a second. Only latencies are gathered here, because few buckets give no percentiles. A second takes one packed
# row of 4 bytes for each value: 70 kB an hour of a model. Times come from a clock that is never set.

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import mul
from struct import Struct as Packed
from typing import Final, NamedTuple

import numpy as np

from penstock.core.contracts import ModelSnapshot, Observer, ServerSnapshot
from penstock.types import ModelStatus

Key = tuple[str, str]  # model, version

KEPT: Final = 300  # seconds of each model
STEP: Final = 10  # seconds of one row of the hour
STEPS: Final = 360
MODELS: Final = 200  # with a history, the last ones that were used
EVENTS: Final = 200


class Second(NamedTuple):
    """One second, or more, of one model version. Rates are per second; ages and latencies are in seconds.

    `busy` is the number of instances that had a batch on average, `rows` the mean rows of a batch. The eight times at
    the end are parts of the mean time of a request: `handover_s` is what the others leave, between the processes and
    behind a batch that runs; `write_s` follows the answer, which ends the latency.
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
    waited_s: float = 0.0
    handover_s: float = 0.0
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    predict_s: float = 0.0
    postprocess_s: float = 0.0
    encode_s: float = 0.0
    write_s: float = 0.0


OVERVIEW: Final = Second._fields.index("waited_s")  # so many of the fields are shown for all models
_AVERAGED: Final = frozenset({"requests", "answers", "failed", "rejected", "rows", "busy"})
_PACKED: Final = Packed(f"{len(Second._fields)}f")


class StageTotals(NamedTuple):
    """Seconds of all requests that one model version answered without an error: in all, and in each stage.
    `preprocess_s` and `postprocess_s` are the model's own."""

    latency_s: float = 0.0
    waited_s: float = 0.0
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    predict_s: float = 0.0
    postprocess_s: float = 0.0
    encode_s: float = 0.0


class Totals(NamedTuple):
    """Counters of one model version since the start: requests, batches with their rows, and workers that were
    restarted. The snapshot of the version has `busy_s` and `write_s`."""

    arrived: int = 0
    answered: int = 0
    failed: int = 0
    rejected: int = 0
    batches: int = 0
    rows: float = 0.0
    restarts: int = 0
    busy_s: float = 0.0
    write_s: float = 0.0
    stages: StageTotals = StageTotals()


class Event(NamedTuple):
    """What changed on the server: `kind` is "ready", "died", "failed", "scaled", "unloaded" ... `up_s` is the time
    since the server began, by a clock that is never set."""

    time_s: float
    model: str
    version: str
    kind: str
    text: str
    up_s: float = 0.0


class History(Observer):
    """The last hour of each model, and the last events. `tick` is called once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._ticks = 0
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.event_count = 0
        self.now: dict[Key, Second] = {}  # of the last second, of the loaded models
        self._rows: dict[Key, deque[bytes]] = {}  # the last used one last
        self._steps: dict[Key, deque[bytes]] = {}  # of the same models
        self._latencies_s: dict[Key, list[float]] = {}
        self._before: dict[Key, Totals] = {}
        self._statuses: dict[Key, ModelStatus] = {}

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
        self.events.append(Event(time.time(), model, version, kind, text, self.up_s))
        self.event_count += 1

    # ---- seconds

    @property
    def up_s(self) -> float:
        """Seconds since the server began."""
        return self._clock() - self._began_s

    def tick(self, snapshot: ServerSnapshot, totals: Mapping[Key, Totals], seconds: float) -> None:
        """Adds what happened in the last `seconds`."""
        self.now = {}
        before = self._before
        self._before = {
            m.key: totals.get(m.key, Totals())._replace(busy_s=m.busy_s, write_s=m.write_s) for m in snapshot.models
        }
        statuses, self._statuses = self._statuses, {model.key: model.status for model in snapshot.models}
        for model in snapshot.models:
            key = model.key
            if key in statuses:
                self._note_changes(statuses[key], model.status)
            second = self._second(model, self._before[key], before.get(key, Totals()), seconds)
            self.now[key] = second
            if any(second) or key in self._rows:
                self._keep(key, second)
        self._latencies_s.clear()
        self._ticks += 1
        if self._ticks % STEP == 0:
            for key in self._rows:
                steps = self._steps.setdefault(key, deque(maxlen=STEPS))
                steps.append(_PACKED.pack(*merged(self.last(key, STEP))))

    def _note_changes(self, before: ModelStatus, now: ModelStatus) -> None:
        """Notes changes that no hook reports, of whatever made them."""
        if now.instances != before.instances:
            self.note(now.name, now.version, "scaled", f"from {before.instances} to {now.instances} instances")
        if now.state != before.state and "DRAINED" in (now.state, before.state):
            self.note(now.name, now.version, "drained" if now.state == "DRAINED" else "resumed", "")
        if now.default and not before.default:
            self.note(now.name, now.version, "default", "for requests without a version")
        if now.traffic != before.traffic and {now.traffic, before.traffic} != {0.0, 1.0}:
            self.note(now.name, now.version, "traffic", f"from {before.traffic:.0%} to {now.traffic:.0%}")

    def _second(self, model: ModelSnapshot, now: Totals, before: Totals, seconds: float) -> Second:
        arrived, answered, failed, rejected, batches, rows, _, busy_s, write_s = (
            a - b for a, b in zip(now[:-1], before[:-1], strict=True)
        )
        if answered <= failed:  # the next answers count what is written now
            self._before[model.key] = now._replace(write_s=before.write_s)
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
            max(0.0, busy_s / seconds),
            *(
                (*_parts(now.stages, before.stages, answered - failed), max(0.0, write_s / (answered - failed)))
                if answered > failed
                else ()
            ),
        )

    def _keep(self, key: Key, second: Second) -> None:
        rows = self._rows.pop(key, None) if any(second) else self._rows.get(key)
        if rows is None:
            rows = deque(maxlen=KEPT)
            if len(self._rows) >= MODELS:
                oldest = next(iter(self._rows))
                del self._rows[oldest]
                self._steps.pop(oldest, None)
        self._rows.setdefault(key, rows).append(_PACKED.pack(*second))

    def last(self, key: Key, seconds: int) -> list[Second]:
        """The last seconds of a model, the newest last; fewer if it has fewer."""
        return _unpacked(list(self._rows.get(key, ()))[-seconds:])

    def hour(self, key: Key) -> list[Second]:
        """The last hour of a model in steps of STEP seconds, the newest last."""
        return _unpacked(self._steps.get(key, ()))

    @property
    def step_age(self) -> int:
        """The seconds since the newest step ended."""
        return self._ticks % STEP


def _unpacked(rows: Iterable[bytes]) -> list[Second]:
    return [Second(*_PACKED.unpack(row)) for row in rows]


def _parts(now: StageTotals, before: StageTotals, answered: float) -> tuple[float, ...]:
    """The last fields of a Second, up to the answer."""
    latency_s, waited_s, *stages_s = (max(0.0, (a - b) / answered) for a, b in zip(now, before, strict=True))
    return waited_s, max(0.0, latency_s - waited_s - sum(stages_s)), *stages_s


def merged(seconds: Sequence[Second]) -> Second:
    """One row for several: rates are averaged, times of a request over all requests, of the others the highest is
    kept."""
    answers = [second.answers for second in seconds]
    total = sum(answers)

    def value(place: int, values: Sequence[float]) -> float:
        if place >= OVERVIEW:
            return sum(map(mul, values, answers)) / total if total else 0.0
        return sum(values) / len(values) if Second._fields[place] in _AVERAGED else max(values)

    return Second(*map(value, range(len(Second._fields)), zip(*seconds, strict=True)))
