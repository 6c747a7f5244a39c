"""The Thrift listener: connections on the loop of the engine, one clock for their timers, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend, Buffer, Ticket
from penstock.errors import BadRequest, ModelNotReady, PenstockError
from penstock.serving.http.sockets import bind_error
from penstock.torchpipe.thrift import protocol as thrift
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.frontends")

SWEEP_S: Final = 0.5
BACKLOG: Final = 2048


class ThriftServer:
    """Serves `model` of `backend`. All calls are made on one event loop's thread.

    Timers are deadlines on the connections, looked at by one sweep while there are connections, as those of HTTP are.
    """

    def __init__(
        self, backend: Backend, model: str, limits: LimitsConfig, *, ssl: ssl.SSLContext | None = None
    ) -> None:
        self._backend = backend
        self._model = model
        self._limits = limits
        self._tls: dict[str, Any] = (
            {} if ssl is None else {"ssl": ssl, "ssl_handshake_timeout": limits.header_timeout_s}
        )
        self.most = limits.max_body_bytes
        self.refused = 0  # connections that there was no room for
        self._closing = False
        self._connections: set[Connection] = set()
        self._starved: dict[Connection, None] = {}  # wait for memory, first come first served
        self._listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        timeouts = (limits.body_timeout_s, limits.thrift_idle_timeout_s, limits.write_timeout_s)
        self._sweep_s = min(SWEEP_S, min(timeouts) / 4)
        self.body_at = self.idle_at = self.write_at = 0.0

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """The address really bound. Raises ConfigError when it cannot be."""
        self._loop = asyncio.get_running_loop()
        self._tick()
        try:
            self._listener = await self._loop.create_server(
                lambda: Connection(self), host, port, backlog=BACKLOG, **self._tls
            )
        except (OSError, UnicodeError) as exc:
            raise bind_error(host, port, exc, "server.thrift_port") from None
        bound = self._listener.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self, drain_s: float) -> None:
        """Takes no more connections, answers the calls that run, and drops what is left after `drain_s`."""
        self._closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close_soon()
        if self._connections:
            self._empty = asyncio.Event()
            try:
                await asyncio.wait_for(self._empty.wait(), drain_s)
            except TimeoutError:
                log.warning("event=drain_timeout connections=%d consequence=dropped", len(self._connections))
                for connection in list(self._connections):
                    connection.transport.abort()
                await self._empty.wait()

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    # ---- what connections call

    def add(self, connection: Connection) -> bool:
        """Counts a connection; False when there is no room for it."""
        if self._closing or len(self._connections) >= self._limits.max_connections:
            self.refused += 1
            return False
        if self._timer is None:
            self._tick()
            self._timer = self._loop.call_later(self._sweep_s, self._sweep)
        self._connections.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """The connection is gone."""
        self._connections.discard(connection)
        self._starved.pop(connection, None)
        if not self._connections:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._empty is not None:
                self._empty.set()

    def ready(self) -> bool:
        """Whether the model answers."""
        return not self._closing and self._backend.ready()

    def submit(self, item: Item, sink: Sink) -> Ticket:
        """Hands an item to the backend; see there."""
        return self._backend.submit(self._model, None, item, sink)

    def allocate(self, nbytes: int) -> Buffer | None:
        """Shared memory; None while it is short, or others wait for it."""
        return None if self._starved else self._backend.allocate(nbytes)

    def when_free(self, connection: Connection) -> None:
        """Calls `memory_free` of the connection when there may be some."""
        if not self._starved:
            self._backend.when_free(self._feed)
        self._starved[connection] = None

    def _feed(self) -> None:
        starved, self._starved = self._starved, {}
        for connection in starved:  # those that get none come back in their order
            connection.memory_free()

    def soon(self, function: Callable[[], None]) -> None:
        """Calls it in the loop's next pass."""
        self._loop.call_soon(function)

    # ---- time

    def _tick(self) -> None:
        now = self._loop.time() + self._sweep_s
        self.body_at = now + self._limits.body_timeout_s
        self.idle_at = now + self._limits.thrift_idle_timeout_s
        self.write_at = now + self._limits.write_timeout_s

    def _sweep(self) -> None:
        self._timer = self._loop.call_later(self._sweep_s, self._sweep)
        self._tick()
        now = self._loop.time()
        for connection in list(self._connections):
            if connection.deadline <= now:
                connection.expire()


