"""Errors in responses: the class for a status or a code, whichever protocol the server speaks."""

from __future__ import annotations

import email.utils
import math
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from penstock.client.endpoint import ConnectionLost
from penstock.client.response import HttpResponse
from penstock.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ItemFailed,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
    OutOfMemory,
    PayloadTooLarge,
    PenstockError,
    QueueFull,
    SequenceLost,
    Unauthorized,
    UnsupportedType,
    from_code,
)
from penstock.serving.protocols.bodies import ERROR_CODE

TEXT_BYTES: Final = 2000  # of the server's own text in an error message
LINE_BYTES: Final = 500
MAX_PAUSE_S: Final = 300.0  # whatever Retry-After says: a server that recovers is not left idle for long

_BY_STATUS: Final[dict[int, type[PenstockError]]] = {
    401: Unauthorized,
    403: Forbidden,
    404: ModelNotFound,
    405: NotSupported,
    408: DeadlineExceeded,
    409: Conflict,
    410: SequenceLost,
    413: PayloadTooLarge,
    415: UnsupportedType,
    429: QueueFull,
    499: Cancelled,
    500: ItemFailed,
    501: NotSupported,
    502: ConnectionLost,  # from a gateway: its server is down, or went down with the request
    503: ModelNotReady,
    504: DeadlineExceeded,
    507: OutOfMemory,  # TorchServe's status
}
_BY_CODE: Final = {
    "not_found": NotSupported,  # a route that the server lacks
    "InternalServerException": ItemFailed,  # TorchServe's status for a handler that raises is 503
}


class UnexpectedResponse(PenstockError):
    """The response has a status or a body that the request cannot lead to, such as a redirect."""

    code = "unexpected_answer"


def check(response: HttpResponse, url: str) -> None:
    """Returns for a 2xx; otherwise raises the error with the server's message, `status` and `retry_after_s`."""
    if not 200 <= response.status < 300:
        raise error_of(response, url)


def error_of(response: HttpResponse, url: str) -> PenstockError:
    """The error that a response describes."""
    status = response.status
    code, text = read_error(response.body)
    error = named_error(response.headers.get(ERROR_CODE) or code, text, status)
    if status < 400:
        error = UnexpectedResponse(f"{url} answered {status}, expected 200; redirects are not followed")
    elif error is None:
        kind = _BY_STATUS.get(status) or (BadRequest if status < 500 else ItemFailed)
        error = kind(f"{url} answered {status}: {text}")
    error.status = status
    error.retry_after_s = retry_after_s(response.headers.get("retry-after", ""))
    return error


def named_error(code: str, text: str, status: int = 0) -> PenstockError | None:
    """The error with one of our codes; None for other codes."""
    if code in _BY_CODE:
        return _BY_CODE[code](text)
    error = from_code(code, text)
    return error if error.code == code and (code != "internal" or status == 500) else None


def read_error(body: bytes) -> tuple[str, str]:
    """(code, message) of an error body: `{"error": {"code", "message"}}`, `{"error": "..."}` or TorchServe's
    `{"code", "type", "message"}`."""
    found: Any = None
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    if isinstance(found, dict):
        inner = found.get("error", found)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            code = inner.get("code")
            return code if isinstance(code, str) else str(inner.get("type", "")), inner["message"][:TEXT_BYTES]
        if isinstance(inner, str):
            return "", inner[:TEXT_BYTES]
    return "", one_line(body[:LINE_BYTES].decode("utf-8", "replace"))


def one_line(text: str) -> str:
    """The beginning of a text, as a line that a log can hold."""
    line = "".join(c if c.isprintable() else " " for c in text[:LINE_BYTES])
    return " ".join(line.split()) or "(no text)"


def retry_after_s(value: str) -> float | None:
    """The seconds of a Retry-After header in either form; None if it is empty or invalid."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(value)
        except (ValueError, TypeError, OverflowError):
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), MAX_PAUSE_S) if math.isfinite(seconds) else None
