"""The half of a connection that answers: requests in flight, answers in order, back-pressure of writing."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.serving.http.exchange import Exchange
from penstock.types import Item

if TYPE_CHECKING:
    from penstock.serving.http.server import HttpServer

log = logging.getLogger("penstock.frontends")

INF: Final = float("inf")
LINGER_S: Final = 2.0  # how long a refused client is listened to, so that it reads the refusal and not a reset
STREAM_BACKLOG: Final = 16  # times limits.write_buffer_bytes: unsent bytes at which the reader of a stream is dropped
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# phases of the request that is being received; the order matters: from DIRECT on the parser is bypassed
IDLE, HEAD, BODY, DIRECT, STALLED, DISCARD = range(6)
# reasons why the socket is not read
PIPELINE, WRITE = 1, 2


class Answering(asyncio.BufferedProtocol):
    """Starts what was received, and writes the answers in the order of the requests."""

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.phase = IDLE
        self.deadline = server.header_at
        self.paused = 0
        self.inflight: deque[Exchange] = deque()
        self.backlog: deque[Exchange] = deque()  # received in one read beyond what may be in flight, not submitted yet
        self.continue_due = False  # a client waits for 100 Continue
        self.advancing = False
        self.write_at = INF
        self.written = self.taken = 0  # bytes, since writing was paused
        self.kept = 0  # bytes of answers that wait for earlier ones

    def pause_writing(self) -> None:
        """The client does not read: nor do we."""
        self.pause(WRITE)
        self.taken, self.written = 0, self.transport.get_write_buffer_size()
        self.write_at = self.server.now() + self.server.config.write_timeout_s

    def resume_writing(self) -> None:
        """The client reads again."""
        self.write_at = INF
        self.resume(WRITE)
        if self.backlog:
            self.advance()

    def pause(self, reason: int) -> None:
        """Stops reading the socket for this reason."""
        if not self.paused:
            self.transport.pause_reading()
        self.paused |= reason

    def resume(self, reason: int) -> None:
        """Reads again unless there is another reason not to."""
        if self.paused & reason:
            self.paused &= ~reason
            if not self.paused and not self.transport.is_closing():
                self.transport.resume_reading()

    # ---- requests

    def enqueue(self, exchange: Exchange) -> None:
        """Starts a request, or keeps it while too many of this connection are in flight, or answers wait for its client
        to read: their memory is bounded by what is in flight."""
        if len(self.inflight) < self.server.config.max_pipelined and not self.backlog and not self.paused & WRITE:
            self.start(exchange)
        else:
            self.backlog.append(exchange)
            self.pause(PIPELINE)

    def start(self, exchange: Exchange) -> None:
        """Submits a request; what was refused already, or needs no model, is answered at once."""
        self.inflight.append(exchange)
        if exchange.error is not None:
            exchange.fail(exchange.error)
            return
        try:
            route = exchange.route
            assert route is not None
            template = route.template
            if template.answer is not None:
                exchange.on_result(template.answer(self.server.backend, route))
                return
            if template.serve is not None:
                self.server.serve(template.serve, exchange, route)
                return
            item = Item(
                exchange.payload,
                exchange.codec or template.codec,
                exchange.content_type,
                1,
                False,
                exchange.request_id,
                exchange.headers,
            )
            backend = self.server.backend
            if exchange.plain:
                ticket = backend.submit(route.model, route.version, item, exchange.on_result)
            else:
                submit = partial(self.server.repeats.submit, exchange.key) if exchange.key else backend.submit
                ticket = submit(
                    route.model,
                    route.version,
                    item,
                    exchange.on_result,
                    budget_s=exchange.budget_s,
                    priority=exchange.priority,
                )
            exchange.ticket = ticket
        except PenstockError as error:
            exchange.fail(error)
        except Exception:
            log.exception("event=bug where=submit consequence=answered_500")
            exchange.fail(PenstockError("internal error"))

    # ---- answers

    def finish(self, data: bytes) -> None:
        """The whole answer to the first request in flight."""
        self.inflight.popleft()
        self.write(data)
        if self.inflight or self.backlog or self.continue_due:
            self.advance()
        elif self.phase == IDLE:
            self.deadline = self.server.idle_at

    def write(self, data: Any) -> None:
        """Bytes to the client."""
        self.transport.write(data)
        if self.paused:
            self.written += len(data)

    def advance(self) -> None:
        """Writes what became first in line, and starts what waited for room. Reentrant calls are left to the outer."""
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
                    inflight.popleft()
                    if first.close:
                        self._end(first)
                        break
                    continue
            if not backlog or len(inflight) >= self.server.config.max_pipelined or self.paused & WRITE:
                break
            self.start(backlog.popleft())
        self.advancing = False
        if not backlog:
            self.resume(PIPELINE)
        if not inflight and not backlog:
            if self.continue_due:
                self.continue_due = False
                self.write(CONTINUE)
            if self.phase == IDLE:
                self.deadline = self.server.idle_at

    def _end(self, exchange: Exchange) -> None:
        """Closes behind the last answer."""
        self.phase = DISCARD
        self.continue_due = False
        if exchange.broken and exchange.old:
            self.transport.abort()  # nothing but a reset tells a client of HTTP/1.0 that the answer is not whole
        elif exchange.linger:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.deadline = self.server.now() + LINGER_S
        else:
            self.shut()

    def shut(self) -> None:
        """Closes when all is sent; a client that does not take it is dropped after the write timeout."""
        self.phase = DISCARD
        self.deadline = self.server.now() + self.server.config.write_timeout_s
        self.transport.close()

    def check_unsent(self) -> None:
        """Drops the reader of a stream that falls too far behind: a model that streams cannot be paused."""
        if self.kept + self.transport.get_write_buffer_size() > STREAM_BACKLOG * self.server.config.write_buffer_bytes:
            log.debug("event=slow_reader consequence=connection_dropped")
            self.transport.abort()

    def check_writing(self, now: float) -> None:
        """Drops a client that takes no byte of its answer within the write timeout."""
        taken = self.written - self.transport.get_write_buffer_size()
        if taken > self.taken:
            self.taken = taken
            self.write_at = now + self.server.config.write_timeout_s
        elif now >= self.write_at:
            log.debug("event=write_timeout consequence=connection_dropped")
            self.transport.abort()
