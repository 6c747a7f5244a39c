"""The listeners: an asyncio server of connections, with an orderly shutdown."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable
from typing import Any, Final

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.serving.http.connection import Connection
from penstock.serving.http.context import ApiFlavor
from penstock.serving.http.flavor import NativeFlavor
from penstock.serving.http.listener import Listener
from penstock.serving.http.sockets import (
    BACKLOG,
    TlsGate,
    bind_error,
    free_path,
    listening_sockets,
    path_error,
    stop_accepting,
)

TLS_SHUTDOWN_S: Final = 2.0


class SocketServer:
    """Accepts connections within the limits of `listener`, each with the protocol that `connect` makes.

    `no_tls` is what a client of a TLS port receives that does not begin a handshake. All calls run on one event loop's
    thread.
    """

    def __init__(
        self,
        listener: Listener,
        connect: Callable[[], asyncio.BaseProtocol],
        no_tls: bytes,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.listener = listener
        self.tls = tls
        self._connect = connect
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {
                "ssl": tls,
                "ssl_handshake_timeout": listener.config.header_timeout_s,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
            }
        # an event loop's own TLS server counts a connection only after its handshake: silent ones would be unbounded
        self._gate = TlsGate(listener, connect, self._tls, no_tls) if tls else None
        self._path: str | None = None
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, port: int, key: str = "server.port") -> tuple[str, int]:
        """Binds and returns the actual address. Raises ConfigError, naming `key`, if it cannot."""
        loop = self._begin(key)
        try:
            sockets = await listening_sockets(host, port)
        except (OSError, UnicodeError) as exc:
            raise bind_error(host, port, exc, key) from None
        bound = sockets[0].getsockname()
        if self._gate is not None:
            self._gate.open(sockets)
        else:
            self._servers = [await loop.create_server(self._connect, sock=s, backlog=BACKLOG) for s in sockets]
        return str(bound[0]), int(bound[1])

    async def start_unix(self, path: str, key: str = "the address") -> None:
        """Listens on a Unix socket; `close` removes it. Raises ConfigError, naming `key`, if it cannot."""
        loop = self._begin(key)
        free_path(path, key)
        try:
            self._servers = [await loop.create_unix_server(self._connect, path, backlog=BACKLOG, **self._tls)]
        except (OSError, ValueError) as exc:
            raise path_error(path, exc, key) from None
        self._path = path

    def _begin(self, key: str) -> asyncio.AbstractEventLoop:
        self.listener.port = key
        self.listener.clock.tick()
        return asyncio.get_running_loop()

    async def close(self, drain_s: float) -> None:
        """Accepts the connections that wait, then no more; answers what they and all others have sent.

        Drops the rest after `drain_s`.
        """
        listener = self.listener
        end = listener.now() + drain_s
        listener.start_closing(drain_s)
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        for server in self._servers:
            await stop_accepting(server, self._connect, self._tls, drain_s)
        if self._gate is not None:
            await self._gate.close(drain_s)
        await listener.drain(max(0.0, end - listener.now()))
        if listener.tasks:
            _, left = await asyncio.wait(listener.tasks, timeout=max(0.0, end - listener.now()))
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    @property
    def connections(self) -> int:
        return len(self.listener.connections)


class HttpServer(SocketServer):
    """Serves `backend` over HTTP/1.1 in an API flavor: Penstock's own by default, guarded by `tokens`."""

    def __init__(
        self,
        backend: Backend,
        config: LimitsConfig,
        *,
        tokens: frozenset[bytes] = frozenset(),
        ssl: ssl.SSLContext | None = None,
        flavor: ApiFlavor | None = None,
    ) -> None:
        self.flavor = found = flavor or NativeFlavor(tokens)
        listener = Listener(backend, config)
        super().__init__(listener, lambda: Connection(listener, found), found.no_tls, ssl)
