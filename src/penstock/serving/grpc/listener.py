"""The gRPC listener: a connection around `Http2Connection` with its timers, within the limits of the HTTP listener."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from msgspec import Struct

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.serving.grpc.call import GrpcCall
from penstock.serving.grpc.dispatch import CallDispatcher
from penstock.serving.grpc.messages import UNREAD_BYTES, CallHead, Code, GrpcError, read_head, refused
from penstock.serving.http.auth import replace_ssl_context
from penstock.serving.http.listener import INF, LINGER_S, Listener
from penstock.serving.http.sockets import SocketServer, readable
from penstock.serving.http2.connection import Http2Connection
from penstock.serving.http2.frames import NO_ERROR, PING, HeaderReader, Http2Error, frame
from penstock.serving.http2.streams import Outbox

CALLS_PER_TURN: Final = 32  # started when a client has read its responses: a thousand may wait
CALL_BYTES: Final = 3072  # estimated memory of a call that waits for its message
_HTTP1: Final = b"gRPC needs HTTP/2; send HTTP/1.1 requests to the inference port\n"
_HTTP1_ANSWER: Final = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_HTTP1), _HTTP1)
)


class SharedState(Struct):
    """What all connections of a listener share. `receive` is memory for one read."""

    listener: Listener
    dispatcher: CallDispatcher
    max_streams: int
    max_header_bytes: int
    max_age_s: float
    max_age_grace_s: float
    receive: memoryview


class GrpcConnection(asyncio.BufferedProtocol):
    """Receives the calls of one client.

    It has more than 15 attributes because it serves three sides: the event loop (what was read, and how to go on), the
    clock of the listener (four deadlines), and its calls.
    """

    transport: asyncio.Transport

    def __init__(self, shared: SharedState) -> None:
        self.listener = shared.listener
        self.deadline = INF
        self.unread, self.stuck_s = 0, 0.0
        self._shared = shared
        self._rest = b""  # the begin of a frame
        self._later = False  # the rest waits for its turn
        self._begun = 0  # the stream whose headers have come in part, or -1 for a frame that has
        self._direct = False  # the next bytes go where they belong
        self._closing = False
        self._pinged = False
        self._backlog: deque[GrpcCall] = deque()  # calls that start when the client has read more
        self._write_at = INF
        self._age_at = INF
        self._aged = False  # `_age_at` is the end of the grace
        self.sent: tuple[str, str | None] = ("", None)
        self._http2: Http2Connection

    # ---- the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses the connection at once when there are too many."""
        transport = self.transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=self.listener.config.write_buffer_bytes)
        most = self.listener.config.max_header_bytes
        reader: HeaderReader[CallHead | None] = HeaderReader(most, self._read_head)
        outbox = Outbox(transport.write, transport.writelines)
        self._http2 = Http2Connection(self._shared, outbox, reader, partial(GrpcCall, owner=self))
        self._now = asyncio.get_running_loop().time
        if not self.listener.add(self):
            self._closing = True
            transport.abort()
            return
        self._age_at = self.listener.now() + self._shared.max_age_s
        if self.listener.closing:
            self._http2.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the client has left: drops its waiting requests, and the responses to its running ones."""
        self._closing = True
        self.listener.remove(self)
        self._backlog.clear()
        self._http2.close()
        del self._http2  # breaks a reference cycle: the server rarely collects garbage

    def pause_writing(self) -> None:
        self._http2.outbox.paused = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._http2.outbox.paused = False
        self._http2.outbox.flush()
        if not (self._http2.outbox.paused or self._later or self.transport.is_closing()):
            self.transport.resume_reading()
        self._start_more()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where much data belongs, else the memory that all connections share, behind the bytes that were not used."""
        if not self._rest and (space := self._http2.direct()) is not None:
            self._direct = True
            return space
        self._direct = False  # also if nothing came the last time
        if not self._rest:
            return self._shared.receive
        begun = len(self._rest)
        self._shared.receive[:begun] = self._rest
        return self._shared.receive[begun:]

    def buffer_updated(self, nbytes: int) -> None:
        if self._direct:
            self._direct = False
            self.deadline, self._pinged = self.listener.clock.idle_at, False
            self._http2.filled(nbytes)
            return
        self._receive(self._shared.receive[: len(self._rest) + nbytes])

    def _receive(self, data: memoryview) -> None:
        """Handles what one turn admits of the bytes that have come. The rest waits until others had their turn."""
        self._rest = b""
        if self._closing:
            return
        try:
            used = self._http2.receive(data, self._now())
        except Http2Error as error:
            if not self._http2.begun and data[:1].tobytes().isalpha():
                self.transport.write(_HTTP1_ANSWER)
                self._linger()
            else:
                self._fail(error)
            return
        if used < len(data):
            self._rest = bytes(data[used:])
            if self._http2.turn <= 0:
                self._later = True
                self.transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._go_on)
        begun = self._http2.partial_head or (-1 if self._rest and not self._later else 0)
        if self._http2.begun and (begun != self._begun or (used and begun <= 0)):
            self.deadline = self.listener.clock.header_at if begun else self.listener.clock.idle_at
            self._pinged = False
        self._begun = begun
        if self._backlog:
            self._start_more()
        if self._http2.draining:
            self.settle()

    def _go_on(self) -> None:
        self._later = False
        if self.transport.is_closing():
            return
        if not self._http2.outbox.paused:
            self.transport.resume_reading()
        self._receive(memoryview(self._rest))

    def eof_received(self) -> bool:
        """A client that sends no more has left: gRPC has no half-closed connections."""
        return False

    # ---- calls

    def _read_head(self, headers: Any) -> CallHead | None:
        return read_head(headers, self._shared.dispatcher.find)

    def check(self, head: CallHead) -> None:
        budget, unsent = self.listener.budget, self._http2.outbox.unsent_bytes
        if unsent > self.unread:  # since the last sweep
            budget.sweep(budget.swept + unsent - self.unread)
            self.unread = unsent
        if budget.full and (unsent or len(self._http2.streams) > 1):
            raise refused(budget.refusal())
        self._shared.dispatcher.check(head)

    def start(self, call: GrpcCall) -> None:
        """Runs a complete call, or queues it while the client leaves too much unread."""
        if self._backlog or self._http2.outbox.unsent_bytes > UNREAD_BYTES:
            if len(self._backlog) >= 2 * self._shared.max_streams:  # half of them were reset
                self._backlog = deque(each for each in self._backlog if not (each.closed or each.last))
            try:
                call.count()
            except GrpcError as error:
                call.fail(error)
                return
            self._backlog.append(call)
        else:
            self._shared.dispatcher.start(call, self.listener)

    def _start_more(self) -> None:
        for _ in range(CALLS_PER_TURN):
            if not self._backlog or self._http2.outbox.unsent_bytes > UNREAD_BYTES:
                return
            call = self._backlog.popleft()
            if not (call.closed or call.last):
                self._shared.dispatcher.start(call, self.listener)
        asyncio.get_running_loop().call_soon(self._start_more)

    def settle(self) -> None:
        """Closes a draining connection after its last call."""
        if self._http2.drained and not self._http2.streams and not self._closing:
            self._closing = True
            self.deadline = self.listener.clock.write_at
            self.transport.close()

    # ---- the clock

    def expire(self) -> None:
        """Handles the timeout of the current phase."""
        if self._closing:
            self.abort()
        elif readable(self.transport):
            self.deadline = 0.0  # in the next sweep: what has arrived comes first
        elif self._http2.begun < 2 or self._begun:
            limit = f"{self.listener.config.header_timeout_s:g} s (limits.header_timeout_s)"
            self._fail(Http2Error(NO_ERROR, f"the rest of a preface, frame or header block took more than {limit}"))
        elif not self._http2.streams:
            self._fail(Http2Error(NO_ERROR, "connection idle"))
        elif self._pinged:
            self.abort()
        else:
            self._pinged = True
            self.deadline = self.listener.clock.write_at
            self._http2.outbox.write(frame(PING, 0, 0, bytes(8)))

    def check_writing(self, now: float) -> tuple[int, int]:
        """Drops a client that does not read. Also counts the other times of a connection, and what it occupies."""
        if self._closing:
            return self.transport.get_write_buffer_size(), 0
        self._http2.tick()
        limit_s = self.listener.config.body_timeout_s
        calls = cast("list[GrpcCall]", list(self._http2.streams.values()))
        for call in [each for each in calls if each.rest_at < INF]:
            more, call.seen = call.received - call.seen, call.received
            call.rest_at = self.listener.clock.extended(call.rest_at, more)
            if call.rest_at <= now:
                text = f"the message did not arrive within {limit_s:g} s (limits.body_timeout_s)"
                call.fail(GrpcError(Code.DEADLINE_EXCEEDED, text))
        if self._age_at <= now:
            if self._aged:
                self.abort()
                return 0, 0
            self._http2.drain()
            self._aged, self._age_at = True, now + self._shared.max_age_grace_s
        buffered = self.transport.get_write_buffer_size()
        unread = self._http2.outbox.unsent_bytes + buffered
        if unread:
            held = [call.asked for call in calls if call.unsent]
            self.listener.count_unsent([*held, self.sent] if buffered else held)
        if not unread:
            self._write_at = INF
        elif unread != self.unread or self._write_at == INF:
            self._write_at = now + self.listener.config.write_timeout_s
        elif self._write_at <= now:
            self.abort()
        return unread, CALL_BYTES * len(self._http2.streams) + len(self._rest) + self._http2.held_bytes

    def close_soon(self) -> None:
        """Answers the calls that the client has sent, and no more."""
        if self._closing:
            return
        self._http2.drain()
        if not self._http2.streams:
            self.deadline = self.listener.clock.idle_at

    def abort(self) -> None:
        self._closing = True
        self.transport.abort()

    def _fail(self, error: Http2Error) -> None:
        self._http2.fail(error)
        self._linger()
        self._http2.close()

    def _linger(self) -> None:
        """Ends the connection, once the client has received why."""
        self._closing = True
        self.deadline = self.listener.now() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


