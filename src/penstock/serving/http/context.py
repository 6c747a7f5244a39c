"""Requests of one connection and their responses: each request's context, and the writer that keeps their order."""

# A connection receives requests one after the other; a client may send the next ones before it has the response to the
# first (pipelining). Each request has a context, from the end of its head to the end of its response. The writer of the
# connection puts contexts in flight in the order in which they came, and submits them to the backend or answers them at
# once. The backend answers in any order; HTTP/1.1 has no numbers, so responses must leave in the order of the requests.
# Only the first context in flight writes; any other keeps its bytes in `out` until all before it are done.
#
# What waits is bounded everywhere. Above limits.max_pipelined the rest of a read waits in the backlog, and the socket
# is not read (PIPELINE). The same happens while the client does not take its responses (WRITE), or while a large body
# waits for memory (POOL). Requests that need no model run QUICK_PER_TURN at a time, so that a client that sends
# thousands does not hold up the others. A model that streams cannot be paused: a reader that falls too far behind is
# dropped.
#
# Nearly every response is plain: status 200, whole, at most one header of its own, to a connection that stays open. Its
# head is cached up to the length, and head and body leave in one write. Everything else is framed in responses.py.

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import parse_qs

from penstock.errors import PenstockError
from penstock.request import pseudo_headers
from penstock.serving.http.intake import unpacked_headers
from penstock.serving.http.listener import INF, LINGER_S, SILENT_S, Listener, RequestHead
from penstock.serving.http.responses import JOINED_BYTES, ResponseFraming
from penstock.serving.protocols.bodies import free
from penstock.serving.protocols.route import HttpRequest, Route, Serve, name_model
from penstock.types import Headers, Item, ItemResult

log = logging.getLogger("penstock.serving")

STREAM_BACKLOG: Final = 16  # times limits.write_buffer_bytes: unsent bytes at which the reader of a stream is dropped
QUICK_PER_TURN: Final = 4  # of a connection; a measurement: 50 connections then cost the others less than 0.1 s
BEGINNING: Final = b"HTTP/1.1 "  # of every response
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# phases of the request that is being received; the order matters: from DIRECT on the parser is bypassed
IDLE, HEAD, BODY, DIRECT, STALLED, DISCARD, HALF_CLOSED = range(7)
# reasons why the socket is not read; the connection adds POOL
PIPELINE, WRITE = 1, 2


class Receiver(Protocol):
    """The receiving side of a connection, as its writer sees it."""

    phase: int
    deadline: float


class ApiFlavor(Protocol):
    """What a `HttpServer` asks once per request head; the class `context` writes the response."""

    context: type[RequestContext]
    known: dict[bytes, Route]  # routes without `find`: for inference by the target of a POST, else by "GET target"
    no_tls: bytes  # the whole response to plain HTTP on a TLS port; empty: the connection is dropped without one
    guarded: bool  # `read_head` is called for every request, not only for requests with a header of SPECIAL_NAMES

    def find(self, context: RequestContext, method: bytes, target: bytes) -> Route:
        """The route, also set on the context before an error of the method is raised. Raises PenstockError."""

    def read_head(self, context: RequestContext, special: dict[bytes, bytes]) -> None:
        """Authenticates the caller and reads the headers of SPECIAL_NAMES (lower case). Raises PenstockError."""


