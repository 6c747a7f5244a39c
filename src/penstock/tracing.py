"""Traces: spans of requests, batches and pipeline nodes, for a collector of OpenTelemetry.

`start` turns them on in this process, for all engines, streamers and pipelines that are made afterwards.
"""

# A request that is traced carries a Trace from its arrival on, and nothing else: what spans say is known when a batch
# or a request has ended, so they are made then, once per batch, and a thread of OpenTelemetry's SDK exports them.
# Whether a request is traced is decided when it arrives. A caller that traces decides with its `traceparent`; of the
# others a random share is traced. The spans of a request and its batch cost the interpreter about 0.15 ms, so
# `max_per_s` bounds both.
# A worker process exports nothing: its spans travel to the server with its metrics.

from __future__ import annotations

import atexit
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from penstock import metrics
from penstock.errors import ConfigError, install_hint
from penstock.types import Headers, Item, ItemResult, Sink, Trace
from penstock.values import prepare

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("penstock.serving")

SERVER, CLIENT, PRODUCER = 1, 2, 3  # kinds of a span
SPAN: Final = "span"  # the kind of a metric change that carries one
TEXT_CHARS: Final = 1000  # of an attribute, such as the path of a request, or of an error
STOP_S: Final = 2.0  # for the last spans, when the process ends
REPORT_S: Final = 60.0  # between two messages about lost spans
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)

_random: Final = random.Random()  # models seed the common one: all workers, and each restart, would draw the same ids
os.register_at_fork(after_in_child=_random.seed)
UNSAMPLED: Final = f"00-{1:032x}-{1:016x}-00"

tracer: Tracer | None = None
"""Of this process; None: nothing is traced."""


class SpanRecord(Struct):
    """A finished span; times are in Unix seconds. `links` are the traces of other spans, `error` is "" if all went
    well. `kind` is OpenTelemetry's: 0 internal, 1 server, 2 client, 3 producer, 4 consumer."""

    name: str
    trace: Trace
    start_s: float
    end_s: float
    attributes: dict[str, Any] = {}
    links: list[Trace] = []
    error: str = ""
    kind: int = 0


prepare(SpanRecord)


def parse(traceparent: str) -> tuple[Trace, bool] | None:
    """The caller's span and whether it is sampled, of a W3C `traceparent`; None for an invalid one."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (found[1] == "00" and found[5]):
        return None
    return Trace(found[2], found[3]), bool(int(found[4], 16) & 1)


def child_of(parent: Trace | None) -> Trace:
    """A new span in the trace of `parent`, or the first one of a new trace."""
    span = f"{_random.getrandbits(64) or 1:016x}"
    return (
        Trace(f"{_random.getrandbits(128) or 1:032x}", span) if parent is None else Trace(parent.id, span, parent.span)
    )


def traceparent_of(trace: Trace) -> str:
    """The W3C `traceparent` of a span that is traced."""
    return f"00-{trace.id}-{trace.span}-01"


class Tracer:
    """Decides what is traced, and hands finished spans to `emit`. `ratio`: the share of requests whose caller has not
    decided; at most `max_per_s` requests a second are traced."""

    def __init__(
        self,
        emit: Callable[[SpanRecord], None],
        ratio: float = 0.0,
        max_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.emit, self.ratio = emit, ratio
        self._most, self._clock = max_per_s, clock
        self._tokens, self._filled_s = max(1.0, max_per_s), clock()

    def sample(self, traceparent: str) -> Trace | None:
        """The span of a request with this header, or "" without one; None if it is not traced."""
        caller = parse(traceparent) if traceparent else None
        if not (_random.random() < self.ratio if caller is None else caller[1]):
            return None
        now = self._clock()
        self._tokens = min(max(1.0, self._most), self._tokens + self._most * (now - self._filled_s))
        self._filled_s = now
        if self._tokens < 1.0:
            return None
        self._tokens -= 1.0
        return child_of(None if caller is None else caller[0])

    def begin(self, item: Item) -> Trace | None:
        """Sets the span of an item that arrives, also where its source can log it."""
        source = item.source
        item.trace = trace = self.sample("" if source is None else source.traceparent)
        if trace is not None and source is not None:
            source.trace = trace
        return trace


class Caller:
    """The source of an item that came with a `traceparent` from Python code, or over a broker."""

    __slots__ = ("trace", "traceparent")

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent
        self.trace: Trace | None = None

    def pseudo_headers(self) -> Headers:
        """See `penstock.request`."""
        return []


def current_traceparent() -> str:
    """The `traceparent` of the span that OpenTelemetry has current in this thread or task; "" without one."""
    otel = sys.modules.get("opentelemetry.trace")
    context = None if otel is None else otel.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def caller() -> Caller | None:
    """The source of an item that this thread or task submits."""
    if tracer is None or not (traceparent := current_traceparent()):
        return None
    return Caller(traceparent)


def traced(name: str, kind: int, item: Item, sink: Sink) -> Sink:
    """The sink of an item that no engine takes; it makes the item's span, named so, if it is traced."""
    if tracer is None or item.trace is not None:
        return sink
    if (trace := tracer.begin(item)) is None:
        return sink
    start_s, began_s, emit = time.time(), time.monotonic(), tracer.emit

    def ended(result: ItemResult) -> None:
        if result.final:
            error = result.error or getattr(result.body, "error", None)
            end_s = start_s + time.monotonic() - began_s  # also while the clock is set
            emit(SpanRecord(name, trace, start_s, end_s, error="" if error is None else str(error), kind=kind))
        sink(result)

    return ended


