"""Collector: receives spans over OTLP/HTTP, as a collector of OpenTelemetry does."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received(NamedTuple):
    """A span. `links` are (trace, span) pairs; ids are in hex, `parent` is "" without one."""

    name: str
    trace: str
    span: str
    parent: str
    links: list[tuple[str, str]]
    attributes: dict[str, Any]
    start_s: float
    end_s: float
    error: str


def linked(spans: list[Received], request: Received) -> Received:
    """The batch of a request: linked to its run, and its run to the batch."""
    (batch,) = (s for s in spans if s.name.startswith("batch ") and (request.trace, request.span) in s.links)
    (run,) = (s for s in spans if s.name == "run" and s.parent == request.span)
    assert run.links == [(batch.trace, batch.span)]
    return batch


class Collector:
    """Answers each export with `status`, `delay_s` later. A context manager."""

    def __init__(self, status: int = 200, delay_s: float = 0.0) -> None:
        self.spans: list[Received] = []
        self.requests = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.requests += 1
                time.sleep(delay_s)
                if status == 200:
                    collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Collector:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _spans(request: Any) -> list[Received]:
    return [
        Received(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
            span.start_time_unix_nano / 1e9,
            span.end_time_unix_nano / 1e9,
            span.status.message,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