MAX_STREAMS: Final = 1024  # concurrent calls per connection; the client queues the others
RECEIVE_BYTES: Final = 2**18  # of one read


class GrpcLimits(Struct, frozen=True):
    """The bounds of a listener, with its own share of `max_connections`. An age of None means unlimited."""

    limits: LimitsConfig
    max_age_ms: int | None = None
    max_age_grace_ms: int | None = None


class GrpcListener:
    """Serves the calls of a dispatcher. `drain` is called before the listener closes, to end idle streams."""

    def __init__(
        self,
        backend: Backend,
        dispatcher: CallDispatcher,
        bounds: GrpcLimits,
        tls: ssl.SSLContext | None = None,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.listener = listener = Listener(backend, bounds.limits)
        most = bounds.limits.max_header_bytes
        age_s, grace_s = (INF if ms is None else ms / 1000 for ms in (bounds.max_age_ms, bounds.max_age_grace_ms))
        receive = memoryview(bytearray(RECEIVE_BYTES + most))
        shared = SharedState(listener, dispatcher, MAX_STREAMS, most, age_s, grace_s, receive)
        self._tls = _with_h2(tls)
        self._server = SocketServer(listener, lambda: GrpcConnection(shared), b"", self._tls)
        self._drain = drain

    async def start(self, host: str, port: int, key: str) -> int:
        """Listens on a port, or on the socket of a `host` such as `unix:PATH`. Returns the bound port.

        Raises ConfigError, naming the configuration key `key`.
        """
        return (await self._server.start(host, port, key))[1]

    def reload_tls(self, fresh: ssl.SSLContext) -> None:
        """Uses another certificate for new connections, if the listener has TLS."""
        if self._tls is not None:
            _with_h2(fresh)
            replace_ssl_context(self._tls, fresh)

    async def close(self, drain_s: float) -> None:
        """Answers the calls that were sent, and drops those that are unfinished after `drain_s`."""
        self._drain()
        await self._server.close(drain_s)


def _with_h2(tls: ssl.SSLContext | None) -> ssl.SSLContext | None:
    """The same context, for HTTP/2: clients insist on its name in the handshake."""
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    return tls
