"""Requests and batches on their way through a Batcher: merged responses, errors, and the reports to observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from penstock.core.batching.entry import INF, Dispatch, Entry, Expire, Fail, Shed
from penstock.core.codecs import OBJECT, ModelCodecs
from penstock.core.contracts import BatchRecord, Observer
from penstock.core.wire.slabs import Slab
from penstock.errors import DeadlineExceeded, ItemFailed, PenstockError, QueueTimeout, SequenceLost, WorkerDied
from penstock.types import BatchPart, Item, ItemResult, ModelMetadata, Sink

log = logging.getLogger("penstock.engine")


class Call(Struct, eq=False):
    """One accepted request: its caller and the state of its response.

    `label` is its front-end's name for the version, for observers. `sent_s` and `batch_id` belong to the last batch it
    was sent in. `end` is how it ended for its caller: "" (not yet), "ok" or "failed" (answered), else the reason.
    """

    item: Item
    sink: Sink | None
    entry: Entry
    on_cancel: Callable[[Call], None]
    end: str = ""
    label: str = ""
    sent_s: float = 0.0
    batch_id: int = 0
    streamed: bool = False  # a part of the response was sent: the request must not run again
    late_s: float = INF  # the caller's deadline
    hung: bool = False  # a batch with it exceeded `run_timeout_s`
    pieces: dict[int, ItemResult] | None = None  # of a split request: first row -> response

    def settle(self, result: ItemResult, reason: str = "") -> None:
        """Delivers the final response, once, unless the caller left. `reason`: why a model did not answer."""
        sink, self.sink = self.sink, None
        if self.item.trace is None:
            self.item.source = None  # which may refer to this call: the garbage collector would have to find it
        if sink is not None:
            self.end = reason or ("ok" if result.error is None else "failed")
            try:
                sink(result)
            except Exception:
                log.exception("sink_failed request=%d", self.entry.id)

    def deliver(self, result: ItemResult) -> None:
        """Delivers a part of the response, unless the caller left."""
        if self.sink is not None:
            try:
                self.sink(result)
            except Exception:
                log.exception("sink_failed request=%d", self.entry.id)

    def keep(self, start: int, result: ItemResult) -> None:
        """Keeps the response to the piece of a split request that begins at row `start`."""
        if self.pieces is None:
            self.pieces = {}
        self.pieces[start] = result

    def cancel(self) -> None:
        """Abandons the request: it is not run if it still waits, else not answered."""
        if self.sink is not None:
            self.sink = None
            self.end = "cancelled"
            self.on_cancel(self)


class RunningBatch(Struct, eq=False):
    """A batch on a slot. `failed`: the requests that failed, and if by a bad input. `failures` counts items.

    `unwanted`: a caller left a batch on a concurrent slot.
    """

    dispatch: Dispatch
    calls: list[Call]
    sent_s: float
    failed: dict[int, bool] = field(default_factory=dict)
    failures: int = 0
    unwanted: bool = False


def release(item: Item) -> None:
    """Returns a slab payload to its pool; the garbage collector frees other payloads."""
    if isinstance(item.payload, Slab):
        item.payload.release()


class PieceMerger:
    """Merges the responses to the pieces of split requests of one model version."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self._codecs = ModelCodecs(ModelMetadata(name, version))

    def merge(self, item: Item, pieces: Mapping[int, ItemResult], streamed: bool) -> ItemResult:
        """One response from `pieces`, by first row and in row order; an error if a piece failed or they do not fit."""
        ordered = [result for _, result in sorted(pieces.items())]
        bad = next((p for p in ordered if p.error is not None), None)
        if bad is not None or (streamed and not item.many):  # the parts are already sent: only the end is left
            return bad or ordered[-1]
        try:
            if item.codec == OBJECT:
                return ItemResult(body=[value for piece in ordered for value in piece.body])
            return self._codecs.get(item.codec).join(ordered)
        except PenstockError as e:
            return ItemResult(error=e)
        except Exception as e:
            log.exception("join_failed model=%s", self.name)
            text = f"the pieces of the response could not be joined: {type(e).__name__}"
            return ItemResult(error=ItemFailed(text))


def error_of(event: Expire | Shed | Fail, wait_s: float) -> PenstockError:
    """The error of a dropped or interrupted request; `wait_s` is the longest wait that was allowed."""
    if isinstance(event, Fail):
        if event.reason == "sequence_lost":
            return SequenceLost("the instance with the state of the sequence is gone: begin it again")
        return WorkerDied("the worker that ran this request died, and it is not run again")
    if isinstance(event, Shed):
        return DeadlineExceeded("overload: the request could not be answered before its deadline")
    if event.reason == "timeout":
        return QueueTimeout(f"the request expired in the queue after {wait_s * 1e6:.0f} us (its timeout, or timeout_s)")
    return DeadlineExceeded("the deadline passed, or could not be met, before the request was run")


