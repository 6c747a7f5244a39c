"""TraceObserver: makes the spans of a batch and of its traced requests when they have ended."""

import time
from collections.abc import Sequence
from typing import Any, Final

from penstock.core.contracts import BatchRecord, Observer
from penstock.tracing import SPAN, SpanRecord, Tracer, child_of, relayed
from penstock.types import Item, MetricDelta, Trace

STAGES: Final = ("preprocess", "predict", "postprocess")
_HTTP: Final = {b":method": "http.request.method", b":path": "url.path", b":client": "client.address"}


class TraceObserver(Observer):
    """Makes the spans of models; with `noun` "node", of the nodes of a pipeline.

    A traced request has a span with two children for each run: "queue", and "run", which is linked to the span of the
    batch. That span begins a trace of its own, is linked to all its traced requests, and has the stages as children.
    """

    def __init__(self, tracer: Tracer, noun: str = "request") -> None:
        self._tracer, self._noun = tracer, noun

    def on_traced(self, record: BatchRecord, ended_s: float, requests: Sequence[tuple[Trace, float]]) -> None:
        unix_s, r, emit = time.time() - time.monotonic(), record, self._tracer.emit
        end_s = unix_s + ended_s
        sent_s = end_s - r.seconds
        batch = child_of(None)
        about = {
            "penstock.model": r.model,
            "penstock.version": r.version,
            "penstock.instance": r.slot,
            "penstock.batch.rows": r.rows,
            "penstock.batch.requests": len(r.waits_s),
            "penstock.batch.limit_rows": r.max_batch_size,
            "penstock.batch.reason": r.reason,
            "penstock.batch.ahead": r.ahead,
            "penstock.batch.run_s": r.run_s,
            "penstock.batch.failed": r.failed,
        }
        error = "" if r.outcome == "ok" else f"the worker {r.outcome}" if r.outcome == "died" else "the batch was lost"
        traces = [trace for trace, _ in requests]
        emit(SpanRecord(f"batch {r.model}", batch, sent_s, end_s, about, traces, error))
        at_s = end_s
        for name, seconds in zip(reversed(STAGES), reversed(r.stages_s or ()), strict=False):
            emit(SpanRecord(f"{name} {r.model}", child_of(batch), at_s - seconds, at_s))
            at_s -= seconds
        for trace, arrival_s in requests:
            emit(SpanRecord("queue", child_of(trace), unix_s + arrival_s, sent_s))
            emit(SpanRecord("run", child_of(trace), sent_s, end_s, {}, [batch], error))

    def on_traced_end(
        self, model: str, version: str, item: Item, arrival_s: float, ended_s: float, outcome: str
    ) -> None:
        if item.trace is None:
            return
        unix_s = time.time() - time.monotonic()
        about: dict[str, Any] = {"penstock.model": model, "penstock.version": version, "penstock.rows": item.rows}
        about["penstock.outcome"] = outcome
        if item.request_id:
            about["penstock.request_id"] = item.request_id
        for name, value in () if item.source is None else item.source.pseudo_headers():
            if name in _HTTP:
                about[_HTTP[name]] = value.decode("utf-8", "replace").partition("?")[0]
        error, kind = "" if outcome == "ok" else outcome, int(self._noun == "request")
        name = f"{self._noun} {model}"
        record = SpanRecord(name, item.trace, unix_s + arrival_s, unix_s + ended_s, about, [], error, kind)
        self._tracer.emit(record)


class RequestTracer(TraceObserver):
    """Also decides which requests are traced, and passes on the spans of worker processes."""

    def on_item(self, item: Item) -> None:
        if item.trace is None:  # else it waited for its model to load
            self._tracer.begin(item)

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        for delta in deltas:
            if delta.kind == SPAN:
                self._tracer.emit(relayed(delta.unit))
