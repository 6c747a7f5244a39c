"""One request and its answer on a connection: the sink of an Item, written out in order and in HTTP's framing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.core.contracts import Ticket
from penstock.errors import PenstockError
from penstock.serving.http.answers import REASONS, error_result, sse_event, stream_part, stream_type
from penstock.serving.http.template import error_body_of
from penstock.types import Headers, ItemResult

if TYPE_CHECKING:
    from penstock.serving.http.answering import Answering
    from penstock.serving.http.server import HttpServer
    from penstock.serving.http.template import Route

JOINED_BYTES: Final = 16 * 1024  # below it head and body are joined and leave in one write
NO_BODY: Final = frozenset({204, 304})


def status_line(status: int, reason: str | None = None) -> bytes:
    """`HTTP/1.1 200 OK` and the end of the line."""
    reason = REASONS.get(status, "Unknown") if reason is None else reason
    return f"HTTP/1.1 {status} {reason}\r\n".encode("latin-1")


class Exchange:
    """What is particular to one request. The defaults are the plain case: HTTP/1.1, kept alive, nothing special."""

    route: Route | None = None
    method: bytes = b"POST"  # these two are set unless the route was known by them
    target: bytes = b""
    headers: Headers
    content_type: str = ""
    codec: str = ""  # another than that of the route
    key: bytes = b""  # of a request that may come again
    payload: Any = b""
    budget_s: float | None = None
    priority: int = 0
    request_id: str = ""
    error: PenstockError | None = None  # the request was refused before it was submitted
    ticket: Ticket | None = None

    plain = True  # nothing below is set: the answer is a pre-rendered head, a length and the body
    old = False  # HTTP/1.0
    head_only = False
    sse = False
    close = False  # the connection ends with this answer
    linger = False  # ... while the client may still be sending
    started = False  # the head of a stream is out
    broken = False  # the stream ended early: the client must see that it is not whole
    done = False
    kept = 0  # bytes in `out`
    out: list[Any] | None = None  # kept back: an earlier request of the connection is not answered yet

    def __init__(self, connection: Answering) -> None:
        self.connection: Answering | None = connection

    def on_result(self, result: ItemResult) -> None:
        """The sink. Quiet after the final result, and after the client has gone."""
        connection = self.connection
        if connection is None:
            return
        if not (self.plain and result.final and result.status == 200) or result.error is not None or result.headers:
            self._general(connection, result)
            return
        self.connection = None
        body = result.body
        server = connection.server
        server.plain_answers += 1
        head = self.plain_head(server, result)
        if len(body) <= JOINED_BYTES:
            data = b"%b%d\r\n\r\n%b" % (head, len(body), body)
            if connection.inflight[0] is self:
                connection.finish(data)
                return
            self._emit(connection, data)
        else:
            self._emit(connection, b"%b%d\r\n\r\n" % (head, len(body)))
            self._emit(connection, body)
        self._end(connection)

    # ---- what a dialect may say otherwise

    def plain_head(self, server: HttpServer, result: ItemResult) -> bytes:
        """The head of a plain answer up to the number of the content's length."""
        return server.heads.get(result.content_type) or server.learn_head(result.content_type)

    def head_lines(self, server: HttpServer, result: ItemResult, content_type: str) -> list[bytes]:
        """The status line and the headers of any answer, but for its framing."""
        lines = [status_line(result.status, result.reason), server.date_line]
        if content_type:
            lines.append(f"content-type: {content_type}\r\n".encode("latin-1"))
        lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in result.headers or ()]
        if self.request_id:
            lines.append(b"x-request-id: " + self.request_id.encode() + b"\r\n")
        if self.close:
            lines.append(b"connection: close\r\n")
        elif self.old:
            lines.append(b"connection: keep-alive\r\n")
        return lines

    def failure(self, server: HttpServer, error: PenstockError) -> ItemResult:
        """The whole answer for an error."""
        return error_result(error, self._error_body)

    def part_type(self, result: ItemResult) -> str:
        """Content type of a stream that begins with this part."""
        return stream_type(result.content_type, self.sse)

    def part_data(self, result: ItemResult) -> bytes:
        """A part as it stands in the stream."""
        return stream_part(result, self.sse)

    # ---- the framing

    @property
    def _error_body(self) -> Callable[[PenstockError], bytes]:
        return error_body_of(self.route, self.target)

    def _general(self, connection: Answering, result: ItemResult) -> None:
        """Errors, streams, own headers, HTTP/1.0, HEAD: whatever is not the plain case."""
        if result.final:
            self.connection = None
        if result.error is not None:
            self._fail(connection, result.error)
        elif self.started or self.sse or not result.final:
            self._part(connection, result)
        else:
            self._whole(connection, result)

    def fail(self, error: PenstockError) -> None:
        """Answers a request that no model will answer."""
        self.on_result(ItemResult(error=error))

    def _fail(self, connection: Answering, error: PenstockError) -> None:
        if not self.started:
            self._whole(connection, self.failure(connection.server, error))
            return
        if self.sse:
            self._chunk(connection, sse_event(self._error_body(error), b"error"))
            self._finish_stream(connection)
            return
        self.close = self.broken = True  # the last chunk is missing: the client sees that the answer is not whole
        self._end(connection)

    def _whole(self, connection: Answering, result: ItemResult) -> None:
        body = result.body
        bodiless = result.status in NO_BODY
        framing = None if bodiless else b"content-length: %d\r\n" % len(body)
        head = self._head(connection, result, result.content_type, framing)
        if bodiless or self.head_only or not len(body):
            self._emit(connection, head)
        elif len(body) <= JOINED_BYTES:
            self._emit(connection, b"%b%b" % (head, body))
        else:
            self._emit(connection, head)
            self._emit(connection, body)
        self._end(connection)

    def _part(self, connection: Answering, result: ItemResult) -> None:
        if not self.started:
            self.started = True
            self.plain = False
            if self.old:
                self.close = True  # HTTP/1.0 knows no chunks: the end of the connection is the end of the stream
            bodiless = result.status in NO_BODY
            framing = None if self.old or bodiless else b"transfer-encoding: chunked\r\n"
            self.head_only = self.head_only or bodiless
            self._emit(connection, self._head(connection, result, self.part_type(result), framing))
        self._chunk(connection, self.part_data(result))
        if result.final:
            self._finish_stream(connection)

    def _chunk(self, connection: Answering, data: bytes) -> None:
        if data and not self.head_only:
            self._emit(connection, data if self.old else b"%x\r\n%b\r\n" % (len(data), data))
            connection.check_unsent()

    def _finish_stream(self, connection: Answering) -> None:
        if not (self.old or self.head_only):
            self._emit(connection, b"0\r\n\r\n")
        self._end(connection)

    def _head(self, connection: Answering, result: ItemResult, content_type: str, framing: bytes | None) -> bytes:
        connection.server.other_answers[result.status // 100] += 1
        if result.status in NO_BODY:
            content_type = ""
        lines = self.head_lines(connection.server, result, content_type)
        if framing is not None:
            lines.append(framing)
        lines.append(b"\r\n")
        return b"".join(lines)

    def _emit(self, connection: Answering, data: Any) -> None:
        """Writes, or keeps the bytes back until every earlier request of the connection is answered."""
        if connection.inflight[0] is self:
            connection.write(data)
        else:
            self.kept += len(data)
            connection.kept += len(data)
            self.out = self.out or []
            self.out.append(data)

    def _end(self, connection: Answering) -> None:
        self.done = True
        self.connection = None
        if connection.inflight[0] is self:
            connection.advance()
