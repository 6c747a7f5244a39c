"""The inference listener: an asyncio server of connections, one clock for all their timers, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Coroutine
from email.utils import formatdate
from typing import Any, Final

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.serving.http.binding import bind_error, free_path, path_error
from penstock.serving.http.connection import Connection
from penstock.serving.http.dialect import Dialect, NativeDialect
from penstock.serving.http.exchange import Exchange, status_line
from penstock.serving.http.gate import Gate
from penstock.serving.http.intake import BIG_BYTES
from penstock.serving.http.repeats import Repeats
from penstock.serving.http.serving import Serve, read_request, serve
from penstock.serving.http.template import Route

log = logging.getLogger("penstock.frontends")

RECEIVE_BYTES: Final = BIG_BYTES  # so a body that belongs into a Buffer is never read whole beside it
SWEEP_S: Final = 0.5
BACKLOG: Final = 2048
TLS_SHUTDOWN_S: Final = 2.0


class HttpServer:
    """Serves `backend` over HTTP/1.1 as `dialect` says, by default Penstock's own, which asks for one of `tokens`.

    All calls are made on one event loop's thread.

    Timers are deadlines on the connections, looked at by one sweep while there are connections: a request sets two or
    three floats and no timer. They are late by up to two sweeps, never early.
    """

    def __init__(
        self,
        backend: Backend,
        config: LimitsConfig,
        *,
        tokens: frozenset[bytes] = frozenset(),
        ssl: ssl.SSLContext | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.dialect = dialect or NativeDialect(tokens)
        self.known_routes = self.dialect.known
        self.guarded = self.dialect.guarded
        self.exchange = self.dialect.exchange
        self.closing = False
        self.special = False  # every head needs the long way: the server closes
        self.small_bytes = min(BIG_BYTES, config.max_body_bytes)
        self.receive = memoryview(bytearray(RECEIVE_BYTES))
        self.repeats = Repeats(backend, self.now)
        self.heads: dict[str, bytes] = {}
        self.date_line = b""
        self.plain_answers = 0  # answers of the plain case: 200
        self.other_answers = [0] * 10  # all other answers, by status // 100; handlers make up statuses to 999
        self.refused = 0  # connections that there was no room for
        self._tls: dict[str, Any] = {}
        if ssl is not None:
            self._tls = {
                "ssl": ssl,
                "ssl_handshake_timeout": config.header_timeout_s,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
            }
        refusal = self.dialect.no_tls() if ssl is not None else b""
        self._gate = Gate(self, self._tls, refusal) if refusal else None
        self._path: str | None = None
        self._connections: set[Connection] = set()
        self._stalled: dict[Connection, None] = {}  # wait for memory for a large body, first come first served
        self._told_when_free = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        timeouts = (config.header_timeout_s, config.body_timeout_s, config.idle_timeout_s, config.write_timeout_s)
        self._sweep_s = min(SWEEP_S, min(timeouts) / 4)
        self.header_at = self.body_at = self.idle_at = 0.0

    async def start(self, host: str, port: int, key: str = "server.port") -> tuple[str, int]:
        """The address really bound. Raises ConfigError naming `key` when it cannot be."""
        self._begin()
        try:
            if self._gate is not None:
                await self._gate.open(host, port, BACKLOG)
                bound = self._gate.sockets[0].getsockname()
            else:
                self._listener = await self._loop.create_server(
                    self.connection, host, port, backlog=BACKLOG, **self._tls
                )
                bound = self._listener.sockets[0].getsockname()
        except (OSError, UnicodeError) as exc:
            raise bind_error(host, port, exc, key) from None
        return str(bound[0]), int(bound[1])

    async def start_unix(self, path: str, key: str = "the address") -> None:
        """Listens on a Unix socket, which is removed by `close`. Raises ConfigError naming `key` when it cannot."""
        self._begin()
        free_path(path, key)
        try:
            self._listener = await self._loop.create_unix_server(self.connection, path, backlog=BACKLOG, **self._tls)
        except (OSError, ValueError) as exc:
            raise path_error(path, exc, key) from None
        self._path = path

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick()

    async def close(self, drain_s: float) -> None:
        """Takes no more connections, answers what is in flight, and drops what is left after `drain_s`."""
        end = asyncio.get_running_loop().time() + drain_s
        self.closing = self.special = True
        if self._listener is not None:
            self._listener.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if self._gate is not None:
            await self._gate.close()
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
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=max(0.0, end - self._loop.time()))
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def answers(self) -> dict[int, int]:
        """Answers that were begun, by status // 100."""
        counts = list(self.other_answers)
        counts[2] += self.plain_answers
        return {kind: n for kind, n in enumerate(counts) if n}

    # ---- what connections call

    def connection(self) -> Connection:
        """A protocol for a new connection."""
        return Connection(self)

    @property
    def full(self) -> bool:
        """Whether there is no room for another connection."""
        waiting = self._gate.waiting if self._gate is not None else 0
        return self.closing or len(self._connections) + waiting >= self.config.max_connections

    def add(self, connection: Connection) -> bool:
        """Counts a connection; False when there is no room for it."""
        if self.closing or len(self._connections) >= self.config.max_connections:
            self.refused += 1
            return False
        if self._sweep_timer is None:
            self._tick()
            connection.deadline = self.header_at
            self._sweep_timer = self._loop.call_later(self._sweep_s, self._sweep)
        self._connections.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """The connection is gone."""
        self._connections.discard(connection)
        if connection in self._stalled:
            del self._stalled[connection]
            self._feed()  # it may have been the one that the others waited behind
        if not self._connections:
            if self._sweep_timer is not None:
                self._sweep_timer.cancel()
                self._sweep_timer = None
            if self._empty is not None:
                self._empty.set()

    @property
    def stalled(self) -> bool:
        """Whether somebody waits for memory: who comes now waits behind them, or large bodies would wait for ever."""
        return bool(self._stalled)

    def stall(self, connection: Connection) -> None:
        """The connection waits for memory; its `reserve` is called when there may be some."""
        self._stalled[connection] = None
        self._wait_for_memory()

    def _wait_for_memory(self) -> None:
        if self._stalled and not self._told_when_free:
            self._told_when_free = True
            self.backend.when_free(self._memory_free)

    def _memory_free(self) -> None:
        self._told_when_free = False
        self._feed()

    def _feed(self) -> None:
        while self._stalled and (first := next(iter(self._stalled))).reserve():
            self._stalled.pop(first, None)
        self._wait_for_memory()

    def serve(self, function: Serve, exchange: Exchange, route: Route) -> None:
        """Answers by a function of a route, in a task that outlives the connection."""
        self.own(serve(function, read_request(exchange, route), exchange))

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs what `close` waits for."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def learn_head(self, content_type: str) -> bytes:
        """Everything of a plain answer's head before the length, kept until the date changes."""
        kind = f"content-type: {content_type}\r\n".encode("latin-1") if content_type else b""
        head = self.heads[content_type] = status_line(200) + self.date_line + kind + b"content-length: "
        if len(self.heads) > 256:  # a model that makes up content types
            self.heads.clear()
        return head

    def now(self) -> float:
        """The loop's time, s."""
        return self._loop.time()

    # ---- time

    def _tick(self) -> None:
        now = self._loop.time() + self._sweep_s
        config = self.config
        self.header_at = now + config.header_timeout_s
        self.body_at = now + config.body_timeout_s
        self.idle_at = now + config.idle_timeout_s
        date_line = f"date: {formatdate(usegmt=True)}\r\n".encode("ascii")
        if date_line != self.date_line:
            self.date_line = date_line
            self.heads.clear()

    def _sweep(self) -> None:
        self._sweep_timer = self._loop.call_later(self._sweep_s, self._sweep)
        self._tick()
        now = self._loop.time()
        for connection in list(self._connections):
            if connection.deadline <= now:
                connection.expire()
            if connection.write_at <= now + self.config.write_timeout_s:
                connection.check_writing(now)