def reason_of(error: Exception) -> str:
    """The metric label of a rejection: the scheduler's reason if it has one, else the error's code."""
    if isinstance(error, DeadlineExceeded):
        return "timeout" if isinstance(error, QueueTimeout) else "expired"
    return error.code if isinstance(error, PenstockError) else PenstockError.code


def overriding(observers: Sequence[Observer], hook: str) -> list[Observer]:
    """The observers that override a hook; only they need a call for every request."""
    return [o for o in observers if getattr(type(o), hook, None) not in (None, getattr(Observer, hook))]


def notify(observers: Sequence[Observer], hook: str, *arguments: object) -> None:
    """Calls one hook of every observer."""
    for observer in observers:
        try:
            getattr(observer, hook)(*arguments)
        except Exception:
            log.exception("observer_failed hook=%s observer=%s", hook, type(observer).__name__)


REQUEST_HOOKS = (
    "on_answer", "on_served", "on_reject", "on_complete", "on_error", "on_model_metrics", "on_traced", "on_traced_end",
)  # fmt: skip


def of_requests(observers: Sequence[Observer]) -> list[Observer]:
    """The observers of requests and batches; others, such as those of workers alone, cost a request nothing."""
    return [o for o in observers if any(overriding([o], hook) for hook in REQUEST_HOOKS)]


class Notifier:
    """Calls observers, once per batch where possible."""

    def __init__(self, name: str, version: str, observers: Sequence[Observer]) -> None:
        self._name, self._version = name, version
        self._observers = observers
        self._served_observers = overriding(observers, "on_served")
        self._trace_observers = overriding(observers, "on_traced")
        self._end_observers = overriding(observers, "on_traced_end") if self._trace_observers else []

    def ended(self, calls: Sequence[Call], now: float) -> None:
        """Reports ended requests by their `end`; called once for each request."""
        for call in calls if self._end_observers else ():
            if call.item.trace is not None:
                times = call.entry.arrival_s, now
                notify(self._end_observers, "on_traced_end", self._name, self._version, call.item, *times, call.end)
                call.item.source = None
        latencies, failed = [now - c.entry.arrival_s for c in calls if c.end == "ok"], 0
        if len(latencies) < len(calls):
            for call in calls:
                if call.end == "failed":
                    latencies.append(now - call.entry.arrival_s)
                    failed += 1
                elif call.end != "ok":
                    notify(self._observers, "on_reject", self._name, self._version, call.end)
        if latencies:
            notify(self._observers, "on_answer", self._name, self._version, latencies, failed)
            if self._served_observers and failed < len(latencies):
                self._served([c for c in calls if c.end == "ok"], now)

    def _served(self, calls: Sequence[Call], now: float) -> None:
        labels = [c.label for c in calls]
        waits_s = [c.sent_s - c.entry.arrival_s for c in calls]
        latencies_s = [now - c.entry.arrival_s for c in calls]
        notify(self._served_observers, "on_served", self._name, self._version, labels, waits_s, latencies_s)

    def failures(self, item: Item, result: ItemResult) -> int:
        """Reports the items that failed in this final result, and returns their number."""
        if result.error is not None:
            errors = [result.error]
        elif item.many:
            errors = [value for value in result.body if isinstance(value, PenstockError)]
        else:
            return 0
        for error in errors:
            notify(self._observers, "on_error", self._name, self._version, error)
        return len(errors)

    def batch(self, running: RunningBatch, part: BatchPart, now: float, outcome: str, max_batch_size: int) -> None:
        """Reports that a batch ended with `part`; see `BatchRecord`."""
        sent = running.dispatch
        record = BatchRecord(
            model=self._name,
            version=self._version,
            slot=sent.slot,
            rows=sent.rows,
            max_batch_size=max_batch_size,
            reason=sent.reason,
            ahead=sent.ahead,
            run_s=part.run_s,
            seconds=now - running.sent_s,
            waits_s=[running.sent_s - e.arrival_s for e in sent.entries],
            failed=running.failures,
            bucket=sent.entries[0].bucket,
            outcome=outcome,
            stages_s=part.stages_s,
            hooks_s=part.hooks_s,
            padding=sent.padding,
        )
        if bad := running.failed:
            there = [entry for entry in sent.entries if entry.id in bad]
            record.failed_requests = [(running.sent_s - e.arrival_s, e.rows, bad[e.id]) for e in there]
        notify(self._observers, "on_complete", record)
        if self._trace_observers:
            traced = [(call.item.trace, call.entry.arrival_s) for call in running.calls if call.item.trace is not None]
            if traced:
                notify(self._trace_observers, "on_traced", record, now, traced)
        if part.metrics:
            notify(self._observers, "on_model_metrics", self._name, self._version, record.slot, part.metrics)
