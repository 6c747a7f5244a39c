"""One connection of the inference listener: httptools in, Items out, answers in order, everything bounded."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, cast

import httptools

from penstock.errors import PayloadTooLarge, PenstockError
from penstock.serving.http.answering import BODY, DIRECT, DISCARD, HEAD, IDLE, INF, STALLED, Answering
from penstock.serving.http.answers import HeadTooLarge, MalformedHttp, RequestTimeout
from penstock.serving.http.exchange import Exchange
from penstock.serving.http.intake import BIG_BYTES, Intake
from penstock.serving.http.routes import SPECIAL_NAMES, is_telling
from penstock.serving.http.template import Route
from penstock.types import Headers

if TYPE_CHECKING:
    from penstock.serving.http.server import HttpServer

log = logging.getLogger("penstock.frontends")

# reasons why the socket is not read (beside those of the answers)
POOL: Final = 4

LENGTH, TYPE, SPECIAL = 1, 2, 3
_kinds: dict[bytes, int] = {}  # every spelling of a header name that came by, so that most need no lower()


def _learn(name: bytes) -> int:
    known = name.lower()
    kind = {b"content-length": LENGTH, b"content-type": TYPE}.get(known, SPECIAL if known in SPECIAL_NAMES else 0)
    if len(_kinds) < 1024 and len(name) <= 64:
        _kinds[name] = kind
    return kind


class _Stop(Exception):
    """Ends the parser's run: the rest of what was read is not looked at."""


