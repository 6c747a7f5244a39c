"""What goes out: the one table from errors to HTTP status, and the framing of whole and streamed responses."""

from __future__ import annotations

import logging
import math
import re
from binascii import b2a_base64
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

from msgspec.structs import replace

from penstock import errors
from penstock.core.contracts import Ticket
from penstock.serving.protocols import oip_routes
from penstock.serving.protocols.bodies import BASE64, ERROR_CODE, JSON, PART_TYPE, UnsupportedCoding
from penstock.serving.protocols.route import Route
from penstock.serving.protocols.routes import error_body_of
from penstock.types import ItemResult, Trace

log = logging.getLogger("penstock.serving")

MAX_CAUSE: Final = 500  # characters
SSE: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
JOINED_BYTES: Final = 16 * 1024  # below it head and body are joined and leave in one write
UNBUFFERED: Final = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))  # nginx holds streams back otherwise
HEARTBEAT_S = 15.0  # of silence between events: proxies drop a connection after 60 s, some after 30
NO_BODY: Final = frozenset({204, 304})
_TEXT: Final = re.compile("^(text/|$)|json|xml|javascript")


class RouteNotFound(errors.PenstockError, code="not_found"):
    """No route has this path."""


class MethodNotAllowed(errors.PenstockError, code="method_not_allowed"):
    """The route has other methods."""

    allow = "GET, HEAD"  # the value of the Allow header

    @classmethod
    def only(cls, *methods: str) -> MethodNotAllowed:
        """The error of a route that takes these methods."""
        error = cls(f"this route takes {' and '.join(methods)} only")
        error.allow = ", ".join(methods)
        return error


class MalformedHttp(errors.BadRequest):
    """What came is no HTTP."""


class KeyReused(errors.BadRequest, code="idempotency_key_reused"):
    """An Idempotency-Key came with another request than before."""


class RequestTimeout(errors.PenstockError, code="request_timeout"):
    """The head or the body did not arrive in time."""


class ExpectationFailed(errors.PenstockError, code="expectation_failed"):
    """An Expect header other than 100-continue."""


class HeadTooLarge(errors.PenstockError, code="head_too_large"):
    """The head is larger than `limits.max_header_bytes`."""


class ListenerFull(errors.PenstockError, code="listener_full", retryable=True):
    """The clients of the listener occupy `limits.max_transit_bytes`."""


class NotImplementedHere(errors.PenstockError, code="not_implemented"):
    """A transfer coding other than chunked."""


STATUS: Final[dict[type[errors.PenstockError], int]] = {
    errors.BadRequest: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.ModelNotFound: 404,
    errors.RegionNotFound: 404,
    RouteNotFound: 404,
    errors.SequenceNotFound: 404,
    MethodNotAllowed: 405,
    RequestTimeout: 408,
    errors.Conflict: 409,
    errors.SequenceLost: 410,
    errors.PayloadTooLarge: 413,
    errors.UnsupportedType: 415,
    ExpectationFailed: 417,
    KeyReused: 422,
    errors.Quarantined: 422,
    errors.QueueFull: 429,
    HeadTooLarge: 431,
    errors.Cancelled: 499,
    errors.PenstockError: 500,  # ItemFailed, OutOfMemory, BadOutput and whatever has no line of its own
    NotImplementedHere: 501,
    errors.NotSupported: 501,
    ListenerFull: 503,
    errors.ModelNotReady: 503,
    errors.QueueTimeout: 503,  # as in Triton: the caller may still want the answer, so another replica may give it
    errors.WorkerDied: 503,
    errors.RunTimeout: 504,
    errors.DeadlineExceeded: 504,
}
REASONS: Final = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}


def status_line(status: int, reason: str | None = None) -> bytes:
    """`HTTP/1.1 200 OK` and the end of the line."""
    reason = REASONS.get(status, "Unknown") if reason is None else reason
    return f"HTTP/1.1 {status} {reason}\r\n".encode("latin-1")