log = logging.getLogger("penstock.frontends")

INF: Final = float("inf")
BIG_BYTES: Final = 64 * 1024  # data above it goes to the workers in shared memory, which bounds what all may send
MORE_BYTES: Final = 4096  # for what may stand behind the data in a call
AHEAD_BYTES: Final = 64 * 1024  # of later calls that are taken while one runs; then the socket is not read


class Connection(asyncio.Protocol):
    """Called by the event loop, by the server's sweep, and by the backend (`_answered`)."""

    transport: asyncio.Transport

    def __init__(self, server: ThriftServer) -> None:
        self._server = server
        self._arrived = bytearray()
        self._call: thrift.Call | None = None  # the one that arrives
        self._framed: bool | None = None  # None: nothing has come yet
        self._running: thrift.Call | None = None
        self._ticket: Ticket | None = None
        self._memory: Buffer | None = None  # for large data, from when it is announced until it is submitted
        self._paused = False
        self._choked = False  # the client does not take its answer
        self._ending = False
        self.deadline = INF

    # ---- called by the loop

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if not self._server.add(self):
            self._ending = True
            transport.abort()
            return
        self.deadline = self._server.idle_at

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending = True
        if self._ticket is not None:
            self._ticket.cancel()
        self._running = self._ticket = self._call = None
        self._let_go()
        self._server.remove(self)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        self._arrived += data
        if self._running is None and not self._choked:
            self._advance()
        elif len(self._arrived) > AHEAD_BYTES:
            self._pause()

    def pause_writing(self) -> None:
        self._choked = True
        self._pause()
        self.deadline = self._server.write_at

    def resume_writing(self) -> None:
        self._choked = False
        if not self._ending:
            self._next()

    # ---- called by the server

    def expire(self) -> None:
        """The time of what it does now is over. A client is not told: it may be in the middle of a call."""
        self.transport.abort()

    def close_soon(self) -> None:
        """Closes behind the call that runs."""
        self._ending = True
        if self._running is None:
            self._shut()

    # ---- calls

    def _advance(self) -> None:
        """Starts the call that is whole, or says how long the rest of it may take."""
        if not self._arrived:
            self.deadline = self._server.idle_at
            return
        if self._call is None:
            self._call = thrift.Call()
            self.deadline = self._server.body_at
        try:
            whole = len(self._arrived) >= self._call.need and self._read(self._call)
            if not whole:
                self._make_room(self._call)
        except PenstockError as error:  # where the next call begins is not known
            self._ending = True
            self._write(thrift.exception(self._call, thrift.PROTOCOL_ERROR, _told(error)))
            self._shut()
            return
        if whole:
            self._begin(self._call)

    def _read(self, call: thrift.Call) -> bool:
        arrived = self._arrived
        if self._framed is None:
            if len(arrived) < 6:
                call.need = 6
                return False
            self._framed = thrift.is_framed(arrived)
        if not self._framed:
            return call.read(arrived, 0, self._server.most)
        size = int.from_bytes(arrived[:4], "big")
        if size > self._server.most + thrift.HEAD_BYTES:
            raise BadRequest(f"found a frame of {size} bytes, at most {self._server.most} are taken")
        if len(arrived) < 4 + size:
            call.need = 4 + size
            return False
        if not call.read(arrived, 4, self._server.most) or call.end != 4 + size:
            raise BadRequest(f"found a frame of {size} bytes that is not one whole message")
        return True

    def _make_room(self, call: thrift.Call) -> None:
        """Has the memory of a large call ready before it has come, or waits for that: what is received is so bounded by
        the pool, however many clients send."""
        most = self._server.most
        there = 0 if self._memory is None else len(self._memory.view)
        if min(call.need, most) > max(BIG_BYTES, there):
            self._let_go()
            self._memory = self._server.allocate(min(call.need + MORE_BYTES, most))
            if self._memory is None:
                self.deadline = INF
                self._pause()
                self._server.when_free(self)

    def _begin(self, call: thrift.Call) -> None:
        """Answers a call or hands it to the backend; what stands behind it in the buffer stays there."""
        self.deadline = INF
        self._running = call
        if call.kind != thrift.CALL:
            self._fail(thrift.INVALID_MESSAGE_TYPE, f"found a message of type {call.kind}, expected a call (1)")
        elif call.method == b"ping":
            if self._server.ready():
                self._finish(thrift.reply(call, None))
            else:
                self._refuse(ModelNotReady("the server is loading or draining"))
        elif call.method != b"infer_batch":
            name = call.method[:100].decode("utf-8", "replace")
            self._fail(thrift.UNKNOWN_METHOD, f"unknown method '{name}', expected ping or infer_batch")
        elif call.data is None or call.uuid is None:
            missing = "data" if call.data is None else "uuid"
            self._fail(thrift.PROTOCOL_ERROR, f"bad_request: params has no {missing}, which is required")
        else:
            self._submit(call.uuid, *call.data)

    def _submit(self, uuid: bytes, start: int, end: int) -> None:
        try:
            payload: Any = self._payload(start, end)
            if payload is None:
                self._pause()
                self._server.when_free(self)
                return
            request_id = uuid.decode() if uuid.isascii() and uuid.decode().isprintable() and len(uuid) <= 128 else ""
            ticket = self._server.submit(Item(payload, "thrift", request_id=request_id), self._answered)
        except PenstockError as error:
            self._refuse(error)
        except Exception:
            log.exception("event=bug where=submit consequence=answered_with_an_error")
            self._refuse(PenstockError("internal error"))
        else:
            if self._running is not None:
                self._ticket = ticket

    def _payload(self, start: int, end: int) -> Any:
        """The data as bytes, or in shared memory; None while there is none."""
        with memoryview(self._arrived) as view:
            if end - start <= BIG_BYTES:
                return bytes(view[start:end])
            buffer, self._memory = self._memory or self._server.allocate(end - start), None
            if buffer is not None:
                buffer.shrink(end - start)
                buffer.view[:] = view[start:end]
            return buffer

    def _let_go(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()

    def memory_free(self) -> None:
        """There may be memory for the call that waits for it."""
        if self._running is not None and self._running.data is not None and self._running.uuid is not None:
            self._submit(self._running.uuid, *self._running.data)
        elif self._running is None and self._call is not None:
            self.deadline = self._server.body_at
            self._advance()
            if self._memory is not None:
                self._read_on()

    # ---- answers

    def _answered(self, result: ItemResult) -> None:
        """The sink. Parts before the final one have no place in an answer of Thrift's."""
        if not result.final or self._running is None:
            return
        if result.error is not None:
            self._refuse(result.error)
        elif not result.body:
            self._fail(thrift.INTERNAL_ERROR, "bad_output: the model streams its answer, which Thrift cannot take")
        else:
            self._finish(thrift.reply(self._running, bytes(result.body)))

    def _refuse(self, error: PenstockError) -> None:
        kind = thrift.PROTOCOL_ERROR if isinstance(error, BadRequest) else thrift.INTERNAL_ERROR
        self._fail(kind, _told(error))

    def _fail(self, kind: int, text: str) -> None:
        assert self._running is not None
        self._finish(thrift.exception(self._running, kind, text))

    def _finish(self, message: bytes) -> None:
        """Answers the call that runs, and goes on with what came meanwhile."""
        call, self._running, self._call, self._ticket = self._running, None, None, None
        assert call is not None
        del self._arrived[: call.end]
        self._let_go()
        self._write(message)
        if self._ending:
            self._shut()
        elif not self._choked:
            self._next()

    def _shut(self) -> None:
        """Closes when all is sent; a client that does not take it is dropped after the write timeout."""
        self.deadline = self._server.write_at
        self.transport.close()

    def _write(self, message: bytes) -> None:
        self.transport.write(len(message).to_bytes(4, "big") + message if self._framed else message)

    def _next(self) -> None:
        """The next call, in a pass of the loop of its own: many that came at once would else nest."""
        self._read_on()
        if self._arrived:
            self._server.soon(self._resume)
        else:
            self.deadline = self._server.idle_at

    def _resume(self) -> None:
        if self._running is None and not self._choked and not self._ending:
            self._advance()

    def _read_on(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()


def _told(error: PenstockError) -> str:
    return f"{error.code}: {error.message}"