def descend(item: Item, parent: Trace | None) -> None:
    """Lets an item that arises from another one be traced if, and only if, the other one is."""
    if parent is not None:
        item.trace = child_of(parent)
    else:
        item.source = Caller(UNSAMPLED)


# ---- on and off


def start(
    endpoint: str | None = None,
    *,
    ratio: float = 0.01,
    max_per_s: float = 50.0,
    service: str = "penstock",
    exporter: SpanExporter | None = None,
) -> None:
    """Traces from now on, to an OTLP/HTTP `endpoint` such as "http://127.0.0.1:4318/v1/traces", or to your own
    `exporter`. Without both, OpenTelemetry's environment variables say where the collector is.

    `ratio`: the share of requests that are traced if their caller does not decide; `max_per_s`: most traced requests a
    second. Raises ConfigError without the extra `tracing`, RuntimeError if tracing is on, ValueError.
    """
    global tracer, _sink
    if tracer is not None:
        raise RuntimeError("tracing is on already: call penstock.tracing.stop() first")
    if not 0 <= ratio <= 1 or not max_per_s > 0:
        raise ValueError(f"expected a ratio from 0 to 1 and max_per_s above 0, found {ratio!r} and {max_per_s!r}")
    _sink = _Sink(endpoint, service, exporter)
    tracer = Tracer(_sink.put, ratio, max_per_s)
    atexit.register(stop)


def stop() -> None:
    """Exports the last spans, for at most STOP_S, and traces no more."""
    global tracer, _sink
    atexit.unregister(stop)
    sink, tracer, _sink = _sink, None, None
    if sink is not None:
        sink.close()


def flush() -> None:
    """Exports the spans that wait. Blocks."""
    if _sink is not None:
        _sink.flush()


class _Sink:
    """Turns records into the SDK's spans, for the thread that exports them."""

    def __init__(self, endpoint: str | None, service: str, exporter: SpanExporter | None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint)
                logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)  # `_Reporting` reports
        except ModuleNotFoundError as error:
            raise ConfigError(f"tracing: {error.name} is missing: {install_hint('tracing')}") from None
        inner = exporter

        class _Reporting(SpanExporter):
            """Reports lost spans, once a minute."""

            lost, again_s = 0, 0.0

            def export(self, spans: Any) -> SpanExportResult:
                try:
                    result = inner.export(spans)
                except Exception:
                    result = SpanExportResult.FAILURE
                if result is not SpanExportResult.SUCCESS:
                    self.lost += len(spans)
                    if time.monotonic() >= self.again_s:
                        self.again_s = time.monotonic() + REPORT_S
                        log.warning(
                            "event=traces_lost spans=%d endpoint=%s consequence=they_are_missing_in_the_collector"
                            " hint='look at its log, and at tracing.endpoint'",
                            *(self.lost, getattr(inner, "_endpoint", type(inner).__name__)),
                        )
                        self.lost = 0
                return result

            def shutdown(self) -> None:
                inner.shutdown()

        resource = Resource.create()  # from OpenTelemetry's variables
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": service}))
        scope, flags, kinds = InstrumentationScope("penstock"), TraceFlags(TraceFlags.SAMPLED), list(SpanKind)
        self._processor = BatchSpanProcessor(_Reporting())

        def context(trace: Trace) -> SpanContext:
            return SpanContext(int(trace.id, 16), int(trace.span, 16), False, flags)

        def put(record: SpanRecord) -> None:
            trace = record.trace
            texts = {k: v[:TEXT_CHARS] for k, v in record.attributes.items() if isinstance(v, str)}
            span = ReadableSpan(
                record.name,
                context(trace),
                parent=context(Trace(trace.id, trace.parent)) if trace.parent else None,
                resource=resource,
                attributes=record.attributes | texts,
                links=[Link(context(link)) for link in record.links],
                kind=kinds[record.kind],
                instrumentation_scope=scope,
                status=Status(StatusCode.ERROR, record.error[:TEXT_CHARS]) if record.error else Status(),
                start_time=int(record.start_s * 1e9),
                end_time=int(record.end_s * 1e9),
            )
            self._processor.on_end(span)

        self.put = put

    def flush(self) -> None:
        self._processor.force_flush()

    def close(self) -> None:
        end = threading.Thread(target=self._processor.shutdown, name="penstock-traces-end", daemon=True)
        try:
            end.start()
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            end.run()
        else:
            end.join(STOP_S)


_sink: _Sink | None = None


# ---- in a worker process


def relay() -> None:
    """Traces in a worker process: its spans leave with its metrics. Its requests are sampled by the server."""
    global tracer

    def emit(record: SpanRecord) -> None:
        metrics.record(SPAN, record.name, 0.0, {}, unit=msgspec.json.encode(record).decode())

    tracer = Tracer(emit)


def relayed(text: str) -> SpanRecord:
    """The span in the `unit` of a metric change of the kind SPAN."""
    return msgspec.json.decode(text, type=SpanRecord)
