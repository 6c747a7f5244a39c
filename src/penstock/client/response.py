"""The response on a client connection, whole or while it arrives, within its limits, and the error in it."""

from __future__ import annotations

import asyncio
import email.utils
import math
from collections import deque
from datetime import UTC, datetime
from typing import Any, Final

import httptools
import msgspec
from msgspec import Struct

from penstock import errors
from penstock.client.endpoint import ConnectionLost, MalformedResponse, ResponseTooLarge
from penstock.serving.protocols.bodies import BLANKS, ERROR_CODE
from penstock.values import printable

HEAD_BYTES: Final = 64 * 1024  # the limit that servers apply to a request head
# Minimal chunked encoding takes 6 bytes for one byte of body; more than this is endless framing.
FRAMING: Final = 8
UNREAD_BYTES: Final = 2**20  # of a stream that its caller does not read; then the socket is not read either


class ResponseBody:
    """The body of a streamed response, as an asynchronous iterator of pieces.

    A piece is a whole chunk of a chunked body, otherwise the bytes of one read. Iteration raises ConnectionLost,
    MalformedResponse and ResponseTooLarge. One reader at a time.
    """

    def __init__(self, url: str, max_piece_bytes: int) -> None:
        self._url = url
        self._max_piece_bytes = max_piece_bytes
        self._pieces: deque[bytes] = deque()
        self._unread_bytes = self._open_bytes = 0
        self._open: list[bytes] = []  # the piece that is arriving
        self._arrival: asyncio.Future[None] | None = None
        self._socket: asyncio.ReadTransport | None = None
        self._paused = False
        self._error: errors.PenstockError | None = None
        self.ended = False

    def attach(self, socket: asyncio.ReadTransport | None) -> None:
        """The socket to pause while too much is unread."""
        self._socket = socket

    def __aiter__(self) -> ResponseBody:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        piece = self._pieces.popleft()
        self._unread_bytes -= len(piece)
        if self._paused and self._unread_bytes <= UNREAD_BYTES and self._socket is not None:
            self._paused = False
            self._socket.resume_reading()
        return piece

    def add(self, data: bytes, *, whole: bool) -> errors.PenstockError | None:
        """Takes a part of a piece; returns the error for a piece that is too large."""
        self._open.append(data)
        self._open_bytes += len(data)
        if self._open_bytes > self._max_piece_bytes:
            return ResponseTooLarge(f"{self._url}: a part exceeds the {self._max_piece_bytes} bytes allowed")
        if whole:
            self.end_piece()
        return None

    def end_piece(self) -> None:
        piece = b"".join(self._open)
        self._open.clear()
        self._open_bytes = 0
        if not piece:
            return
        self._pieces.append(piece)
        self._unread_bytes += len(piece)
        if self._unread_bytes > UNREAD_BYTES and not self._paused and self._socket is not None:
            self._paused = True
            self._socket.pause_reading()
        self._wake()

    def end(self, error: errors.PenstockError | None = None) -> None:
        """Ends the iteration after the pieces that arrived."""
        if not self.ended:
            self.ended, self._error, self._socket = True, error, None
            self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class HttpResponse(Struct, frozen=True):
    """Header names are in lower case; repeated headers are joined by ", ". A streamed response has `parts`, and then
    no `body`."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    parts: ResponseBody | None = None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:500].decode(errors="replace").strip()

    def json(self) -> Any:
        """The body as JSON; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class ResponseReader:
    """Collects one response within its limits; httptools calls the `on_*` methods."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.begin(0)

    def begin(self, max_body_bytes: int, *, stream: bool = False) -> None:
        """Expects another response. `stream`: the body of a 2xx goes to `head.parts`, and each piece of it is
        limited instead of the whole."""
        self._parser = httptools.HttpResponseParser(self)
        self._max_body_bytes = max_body_bytes
        self.received_bytes = self._body_bytes = self._status = 0
        self._head_complete = self._until_eof = False
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._error: errors.PenstockError | None = None
        self._stream = ResponseBody(self._url, max_body_bytes) if stream else None
        self.head: HttpResponse | None = None  # of a stream
        self.response: HttpResponse | None = None
        self.keep_alive = False

    def close(self) -> None:
        del self._parser  # breaks the reference cycle

    def feed(self, data: bytes) -> errors.PenstockError | None:
        """Parses data; `response` is set once it is complete. Returns the error that ends the connection, if any."""
        self.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            return self._error or MalformedResponse(f"{self._url} sent a response that is not HTTP/1.1: {exc}")
        if not self._head_complete and self.received_bytes > HEAD_BYTES:
            return ResponseTooLarge(f"{self._url}: the response head exceeds the {HEAD_BYTES} bytes allowed")
        if self.head is None and self.received_bytes > HEAD_BYTES + FRAMING * self._max_body_bytes:
            self._reject_size()
        return self._error

    def finish_at_eof(self) -> None:
        if self._head_complete and self._until_eof:
            self.on_message_complete()

    def fail(self, error: errors.PenstockError) -> None:
        """Ends a stream with an error."""
        if self.head is not None and self.head.parts is not None:
            self.head.parts.end(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:  # a trailer
            return
        key, text = name.decode("latin-1").lower(), value.rstrip(BLANKS).decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        if self.response is not None:
            return
        self._status = self._parser.get_status_code()
        if self._status < 200:  # interim: the final response follows
            self._headers = {}
            return
        self._head_complete = True
        length = self._headers.get("content-length", "")
        bodiless = self._status in (204, 304)
        self._until_eof = not (length or bodiless or "transfer-encoding" in self._headers)
        if self._stream is not None and self._status < 300:
            self.head = HttpResponse(self._status, self._headers, parts=self._stream)
        elif length.isdecimal() and int(length) > self._max_body_bytes:
            self._reject_size()

    def on_body(self, data: bytes) -> None:
        if self.head is not None:
            assert self._stream is not None
            self._error = self._stream.add(data, whole="transfer-encoding" not in self._headers) or self._error
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._max_body_bytes:
            self._reject_size()
        else:
            self._parts.append(data)

    def on_chunk_complete(self) -> None:
        if self.head is not None and self._error is None:
            assert self._stream is not None
            self._stream.end_piece()

    def on_message_complete(self) -> None:
        if self._head_complete and self._error is None and self.response is None:
            self.keep_alive = not self._until_eof and self._parser.should_keep_alive()
            self.response = self.head or HttpResponse(self._status, self._headers, b"".join(self._parts))
            if self.head is not None and self._stream is not None:
                self._stream.end()

    def _reject_size(self) -> None:
        self._parts = []
        self._error = ResponseTooLarge(f"{self._url}: the response exceeds the {self._max_body_bytes} bytes allowed")


TEXT_BYTES: Final = 2000  # of the server's own text in an error message
LINE_BYTES: Final = 500
MAX_PAUSE_S: Final = 300.0  # whatever Retry-After says: a server that recovers is not left idle for long

_BY_STATUS: Final[dict[int, type[errors.PenstockError]]] = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.ModelNotFound,
    405: errors.NotSupported,
    408: errors.DeadlineExceeded,
    409: errors.Conflict,
    410: errors.SequenceLost,
    413: errors.PayloadTooLarge,
    415: errors.UnsupportedType,
    429: errors.QueueFull,
    499: errors.Cancelled,
    500: errors.ItemFailed,
    501: errors.NotSupported,
    502: ConnectionLost,  # from a gateway: its server is down, or went down with the request
    503: errors.ModelNotReady,
    504: errors.DeadlineExceeded,
    507: errors.OutOfMemory,  # TorchServe's status
}
_BY_CODE: Final = {
    "not_found": errors.NotSupported,  # a route that the server lacks
    "InternalServerException": errors.ItemFailed,  # TorchServe's status for a handler that raises is 503
}


class UnexpectedResponse(errors.PenstockError, code="unexpected_answer"):
    """The response has a status or a body that the request cannot lead to, such as a redirect."""


def check(response: HttpResponse, url: str) -> None:
    """Returns for a 2xx; otherwise raises the error with the server's message, `status` and `retry_after_s`."""
    if not 200 <= response.status < 300:
        raise error_of(response, url)


def error_of(response: HttpResponse, url: str) -> errors.PenstockError:
    """The error that a response describes."""
    status = response.status
    code, text = read_error(response.body)
    error = named_error(response.headers.get(ERROR_CODE) or code, text, status)
    if status < 400:
        error = UnexpectedResponse(f"{url} answered {status}, expected 200; redirects are not followed")
    elif error is None:
        kind = _BY_STATUS.get(status) or (errors.BadRequest if status < 500 else errors.ItemFailed)
        error = kind(f"{url} answered {status}: {text}")
    error.status = status
    error.retry_after_s = retry_after_s(response.headers.get("retry-after", ""))
    return error


def named_error(code: str, text: str, status: int = 0) -> errors.PenstockError | None:
    """The error with one of our codes; None for other codes."""
    if code in _BY_CODE:
        return _BY_CODE[code](text)
    error = errors.from_code(code, text)
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
    return " ".join(printable(text[:LINE_BYTES]).split()) or "(no text)"


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
