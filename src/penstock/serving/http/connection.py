"""One connection of the inference listener: httptools in, Items out, responses in order, everything bounded."""

import asyncio
import logging
import socket
from typing import Final, cast

import httptools

from penstock.errors import PayloadTooLarge, PenstockError
from penstock.serving.http.context import (
    BODY,
    DIRECT,
    DISCARD,
    HALF_CLOSED,
    HEAD,
    IDLE,
    STALLED,
    ApiFlavor,
    RequestContext,
    ResponseWriter,
)
from penstock.serving.http.intake import BIG_BYTES, Intake
from penstock.serving.http.listener import BODY_RATE, INF, KNOWN_HEADS, Listener, RequestHead
from penstock.serving.http.responses import TOO_MANY, HeadTooLarge, MalformedHttp, MethodNotAllowed, RequestTimeout
from penstock.serving.http.sockets import readable
from penstock.serving.protocols.bodies import ACCEPT_ENCODING, BLANKS, accepted_coding
from penstock.serving.protocols.route import Route
from penstock.serving.protocols.routes import PLAIN_TYPE, SPECIAL_NAMES

log = logging.getLogger("penstock.serving")

# a reason why the socket is not read, in addition to those in context.py
POOL: Final = 4

KNOWN_HEAD_BYTES: Final = 2048  # a choice: longer heads are parsed each time
REQUEST_BYTES: Final = 2048  # estimated memory of a request without a body that waits for earlier requests
CONNECT: Final = b"CONNECT"

OF_ONE_REQUEST: Final = frozenset({"writer", "head", "headers", "route"})  # attributes of a context that are set anew

LENGTH, TYPE, SPECIAL, CODINGS = 1, 2, 3, 4
_kinds: dict[bytes, int] = {}  # header names as clients have spelled them: most need no lower()


def _learn(name: bytes) -> int:
    known = name.lower()
    kinds = {b"content-length": LENGTH, b"content-type": TYPE, ACCEPT_ENCODING: CODINGS}
    kind = kinds.get(known, SPECIAL if known in SPECIAL_NAMES else 0)
    if len(_kinds) < 1024 and len(name) <= 64:
        _kinds[name] = kind
    return kind


class _Stop(Exception):
    """Ends the parser's run: the rest of what was read is not looked at."""