class Connection(Answering):
    """Called by the event loop, by the parser (`on_*`), by the server's sweep and by exchanges."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        self.url = b""
        self.exchange: Exchange | None = None  # its body is being received
        self.intake = Intake(server.backend, server.config.max_body_bytes)
        self.read_bytes = 0  # of this read
        self.head_bytes = 0  # of earlier reads that belong to the head
        self.quiet_bytes = 0  # of a chunked body since its last byte of data
        self.parser = httptools.HttpRequestParser(self)

    # ---- the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses at once when there are too many."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self.server.config.write_buffer_bytes)
        if not self.server.add(self):
            self.transport.write(self.server.dialect.too_many())
            self.phase = DISCARD
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: what waits is not run, what runs is not answered."""
        self.server.remove(self)
        self.phase = DISCARD
        self.intake.release()
        del self.parser  # it knows the connection: a server that collects garbage rarely must not make any
        self.exchange = None
        for exchange in self.inflight:
            exchange.connection = None
            if exchange.ticket is not None and not exchange.done:
                exchange.ticket.cancel()
        for exchange in self.backlog:
            if not isinstance(exchange.payload, bytes):
                exchange.payload.release()
        self.inflight.clear()
        self.backlog.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The rest of the slab for a large body, else the memory that all connections share."""
        if self.phase == DIRECT:
            return self.intake.rest()
        return self.server.receive

    def buffer_updated(self, nbytes: int) -> None:
        """Hands what was read to the parser, or counts it when it is already where it belongs."""
        if self.phase >= DIRECT:
            if self.phase == DIRECT and self.intake.filled_to(nbytes):
                self.parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
                self.on_message_complete()
            return
        self.read_bytes = nbytes
        try:
            self.parser.feed_data(self.server.receive[:nbytes])
        except httptools.HttpParserUpgrade:
            pass  # the request before it was answered as plain HTTP, and closes
        except httptools.HttpParserError as exc:
            if self.phase != DISCARD:
                self._parser_error(exc)
        if self.phase == HEAD or self.phase == BODY:
            self._between_reads(nbytes)

    def eof_received(self) -> None:
        """A client that closes its side is gone, also when only that side: the transport closes."""

    # ---- the parser

    def on_message_begin(self) -> None:
        """First byte of a request."""
        if self.phase == DISCARD:
            raise _Stop
        self.phase = HEAD
        self.deadline = self.server.header_at
        self.url = b""
        self.headers: Headers = []
        self.content_type = b""
        self.length = 0
        self.whole = b""
        self.special: dict[bytes, bytes] | None = None
        self.head_bytes = -self.read_bytes  # the read in which it begins is not counted: it is bounded anyhow

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self.url = self.url + url if self.url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or, behind a chunked body, a trailer, which nobody asked for."""
        if self.phase != HEAD:
            return
        self.headers.append((name, value))
        kind = _kinds.get(name)
        if kind is None:
            kind = _learn(name)
        if kind == LENGTH:
            self.length = int(value)
        elif kind == TYPE:
            self.content_type = value
            if value != b"application/json" and is_telling(value):
                self.special = {**(self.special or {}), b"content-type": value}
        elif kind:
            if self.special is None:
                self.special = {}
            self.special[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Checks all that can be checked before the body comes."""
        server = self.server
        self.exchange = exchange = server.exchange(self)
        exchange.headers = self.headers
        self.phase = BODY
        self.deadline = server.body_at
        special = self.special
        if special is not None or server.special or not self.parser.should_keep_alive():
            self._framing(exchange)
        expect = special is not None and b"expect" in special
        try:
            if self.read_bytes > server.config.max_header_bytes or self.head_bytes >= 0:
                self._check_head()
            method = self.parser.get_method()
            if method == b"POST" and (route := server.known_routes.get(self.url)) is not None:
                exchange.route = route
            else:
                route = self._find(exchange, method)
            if self.content_type:
                exchange.content_type = self.content_type.decode("latin-1")
            if special is not None or server.guarded:
                server.dialect.read_head(exchange, special or {})
            if self.length > server.small_bytes or expect:
                self._check_large(route)
        except PenstockError as error:
            # a small body is read and forgotten; for any other the connection is not worth keeping
            exchange.error = error.with_traceback(None)  # which would hold the connection
            chunked = special is not None and b"transfer-encoding" in special
            if self.length > server.small_bytes or chunked or expect or isinstance(error, HeadTooLarge):
                self._refuse(error)
                raise _Stop from None
        if expect and not exchange.old:
            self.continue_due = True
            self.advance()
        route_found = exchange.route
        self.intake.begin(self.length, route_found is not None and route_found.takes_body)

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body that came through the parser."""
        if len(chunk) == self.length:
            self.whole = chunk  # nearly every small body comes in one piece; its length was checked with the head
            return
        self.quiet_bytes = 0
        try:
            self.intake.add(chunk)
        except PenstockError as error:
            self._refuse(error)
            raise _Stop from None

    def on_message_complete(self) -> None:
        """The body is whole: submits the request, or answers it."""
        exchange = self.exchange
        assert exchange is not None
        exchange.payload = self.whole or self.intake.take()
        self.exchange = None
        self.continue_due = False
        self.deadline = INF
        self.phase = DISCARD if exchange.close else IDLE  # whatever comes behind the last request is not read
        if self.inflight:
            self.enqueue(exchange)
        else:
            self.start(exchange)

    # ---- the checks of a head

    def _framing(self, exchange: Exchange) -> None:
        parser = self.parser
        exchange.old = parser.get_http_version() == "1.0"
        exchange.close = not parser.should_keep_alive() or parser.should_upgrade() or self.server.closing
        exchange.plain = not (exchange.old or exchange.close)

    def _check_head(self) -> None:
        """Counts exactly what the reads could only bound. Raises HeadTooLarge."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.server.config.max_header_bytes:
            raise self._head_too_large()

    def _head_too_large(self) -> HeadTooLarge:
        most = self.server.config.max_header_bytes
        return HeadTooLarge(f"the head is larger than {most} bytes (limits.max_header_bytes)")

    def _find(self, exchange: Exchange, method: bytes) -> Route:
        if method == b"HEAD":
            exchange.head_only = True
            exchange.plain = False
        exchange.method, exchange.target = method, self.url
        return self.server.dialect.find(exchange, method, self.url)

    def _check_large(self, route: Route) -> None:
        """What is worth a refusal before the body is sent. Raises PayloadTooLarge, ModelNotFound."""
        most = self.server.config.max_body_bytes if route.takes_body else BIG_BYTES
        if self.length > most:
            raise PayloadTooLarge(f"the body has {self.length} bytes, at most {most} are taken (limits.max_body_bytes)")
        if route.template.codec:
            self.server.backend.model_ready(route.model, route.version)

    # ---- between two reads

    def _parser_error(self, exc: httptools.HttpParserError) -> None:
        if isinstance(exc, httptools.HttpParserCallbackError):
            log.error("event=bug where=parser consequence=connection_dropped", exc_info=exc)
            self.transport.abort()
            return
        self._refuse(MalformedHttp(f"malformed HTTP: {exc}"))

    def _between_reads(self, nbytes: int) -> None:
        """Bounds what the parser may gather, and leads a large body past it."""
        most = self.server.config.max_header_bytes
        if self.phase == HEAD:
            self.head_bytes += nbytes
            if self.head_bytes > most:
                self._refuse(self._head_too_large())
        elif self.length > BIG_BYTES:
            if self.server.stalled or not self.reserve():
                self._stall()
        elif not self.length:
            self.quiet_bytes += nbytes
            if self.quiet_bytes > most + len(self.server.receive):
                self._refuse(MalformedHttp("malformed HTTP: the chunked body has too much that is not data"))

    def reserve(self) -> bool:
        """Gets memory for a large body; False while there is none. True also when it is no longer wanted."""
        if self.phase == DISCARD:
            return True  # an earlier answer has closed the connection
        try:
            found = self.intake.reserve()
        except PenstockError as error:
            self._refuse(error)
            return True
        if found:
            self.phase = DIRECT
            self.deadline = self.server.body_at
            self.resume(POOL)
        return found

    def _stall(self) -> None:
        """While there is no memory the socket is not read, and no timer runs."""
        self.phase = STALLED
        self.deadline = INF
        self.pause(POOL)
        self.server.stall(self)

    def _refuse(self, error: PenstockError) -> None:
        """Answers, without the rest of the request, and closes."""
        exchange = self.exchange or self.server.exchange(self)
        self.exchange = None
        self.intake.release()
        exchange.error = error.with_traceback(None)
        exchange.plain = False
        exchange.close = exchange.linger = True
        self.phase = DISCARD
        self.continue_due = False
        self.deadline = INF
        self.resume(POOL)
        self.enqueue(exchange)

    def expire(self) -> None:
        """The time of this phase is over."""
        if self.phase == IDLE:
            self.shut()
        elif self.phase == DISCARD:
            self.transport.abort()
        elif self.paused:
            self.deadline = self.server.body_at  # it is we who do not read: the client is not to blame
        else:
            part = "head" if self.phase == HEAD else "body"
            self._refuse(RequestTimeout(f"the {part} of the request did not arrive in time"))

    def close_soon(self) -> None:
        """The server closes: the last request that is here is answered with `connection: close`."""
        last = self.exchange or (self.backlog or self.inflight or (None,))[-1]
        if self.phase == IDLE and last is None:
            self.shut()
        elif self.phase != HEAD and last is not None:
            last.close, last.plain = True, False  # also when it is done: then an earlier one holds it back
            if self.phase == IDLE:
                self.phase = DISCARD
