"""What goes out: the one table from errors to HTTP status, and the framing of parts of a stream. Pure."""

from __future__ import annotations

import logging
import math
import re
from binascii import b2a_base64
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from msgspec.structs import replace

from penstock.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
    PayloadTooLarge,
    PenstockError,
    Quarantined,
    QueueFull,
    RunTimeout,
    SequenceLost,
    SequenceNotFound,
    Unauthorized,
    UnsupportedType,
    WorkerDied,
)
from penstock.serving.protocols.bodies import BASE64, ERROR_CODE, JSON, PART_TYPE, UnsupportedCoding
from penstock.types import ItemResult

log = logging.getLogger("penstock.frontends")

MAX_CAUSE: Final = 500  # characters
SSE: Final = "text/event-stream"
_TEXT: Final = re.compile("^(text/|$)|json|xml|javascript")


class RouteNotFound(PenstockError):
    """No route has this path."""

    code = "not_found"


class MethodNotAllowed(PenstockError):
    """The route has other methods."""

    code = "method_not_allowed"
    allow = "GET, HEAD"  # the value of the Allow header

    @classmethod
    def only(cls, *methods: str) -> MethodNotAllowed:
        """The error of a route that takes these methods."""
        error = cls(f"this route takes {' and '.join(methods)} only")
        error.allow = ", ".join(methods)
        return error


class MalformedHttp(BadRequest):
    """What came is no HTTP."""


class KeyReused(BadRequest):
    """An Idempotency-Key came with another request than before."""

    code = "idempotency_key_reused"


class RequestTimeout(PenstockError):
    """The head or the body did not arrive in time."""

    code = "request_timeout"


class ExpectationFailed(PenstockError):
    """An Expect header other than 100-continue."""

    code = "expectation_failed"


class HeadTooLarge(PenstockError):
    """The head is larger than `limits.max_header_bytes`."""

    code = "head_too_large"


class ListenerFull(PenstockError):
    """The clients of the listener occupy `limits.max_transit_bytes`."""

    code = "listener_full"
    retryable = True


class NotImplementedHere(PenstockError):
    """A transfer coding other than chunked."""

    code = "not_implemented"


STATUS: Final[dict[type[PenstockError], int]] = {
    BadRequest: 400,
    Unauthorized: 401,
    Forbidden: 403,
    ModelNotFound: 404,
    RouteNotFound: 404,
    SequenceNotFound: 404,
    MethodNotAllowed: 405,
    RequestTimeout: 408,
    Conflict: 409,
    SequenceLost: 410,
    PayloadTooLarge: 413,
    UnsupportedType: 415,
    ExpectationFailed: 417,
    KeyReused: 422,
    Quarantined: 422,
    QueueFull: 429,
    HeadTooLarge: 431,
    Cancelled: 499,
    PenstockError: 500,  # ItemFailed, OutOfMemory, BadOutput and whatever has no line of its own
    NotImplementedHere: 501,
    NotSupported: 501,
    ListenerFull: 503,
    ModelNotReady: 503,
    WorkerDied: 503,
    RunTimeout: 504,
    DeadlineExceeded: 504,
}
REASONS: Final = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}


def status_line(status: int, reason: str | None = None) -> bytes:
    """`HTTP/1.1 200 OK` and the end of the line."""
    reason = REASONS.get(status, "Unknown") if reason is None else reason
    return f"HTTP/1.1 {status} {reason}\r\n".encode("latin-1")


def status_of(error: PenstockError) -> int:
    """The HTTP status of an error, from its nearest ancestor in the table."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def error_result(error: PenstockError, error_body: Callable[[PenstockError], bytes]) -> ItemResult:
    """The whole answer for an error, with the headers that belong to its status."""
    status = status_of(error)
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


def log_failure(where: tuple[str, str | None], request_id: str, status: int, error: PenstockError) -> None:
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
        extra={"request_id": request_id},
    )


def stream_type(content_type: str, sse: bool) -> str:
    """Content type of a stream: server-sent events, lines of JSON, or what its first part is."""
    if sse:
        return SSE
    return "application/x-ndjson" if content_type == JSON else content_type


def stream_start(result: ItemResult, sse: bool) -> ItemResult:
    """The first part of a stream, with the headers of the stream."""
    if not (sse and result.content_type) or result.content_type == SSE:
        return result
    kind = result.content_type if _is_text(result.content_type, bytes(result.body)) else f"{result.content_type};base64"
    return replace(result, headers=[*(result.headers or ()), (PART_TYPE, kind)])


def stream_part(result: ItemResult, sse: bool) -> bytes:
    """One part as it stands in the stream; empty for the empty part that only ends one."""
    body = bytes(result.body)
    if not body or result.content_type == SSE:  # it is a whole event already
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