class Connection(asyncio.BufferedProtocol):
    """Receives the requests of one connection. The event loop, the parser (`on_*`), the clock and the writer call it.

    Clients repeat their heads. One that arrives again, byte by byte and with its whole body, is not parsed again.
    """

    def __init__(self, listener: Listener, flavor: ApiFlavor) -> None:
        self.listener = listener
        self.writer = ResponseWriter(listener, flavor, self)
        self.phase = IDLE
        self.deadline = INF
        self.unread, self.stuck_s = 0, 0.0
        self.head = RequestHead()
        self.context: RequestContext | None = None  # its body is being received
        self.intake = Intake(listener.backend, listener.config.max_body_bytes, listener.budget)
        self.read_bytes = 0  # of this read
        self.head_bytes = 0  # of earlier reads that belong to the head
        self.quiet_bytes = 0  # of a chunked body since its last byte of data
        self.whole = b""  # a body that came in one piece
        self.parser = httptools.HttpRequestParser(self)

    # ---- the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses the connection at once when there are too many."""
        transport = self.writer.transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=self.listener.config.write_buffer_bytes)
        if not self.listener.add(self):
            transport.write(TOO_MANY)
            self.phase = DISCARD
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the client has left: drops its waiting requests, and the responses to its running ones."""
        self.phase = DISCARD
        self.listener.remove(self)
        self.listener.memory.discard(self)
        self.intake.release()
        del self.parser  # breaks a reference cycle: the server rarely collects garbage
        self.context = None
        self.writer.lost()

    def pause_writing(self) -> None:
        self.writer.pause_writing()

    def resume_writing(self) -> None:
        self.writer.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The rest of the slab for a large body, else the memory that all connections share."""
        if self.phase == DIRECT:
            return self.intake.rest()
        return self.listener.receive

    def buffer_updated(self, nbytes: int) -> None:
        """Hands what was read to the parser, or counts it when it is already where it belongs."""
        if self.phase >= DIRECT:
            if self.phase == DIRECT:
                self.deadline = self.listener.clock.extended(self.deadline, nbytes)
                if self.intake.filled_to(nbytes):
                    self.parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
                    self.on_message_complete()
            return
        self.read_bytes = nbytes
        if self.phase == IDLE and self._receive_known(nbytes):
            return
        try:
            self._parse(self.listener.receive[:nbytes])
        except httptools.HttpParserError as exc:
            if self.phase != DISCARD:
                self._parser_error(exc)
        if self.phase == HEAD or self.phase == BODY:
            self._between_reads(nbytes)

    def eof_received(self) -> bool:
        """The client sends no more: it has left, or waits for the responses to its complete requests.

        Only data shows which: the system of a client that has left answers it with a reset. A half-sent request is
        forgotten. A client that ends in the middle of a stream has left, because nothing can be sent there to find out.
        TLS has no half-closed connections.
        """
        self.context = None
        self.intake.release()
        waiting = self.writer.inflight or self.writer.backlog
        if not waiting or waiting[0].started or self.writer.transport.get_extra_info("sslcontext") is not None:
            return False
        self.phase = IDLE
        self.close_soon()
        self.phase = HALF_CLOSED
        self.writer.continue_due = False
        self.writer.probe()
        self.deadline = INF if self.listener.hangups.watch(self, self.writer.transport) else 0.0
        return True

    def _receive_known(self, nbytes: int) -> bool:
        """Submits a request that was read whole and alone, if its head is known; else returns False."""
        listener, flavor = self.listener, self.writer.flavor
        first = bytes(listener.receive[: min(nbytes, KNOWN_HEAD_BYTES)])
        end = first.find(b"\r\n\r\n") + 4
        head = listener.clock.known_heads.get(first[:end])
        if head is None or nbytes - end != head.length or listener.closing:
            return False
        route = flavor.known.get(head.key)
        if route is None:
            return False
        self.head = head
        self.context = context = flavor.context(self.writer)
        context.head, context.headers, context.route = head, head.headers, route
        if head.settings is not None and not (flavor.guarded or (listener.budget.full and self.writer.unread)):
            vars(context).update(head.settings)
        else:
            try:
                self._read_head(context, route)
            except PenstockError as error:
                context.error = error.with_traceback(None)
        self.whole = bytes(listener.receive[end:nbytes])
        self.on_message_complete(alone=True)
        return True

    # ---- the parser

    def _parse(self, data: memoryview) -> None:
        """Feeds the parser, which stops behind a head that offers another protocol and would lose the body. No protocol
        is taken here, so another parser reads the head again without the offer (RFC 9110, section 7.8)."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                end: int = stopped.args[0]
            head = self.head.without_offer(self.parser.get_method(), self.parser.get_http_version())
            self.parser = httptools.HttpRequestParser(self)
            self.read_bytes = max(self.read_bytes, len(head))
            self.parser.feed_data(head)
            data = data[end:]

    def on_message_begin(self) -> None:
        if self.phase == DISCARD:
            raise _Stop
        self.phase = HEAD
        self.deadline = self.listener.clock.header_at
        self.head = RequestHead()
        self.whole = b""
        self.head_bytes = -self.read_bytes  # the read in which it begins is not counted: it is bounded anyhow

    def on_url(self, url: bytes) -> None:
        head = self.head
        head.url = head.url + url if head.url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Ignores trailers after a chunked body, and the blanks that the parser leaves after a value."""
        if self.phase != HEAD:
            return
        head, value = self.head, value.rstrip(BLANKS)
        head.headers.append((name, value))
        kind = _kinds.get(name)
        if kind is None:
            kind = _learn(name)
        if kind == LENGTH:
            head.length = int(value)
        elif kind == TYPE:
            head.content_type = value
        elif kind == SPECIAL or (kind and accepted_coding(value)):  # libraries send lists of codings with all requests
            if head.special is None:
                head.special = {}
            head.special[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Checks all that can be checked before the body comes."""
        listener, flavor, head, special = self.listener, self.writer.flavor, self.head, self.head.special
        method = self.parser.get_method()
        if special is not None and method != CONNECT and self.parser.should_upgrade():
            return  # the head comes again, see `_parse`
        self.context = context = self._new_context()
        self.phase = BODY
        self.deadline = listener.clock.body_at
        expect = special is not None and b"expect" in special
        try:
            if special is not None or listener.closing or not self.parser.should_keep_alive():
                self._framing(context)
            if self.read_bytes > listener.config.max_header_bytes or self.head_bytes >= 0:
                self._check_head()
            head.key = head.url if method == b"POST" else b"%b %b" % (method, head.url)
            if (route := flavor.known.get(head.key)) is not None:
                context.route = route
                self._read_head(context, route)
                if len(listener.clock.known_heads) < KNOWN_HEADS:
                    self._learn_head(context)
            else:
                route = self._find(context, method)
                self._read_head(context, route)
            if head.length > listener.small_bytes or expect:
                self._check_large(route)
        except PenstockError as error:
            # a small body is read and forgotten; for any other the connection is not worth keeping
            context.error = error.with_traceback(None)  # which would hold the connection
            chunked = special is not None and b"transfer-encoding" in special
            unread = chunked or expect or method == CONNECT or isinstance(error, HeadTooLarge)
            if unread or head.length > listener.small_bytes:
                self._refuse(error)
                raise _Stop from None
        if expect and not context.old:
            self.writer.continue_due = True
            self.writer.advance()

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body that came through the parser."""
        if len(chunk) == self.head.length:
            self.whole = chunk  # nearly every small body comes in one piece; its length was checked with the head
            return
        self.quiet_bytes = 0
        try:
            self._begin_body()
            self.intake.add(chunk)
        except PenstockError as error:
            self._refuse(error)
            raise _Stop from None

    def _begin_body(self) -> None:
        """Prepares the intake for a body that does not arrive in one small piece."""
        if not self.intake.begun:
            route = self.context.route if self.context is not None else None
            self.intake.begin(self.head.length, self.listener.most_of(route))

    def on_message_complete(self, alone: bool = False) -> None:
        """The body is whole: submits the request, or answers it. `alone`: nothing else was read with it."""
        context = self.context
        if context is None:
            return  # of a head that comes again
        context.payload = self.whole or (self.intake.take() if self.intake.begun else b"")
        self.context = None
        self.writer.continue_due = False
        self.deadline = INF
        self.phase = DISCARD if context.close else IDLE  # whatever comes behind the last request is not read
        if self.writer.inflight or self.writer.quick:
            self.writer.enqueue(context)
        else:
            self.writer.start(context, alone)

    # ---- the head

    def _new_context(self) -> RequestContext:
        context = self.writer.flavor.context(self.writer)
        context.head, context.headers = self.head, self.head.headers
        return context

    def _read_head(self, context: RequestContext, route: Route) -> None:
        """Reads the headers that change how the request is handled. Raises PenstockError."""
        flavor, kind, special = self.writer.flavor, self.head.content_type, self.head.special
        if self.listener.budget.full and self.writer.unread:
            raise self.listener.budget.refusal()
        if kind:
            context.content_type = kind.decode("latin-1")
        selects = kind != PLAIN_TYPE and route.template.select is not None
        if special is not None or flavor.guarded or selects:
            flavor.read_head(context, special or {})

    def _learn_head(self, context: RequestContext) -> None:
        """Remembers a head that may come again and leaves the connection open, and what `_read_head` made of it."""
        head = self.head
        if head.length < BIG_BYTES and head.is_steady() and not (context.close or context.old):
            known = head.canonical()
            if len(known) <= KNOWN_HEAD_BYTES:
                head.settings = {name: value for name, value in vars(context).items() if name not in OF_ONE_REQUEST}
                self.listener.clock.known_heads[known] = head

    def _framing(self, context: RequestContext) -> None:
        """Whether the connection ends after the response. Raises MalformedHttp."""
        parser = self.parser
        context.old = parser.get_http_version() == "1.0"
        context.close = not parser.should_keep_alive() or self.listener.closing
        context.linger = self.listener.closing
        context.plain = not (context.old or context.close)
        special = self.head.special
        if context.old and special is not None and b"transfer-encoding" in special:
            raise MalformedHttp("malformed HTTP: HTTP/1.0 has no transfer-encoding; send a content-length")

    def _check_head(self) -> None:
        """Counts exactly what the reads could only bound. Raises HeadTooLarge."""
        size = len(self.head.url) + sum(len(name) + len(value) + 4 for name, value in self.head.headers)
        if size > self.listener.config.max_header_bytes:
            raise self._head_too_large()

    def _head_too_large(self) -> HeadTooLarge:
        most = self.listener.config.max_header_bytes
        return HeadTooLarge(f"the head is larger than {most} bytes (limits.max_header_bytes)")

    def _find(self, context: RequestContext, method: bytes) -> Route:
        if method == CONNECT:
            raise MethodNotAllowed("this server opens no tunnels, found the method CONNECT")
        if method == b"HEAD":
            context.head_only = True
            context.plain = False
        url = self.head.url
        context.method, context.target = method, url
        return self.writer.flavor.find(context, method, url)

    def _check_large(self, route: Route) -> None:
        """Refuses a request before its body is sent. Raises PayloadTooLarge, ModelNotFound."""
        most, length = self.listener.most_of(route), self.head.length
        if length > most:
            key = " (limits.max_body_bytes)" if most == self.listener.config.max_body_bytes else ""
            raise PayloadTooLarge(f"the body has {length} bytes, at most {most} are taken{key}")
        if route.model and route.template.codec:
            self.listener.backend.model_ready(route.model, route.version)

    # ---- between two reads

    def _parser_error(self, exc: httptools.HttpParserError) -> None:
        if isinstance(exc, httptools.HttpParserCallbackError):
            log.error("event=bug where=parser consequence=connection_dropped", exc_info=exc)
            self.abort()
            return
        self._refuse(MalformedHttp(f"malformed HTTP: {exc}"))

    def _between_reads(self, nbytes: int) -> None:
        """Bounds what the parser may gather, and leads a large body past it."""
        most = self.listener.config.max_header_bytes
        if self.phase == HEAD:
            self.head_bytes += nbytes
            if self.head_bytes > most:
                self._refuse(self._head_too_large())
            return
        self.deadline = self.listener.clock.extended(self.deadline, nbytes)
        if self.head.length > BIG_BYTES:
            if self.listener.memory or not self.reserve():
                self._stall()
        elif not self.head.length:
            self.quiet_bytes += nbytes
            if self.quiet_bytes > most + len(self.listener.receive):
                self._refuse(MalformedHttp("malformed HTTP: the chunked body has too much that is not data"))

    def reserve(self) -> bool:
        """Gets memory for a large body; False while there is none. True also when it is no longer wanted."""
        if self.phase == DISCARD:
            return True  # an earlier response has closed the connection
        try:
            self._begin_body()
            found = self.intake.reserve()
        except PenstockError as error:
            self._refuse(error)
            return True
        if found:
            self.phase = DIRECT
            self.deadline = self.listener.clock.body_at
            self.writer.resume(POOL)
        return found

    def _stall(self) -> None:
        """While there is no memory the socket is not read, and no timer runs."""
        self.phase = STALLED
        self.deadline = INF
        self.writer.pause(POOL)
        self.listener.memory.add(self)

    def _refuse(self, error: PenstockError) -> None:
        """Answers, without the rest of the request, and closes."""
        context = self.context or self.writer.flavor.context(self.writer)
        self.context = None
        self.intake.release()
        context.error = error.with_traceback(None)
        context.plain = False
        context.close = context.linger = True
        self.phase = DISCARD
        self.writer.continue_due = False
        self.deadline = INF
        self.writer.resume(POOL)
        self.writer.enqueue(context)

    def expire(self) -> None:
        """Handles the timeout of the current phase."""
        if self.phase == IDLE:
            if not readable(self.writer.transport):  # a request that has arrived is still answered
                self.writer.shut()
        elif self.phase == DISCARD:
            self.abort()
        elif self.phase == HALF_CLOSED:  # on systems without epoll, in every sweep
            if self.writer.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.abort()
        elif self.writer.paused:
            self.deadline = self.listener.clock.body_at  # the server does not read: the client is not late
        else:
            self._refuse(RequestTimeout(self._late()))

    def _late(self) -> str:
        config = self.listener.config
        if self.phase == HEAD:
            limit = f"{config.header_timeout_s:g} s (limits.header_timeout_s)"
            return f"the head of the request did not arrive within {limit}"
        limit = f"{config.body_timeout_s:g} s (limits.body_timeout_s), it must come at {BODY_RATE} bytes/s or more"
        return f"the body of the request did not arrive in time: after {limit}"

    def check_writing(self, now: float) -> tuple[int, int]:
        self.writer.check_writing(now)
        if self.writer.unread:
            self.writer.count_unsent()
        head_bytes = max(0, self.head_bytes) if self.phase == HEAD else 0
        return self.writer.unread, head_bytes + REQUEST_BYTES * len(self.writer.backlog)

    def abort(self) -> None:
        self.writer.transport.abort()

    def close_soon(self) -> None:
        """The last request that is here is answered with `connection: close`; without one, the next."""
        last = self.context or (self.writer.backlog or self.writer.inflight or (None,))[-1]
        if self.phase == IDLE and last is None:
            self.deadline = self.listener.clock.idle_at
        elif self.phase != HEAD and last is not None:
            last.close, last.plain = True, False  # also when it is done: then an earlier one holds it back
            last.linger = last.linger or self.listener.closing
            if self.phase == IDLE:
                self.phase = DISCARD