class RequestContext(ResponseFraming):
    """One request and its response. The defaults are the plain case: HTTP/1.1 and keep-alive."""

    method: bytes = b"POST"  # set only if the route was not cached
    head: RequestHead
    headers: Headers
    payload: Any = b""
    error: PenstockError | None = None  # the request was refused before it was submitted

    def __init__(self, writer: ResponseWriter) -> None:
        self.writer: ResponseWriter | None = writer

    def on_result(self, result: ItemResult) -> None:
        """The sink. Ignores results after the final one, and after the client left."""
        writer = self.writer
        if writer is None:
            return
        plain = self.plain and result.final and result.status == 200 and result.error is None
        head = self.plain_head(writer, result) if plain else None
        if head is None:
            self._general(writer, result)
            return
        self.writer = None
        body = result.body
        writer.listener.counts.plain += 1
        if len(body) <= JOINED_BYTES:
            data = b"%b%d\r\n\r\n%b" % (head, len(body), body)
            if writer.inflight[0] is self:
                writer.finish(data)
                return
            self._emit(writer, data)
        else:
            self._emit(writer, b"%b%d\r\n\r\n" % (head, len(body)))
            self._emit(writer, body)
        self._end(writer)

    def pseudo_headers(self) -> Headers:
        """What the headers do not say, see `penstock.request`."""
        method, _, target = self.head.key.rpartition(b" ")
        peer = None if self.writer is None else self.writer.transport.get_extra_info("peername")
        named = ("", None) if self.route is None else (self.route.model, self.route.version)
        return pseudo_headers(method or b"POST", target, peer, *named)

    def plain_head(self, writer: ResponseWriter, result: ItemResult) -> bytes | None:
        """The head of a plain response, up to the value of its content length; None with several headers."""
        clock, headers, header = writer.listener.clock, result.headers, None
        if headers:
            if len(headers) > 1:
                return None
            header = headers[0]
        return clock.heads.get((result.content_type, header)) or clock.learn_head(result.content_type, header)

    def _emit(self, writer: ResponseWriter, data: Any) -> None:
        """Writes, or holds the bytes back until every earlier request of the connection is answered."""
        if writer.inflight[0] is self:
            writer.write(data)
        else:
            self.kept += len(data)
            writer.kept += len(data)
            self.out = self.out or []
            self.out.append(data)

    def _end(self, writer: ResponseWriter) -> None:
        self.done = True
        self.writer = None
        if writer.inflight[0] is self:
            writer.advance()