# to a connection above limits.max_connections
TOO_MANY: Final = status_line(503) + b"retry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def status_of(error: errors.PenstockError, open_inference: bool = False) -> int:
    """The HTTP status of an error, from its nearest ancestor in the table."""
    if open_inference and isinstance(error, (errors.SequenceNotFound, errors.SequenceLost)):
        return 400  # as in Triton, whose clients take 404 for an unknown model
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def error_result(error: errors.PenstockError, error_body: Callable[[errors.PenstockError], bytes]) -> ItemResult:
    """The whole response for an error, with the headers of its status."""
    status = status_of(error, error_body is oip_routes.error_body)
    headers = [(ERROR_CODE, error.code)]
    if status in (429, 503):
        headers.append(("retry-after", str(max(1, math.ceil(error.retry_after_s or 1.0)))))
    elif status == 401:
        headers.append(("www-authenticate", "Bearer"))
    elif isinstance(error, UnsupportedCoding):  # and on no other 415 (RFC 9110, section 12.5.3)
        headers.append(("accept-encoding", "gzip, deflate"))
    elif isinstance(error, MethodNotAllowed):
        headers.append(("allow", error.allow))
    return ItemResult(body=error_body(error), content_type=JSON, status=status, headers=headers)


def log_failure(
    where: tuple[str, str | None], request_id: str, status: int, error: errors.PenstockError, trace: Trace | None = None
) -> None:
    """The line of a request that the server could not serve; `where` is model ("" for a management route) and version.

    The last line of an error's detail is the message of the model's exception, which clients do not receive.
    """
    model, version = where
    last = error.detail.strip().rpartition("\n")[2] if error.detail else ""
    cause = f"{error.message}: {last}" if last and last not in error.message else error.message
    log.log(
        logging.ERROR if status == 500 else logging.WARNING,
        "event=request_failed model=%s version=%s status=%d cause=%r",
        *(model, version or "default", status, cause[:MAX_CAUSE]),
        extra={"request_id": request_id} | ({} if trace is None else {"trace_id": trace.id, "span_id": trace.span}),
    )


def stream_type(content_type: str, sse: bool) -> str:
    """Content type of a stream: server-sent events, lines of JSON, or what its first part is."""
    if sse:
        return content_type if content_type.startswith(SSE) else SSE
    return LINES if content_type == JSON else content_type


def stream_start(result: ItemResult, sse: bool) -> ItemResult:
    """The first part of a stream, with the headers of the stream."""
    if not (sse and result.content_type) or result.content_type.startswith(SSE):
        return result
    kind = result.content_type if _is_text(result.content_type, bytes(result.body)) else f"{result.content_type};base64"
    return replace(result, headers=[*(result.headers or ()), (PART_TYPE, kind)])


def stream_part(result: ItemResult, sse: bool) -> bytes:
    """The bytes of one part of a stream; empty for the empty part that ends it."""
    body = bytes(result.body)
    if not body or result.content_type.startswith(SSE):  # it is a whole event already
        return body
    if sse:
        text = _is_text(result.content_type, body)
        return sse_event(body) if text else sse_event(b2a_base64(body, newline=False), BASE64)
    return body + b"\n" if result.content_type == JSON else body


def _is_text(content_type: str, body: bytes) -> bool:
    """Whether an event can hold the body: events are UTF-8. The type decides first, so that the parts of a sound file
    are not text now and then."""
    if content_type == JSON:
        return True  # JSON of a codec is always UTF-8
    try:
        return _TEXT.search(content_type.lower()) is not None and body.decode() is not None
    except UnicodeDecodeError:
        return False


def sse_event(body: bytes, event: bytes = b"") -> bytes:
    """A server-sent event; every line of the body is a `data:` line."""
    lines = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    head = b"event: " + event + b"\n" if event else b""
    return head + b"data: " + lines + b"\n\n"


def error_event(route: Route | None, body: bytes) -> bytes:
    """The event of an error inside a stream; Triton gives it no name."""
    return sse_event(body, b"" if route is not None and route.template.own_events else b"error")


