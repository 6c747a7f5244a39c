"""The Thrift listener: connections on the loop of the engine, one clock for their timers, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend, Buffer, Ticket
from penstock.serving.http.binding import bind_error
from penstock.torchpipe.thrift.connection import Connection
from penstock.types import Item, Sink

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