class ResponseWriter:
    """Starts the requests of one connection and writes the responses in their order, with back-pressure.

    It owns the transport and decides when the socket is read. `phase` and `deadline` belong to the connection.
    """

    transport: asyncio.Transport

    def __init__(self, listener: Listener, flavor: ApiFlavor, connection: Receiver) -> None:
        self.listener = listener
        self.flavor = flavor
        self.connection: Receiver = connection
        self.paused = 0
        self.inflight: deque[RequestContext] = deque()
        self.backlog: deque[RequestContext] = deque()  # received in one read beyond limits.max_pipelined
        self.continue_due = False  # the client waits for 100 Continue
        self.begun = False  # the beginning of the next response was sent
        self.advancing = False
        self.quick = 0  # requests of this turn of the event loop that needed no model
        self.write_at = INF
        self.written = self.taken = 0  # bytes since writing was paused
        self.kept = 0  # bytes of responses that wait for earlier ones
        self.sent: Route | None = None  # of the last response

    def pause_writing(self) -> None:
        self.pause(WRITE)
        self.taken, self.written = 0, self.transport.get_write_buffer_size()
        self.write_at = self.listener.now() + self.listener.config.write_timeout_s

    def resume_writing(self) -> None:
        self.write_at = INF
        self.resume(WRITE)
        if self.backlog:
            self.advance()

    def pause(self, reason: int) -> None:
        """Stops reading the socket, for this reason."""
        if not self.paused:
            self.transport.pause_reading()
        self.paused |= reason

    def resume(self, reason: int) -> None:
        """Reads the socket again, unless another reason remains."""
        if self.paused & reason:
            self.paused &= ~reason
            if not self.paused and not self.transport.is_closing():
                self.transport.resume_reading()

    def lost(self) -> None:
        """Cancels the requests in flight, and drops the queued ones, of a client that has left."""
        for context in self.inflight:
            context.writer = None
            if context.ticket is not None and not context.done:
                context.ticket.cancel()
        for context in self.backlog:
            free(context.payload)
        self.inflight.clear()
        self.backlog.clear()
        del self.connection  # breaks a reference cycle

    # ---- requests

    def enqueue(self, context: RequestContext) -> None:
        """Starts a request, or queues it while the connection has too many in flight or its client does not read: this
        bounds the memory of its responses."""
        if self.backlog or not self._has_room():
            self.backlog.append(context)
            self.pause(PIPELINE)
        else:
            self.start(context)

    def _has_room(self) -> bool:
        """Whether another request may start."""
        pipelined = len(self.inflight) >= self.listener.config.max_pipelined
        return not (pipelined or self.paused & WRITE or self.quick >= QUICK_PER_TURN)

    def _count_quick(self, cost: int = 1) -> None:
        """Lets other connections have their turn: a client can send thousands of cheap requests at once."""
        if not self.quick:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self.quick += cost

    def _next_turn(self) -> None:
        self.quick = 0
        if self.backlog:
            self.advance()

    def start(self, context: RequestContext, alone: bool = False) -> None:
        """Submits a request; answers it at once if it was refused or needs no model. Many cheap requests that were read
        together take turns with other connections; one that was `alone` need not."""
        self.inflight.append(context)
        if context.error is not None:
            self._count_quick()
            context.fail(context.error)
        elif context.coding:
            self._count_quick()
            self.listener.run(self._unpack(context))
        else:
            self._submit(context, alone)

    async def _unpack(self, context: RequestContext) -> None:
        """Submits a request whose body has a content coding, once that is removed."""
        assert context.route is not None
        listener, began_s = self.listener, self.listener.now()
        most = listener.most_of(context.route)
        try:
            payload = await listener.unpacking.unpack(context.payload, context.coding, most, lambda: not context.writer)
        except Exception as error:
            context.payload = b""
            if not isinstance(error, PenstockError):
                log.exception("event=bug where=unpack consequence=answered_500")
                error = PenstockError("internal error")
            context.fail(error.with_traceback(None))
            return
        context.payload, context.headers = payload, unpacked_headers(context.headers)
        if context.budget_s is not None:
            context.budget_s -= listener.now() - began_s
        if context.writer is not None:
            self._submit(context)
        else:
            free(payload)

    def _submit(self, context: RequestContext, alone: bool = False) -> None:
        try:
            route = context.route
            assert route is not None
            template = route.template
            if template.answer is not None:
                if not alone:
                    self._count_quick()
                context.on_result(template.answer(self.listener.backend, route))
                return
            if template.serve is not None:
                self._count_quick(QUICK_PER_TURN)
                self.listener.run(_serve(template.serve, _read_request(context, route), context))
                return
            if template.subscribe is not None:
                self._count_quick(QUICK_PER_TURN)
                context.ticket = template.subscribe(route, context.on_result)
                return
            if template.name_of is not None:
                context.route = route = name_model(route, context.payload)
            codec, kind = context.codec or template.codec, context.content_type
            item = Item(context.payload, codec, kind, 1, False, context.request_id, context.headers)
            item.head_bytes, item.source = context.head_bytes, context
            submit = self.listener.backend.submit
            if not context.plain:
                item.budget_s, item.priority = context.budget_s, context.priority
                if context.key:
                    submit = partial(self.listener.idempotency.submit, context.key)
            if template.read_terms is not None and (terms := template.read_terms(item)) is not None:
                terms.apply(item)
            context.ticket = submit(route.model, route.version, item, context.on_result)
        except PenstockError as error:
            self._count_quick()
            context.fail(error)
        except Exception:
            log.exception("event=bug where=submit consequence=answered_500")
            context.fail(PenstockError("internal error"))

    # ---- responses

    def finish(self, data: bytes) -> None:
        """Writes the whole response to the first request in flight."""
        self.sent = self.inflight.popleft().route
        if self.begun or self.paused:
            self.write(data)
        else:
            self.transport.write(data)
        if self.inflight or self.backlog or self.continue_due:
            self.advance()
        elif self.connection.phase == IDLE:
            self.connection.deadline = self.listener.clock.idle_at

    def write(self, data: Any) -> None:
        if self.begun:
            data, self.begun = data[len(BEGINNING) :], False
        self.transport.write(data)
        if self.paused:
            self.written += len(data)

    def advance(self) -> None:
        """Writes the responses that are now first, and starts queued requests. Ignores reentrant calls."""
        if self.advancing:
            return
        self.advancing = True
        inflight, backlog = self.inflight, self.backlog
        while inflight or backlog:
            if inflight:
                first = inflight[0]
                for data in first.out or ():
                    self.write(data)
                first.out = None
                self.kept -= first.kept
                first.kept = 0
                if first.done:
                    self.sent = inflight.popleft().route
                    if first.close:
                        self._end(first)
                        break
                    continue
            if not (backlog and self._has_room()):
                break
            self.start(backlog.popleft())
        self.advancing = False
        if not backlog:
            self.resume(PIPELINE)
        if not inflight and not backlog:
            if self.continue_due:
                self.continue_due = False
                self.write(CONTINUE)
            if self.connection.phase == IDLE:
                self.connection.deadline = self.listener.clock.idle_at

    def _end(self, context: RequestContext) -> None:
        """Closes after the last response."""
        self.connection.phase = DISCARD
        self.continue_due = False
        if context.broken and context.old:
            self.transport.abort()  # only a reset shows an HTTP/1.0 client that the response is incomplete
        elif context.linger:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.connection.deadline = self.listener.now() + (SILENT_S if self.listener.closing else LINGER_S)
        else:
            self.shut()

    def shut(self) -> None:
        """Closes once everything is sent; drops a client that does not read after the write timeout."""
        self.connection.phase = DISCARD
        self.connection.deadline = self.listener.now() + self.listener.config.write_timeout_s
        self.transport.close()

    def probe(self) -> None:
        """Sends the beginning of the next response. The system of a client that left answers with a reset, and others
        notice nothing."""
        self.write(BEGINNING)
        self.begun = True

    @property
    def unread(self) -> int:
        """Bytes of responses that the client has not read."""
        return self.kept + self.transport.get_write_buffer_size()

    def count_unsent(self) -> None:
        """Counts the time of the responses that are ready and not sent."""
        routes = [context.route for context in self.inflight if context.kept]
        if self.transport.get_write_buffer_size():
            streams = bool(self.inflight) and self.inflight[0].started
            routes.append(self.inflight[0].route if streams else self.sent)
        self.listener.count_unsent((route.model, route.version) for route in routes if route is not None)

    def check_unsent(self) -> None:
        """Drops the reader of a stream that falls too far behind: a streaming model cannot be paused."""
        if self.unread > STREAM_BACKLOG * self.listener.config.write_buffer_bytes:
            log.debug("event=slow_reader consequence=connection_dropped")
            self.transport.abort()

    def check_writing(self, now: float) -> None:
        """Drops a client that reads no byte of its response within the write timeout, and keeps a stream alive."""
        if self.write_at == INF:
            if self.inflight:
                self.inflight[0].keep_alive(self, self.listener.clock.sweep_s)
            return
        taken = self.written - self.transport.get_write_buffer_size()
        if taken > self.taken:
            self.taken = taken
            self.write_at = now + self.listener.config.write_timeout_s
        elif now >= self.write_at:
            log.debug("event=write_timeout consequence=connection_dropped")
            self.transport.abort()


async def _serve(function: Serve, request: HttpRequest, context: RequestContext) -> None:
    """Runs a route's function and passes its result to the context, which drops it if the client has left."""
    try:
        result = await function(request)
    except PenstockError as error:
        context.fail(error.with_traceback(None))
    except Exception:
        log.exception("event=bug where=route path=%r consequence=answered_500", request.path[:200])
        context.fail(PenstockError("internal error"))
    else:
        context.on_result(result)


def _read_request(context: RequestContext, route: Route) -> HttpRequest:
    """The argument of a route's function."""
    target = context.target.decode("latin-1")
    query = parse_qs(target.partition("#")[0].partition("?")[2], keep_blank_values=True, errors="replace")
    return HttpRequest(
        context.method.decode("ascii"),
        target,
        query,
        context.headers,
        context.content_type,
        context.payload,
        route.names,
    )