# ---- the response to a request


class RequestOptions:
    """What the head of a request states. The defaults are the plain case, without special headers."""

    route: Route | None = None
    target: bytes = b""  # set only if the route was not cached
    content_type: str = ""
    codec: str = ""  # overrides the codec of the route
    head_bytes: int = 0  # where the values of a body begin, if a header says it
    coding: str = ""  # of the body, until it is unpacked
    key: bytes = b""  # of a request with an Idempotency-Key
    budget_s: float | None = None
    priority: int = 0
    request_id: str = ""
    traceparent: str = ""
    trace: Trace | None = None  # its span, if it is traced
    sse = False
    cors: bytes = b""  # header lines for the web page that sent the request
    plain = True  # no option asks for more than a cached head, a length and the body
    ticket: Ticket | None = None


class ResponseOutput(Protocol):
    """The writer of a connection, as the framing of responses sees it."""

    listener: Any  # a Listener; modules do not import each other in a circle
    flavor: Any

    def check_unsent(self) -> None:
        """Drops the reader of a stream that falls too far behind."""


class ResponseFraming(RequestOptions):
    """Writes any response to a request: errors, streams, extra headers, HTTP/1.0 and HEAD.

    The fields are set only if `plain` is not. `_emit` and `_end` belong to the connection.
    """

    old = False  # HTTP/1.0
    head_only = False
    close = False  # the connection closes after this response
    linger = False  # ... while the client may still be sending
    started = False  # the head of a stream was sent
    broken = False  # the stream ended early: the client must see that it is incomplete
    done = False
    kept = 0  # bytes in `out`
    lines = False  # the stream is lines of JSON
    silent_s = 0.0  # since the last part of a stream, as far as the sweeps of the clock know
    out: list[Any] | None = None  # held back until the earlier requests of the connection are answered
    writer: Any  # until the response is final

    def on_result(self, result: ItemResult) -> None:
        """The sink."""
        raise NotImplementedError

    def _emit(self, writer: Any, data: Any) -> None:
        raise NotImplementedError

    def _end(self, writer: Any) -> None:
        raise NotImplementedError

    # ---- what an API flavor may override

    def head_lines(self, writer: ResponseOutput, result: ItemResult, content_type: str) -> list[bytes]:
        """The status line and the headers of any response, without its framing."""
        lines = [status_line(result.status, result.reason), writer.listener.clock.date_line]
        if content_type:
            lines.append(f"content-type: {content_type}\r\n".encode("latin-1"))
        lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in result.headers or ()]
        if self.request_id:
            lines.append(b"x-request-id: " + self.request_id.encode() + b"\r\n")
        lines.append(self.cors)
        if self.close:
            lines.append(b"connection: close\r\n")
        elif self.old:
            lines.append(b"connection: keep-alive\r\n")
        return lines

    def failure(self, writer: ResponseOutput, error: errors.PenstockError) -> ItemResult:
        """The whole response for an error."""
        return error_result(error, self._error_body)

    def part_type(self, result: ItemResult) -> str:
        """The content type of a stream that begins with this part."""
        return stream_type(result.content_type, self.sse)

    def part_data(self, result: ItemResult) -> bytes:
        """One part as bytes of the stream."""
        return stream_part(result, self.sse)

    # ---- the framing

    @property
    def _error_body(self) -> Callable[[errors.PenstockError], bytes]:
        return error_body_of(self.route, self.target)

    def _general(self, writer: ResponseOutput, result: ItemResult) -> None:
        """Handles errors, streams, extra headers, HTTP/1.0 and HEAD."""
        if result.final:
            self.writer = None
        if result.error is not None:
            self._fail(writer, result.error)
        elif self.started or self.sse or not result.final:
            self._part(writer, result)
        else:
            if result.status >= 500:
                self._log(result.status, errors.PenstockError("the model's answer has this status"))
            self._whole(writer, result)

    def _log(self, status: int, error: errors.PenstockError) -> None:
        """Logs a 5xx, except of a health check, whose job is to report it."""
        route = self.route
        if status >= 500 and route is not None and not self._answers_at_once:
            log_failure((route.model, route.version), self.request_id, status, error, self.trace)

    @property
    def _answers_at_once(self) -> bool:
        """Whether the route needs no model, like a health check."""
        return self.route is not None and self.route.template.answer is not None

    def fail(self, error: errors.PenstockError) -> None:
        """Answers with an error, without a model."""
        self.on_result(ItemResult(error=error))

    def _fail(self, writer: ResponseOutput, error: errors.PenstockError) -> None:
        writer.listener.count_error(error.code)
        if not self.started:
            result = self.failure(writer, error)
            self._log(result.status, error)
            self._whole(writer, result)
            return
        self._log(status_of(error), error)
        if self.sse:
            self._chunk(writer, error_event(self.route, self._error_body(error)))
            self._finish_stream(writer)
            return
        if self.lines:
            self._chunk(writer, self._error_body(error) + b"\n")
        self.close = True
        self.broken = not (self.lines and self.old)  # a reset would take the line with it
        # without the last chunk the client sees that the response is incomplete
        self._end(writer)

    def _whole(self, writer: ResponseOutput, result: ItemResult) -> None:
        body = result.body
        bodiless = result.status in NO_BODY
        framing = None if bodiless else b"content-length: %d\r\n" % len(body)
        head = self._head(writer, result, result.content_type, framing)
        if bodiless or self.head_only or not len(body):
            self._emit(writer, head)
        elif len(body) <= JOINED_BYTES:
            self._emit(writer, b"%b%b" % (head, body))
        else:
            self._emit(writer, head)
            self._emit(writer, body)
        self._end(writer)

    def _part(self, writer: ResponseOutput, result: ItemResult) -> None:
        if not self.started:
            self.started = True
            self.plain = False
            self.sse = self.sse or result.content_type.startswith(SSE)
            if self.old:
                self.close = True  # HTTP/1.0 has no chunks: the connection's end marks the end of the stream
            bodiless = result.status in NO_BODY
            framing = None if self.old or bodiless else b"transfer-encoding: chunked\r\n"
            self.head_only = self.head_only or bodiless
            result = stream_start(result, self.sse)
            own = {name.lower() for name, _ in result.headers or ()}
            new = [(name, value) for name, value in UNBUFFERED if name not in own]
            result = replace(result, headers=[*(result.headers or ()), *new])
            kind = self.part_type(result)
            self.lines = kind == LINES
            self._emit(writer, self._head(writer, result, kind, framing))
        self._chunk(writer, self.part_data(result))
        if result.final:
            self._finish_stream(writer)

    def keep_alive(self, writer: ResponseOutput, more_s: float) -> None:
        """Sends a comment in a stream of events that has been silent; `more_s` have passed since the last call."""
        self.silent_s += more_s
        if self.silent_s >= HEARTBEAT_S and self.sse and self.started:
            self._chunk(writer, b": \n\n")

    def _chunk(self, writer: ResponseOutput, data: bytes) -> None:
        self.silent_s = 0.0
        if data and not self.head_only:
            self._emit(writer, data if self.old else b"%x\r\n%b\r\n" % (len(data), data))
            writer.check_unsent()

    def _finish_stream(self, writer: ResponseOutput) -> None:
        if not (self.old or self.head_only):
            self._emit(writer, b"0\r\n\r\n")
        self._end(writer)

    def _head(self, writer: ResponseOutput, result: ItemResult, content_type: str, framing: bytes | None) -> bytes:
        # 0: a health check that says "not ready", which is its job and no error
        writer.listener.counts.other[0 if result.status >= 500 and self._answers_at_once else result.status // 100] += 1
        if result.status in NO_BODY:
            content_type = ""
        lines = self.head_lines(writer, result, content_type)
        if framing is not None:
            lines.append(framing)
        lines.append(b"\r\n")
        return b"".join(lines)
