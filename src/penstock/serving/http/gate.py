"""The entrance of a listener that speaks TLS and tells those who do not: one byte is looked at before it is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from penstock.serving.http.server import HttpServer

log = logging.getLogger("penstock.frontends")

HANDSHAKE: Final = b"\x16"  # the first byte of a TLS connection; no method of HTTP begins with it
LINGER_S: Final = 2.0  # how long a refused client is listened to, so that it reads the answer and not a reset
PAUSE_S: Final = 1.0  # without accepting, when the system has no room for another connection


class Gate:
    """Accepts on sockets of its own. A connection that begins with a handshake is handed to the server's protocol, any
    other is answered with `refusal`, and one that begins with nothing is dropped after `header_timeout_s`.
    """

    def __init__(self, server: HttpServer, tls: dict[str, Any], refusal: bytes) -> None:
        self._server = server
        self._tls = tls
        self._refusal = refusal
        self._tasks: set[asyncio.Task[None]] = set()
        self.sockets: list[socket.socket] = []
        self.waiting = 0  # connections of which it is not known yet what they speak

    async def open(self, host: str, port: int, backlog: int) -> None:
        """Listens on every address of `host`. Raises OSError, UnicodeError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self.sockets.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.setblocking(False)
                listening.bind(address)
                listening.listen(backlog)
        except OSError:
            await self.close()
            raise
        for listening in self.sockets:
            self._own(self._accept(listening))

    async def close(self) -> None:
        """Takes nobody any more, and drops who is not through."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self.sockets:
            listening.close()

    def _own(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as exc:
                log.warning("event=no_accept error=%r consequence=clients_wait_%gs", exc, PAUSE_S)
                await asyncio.sleep(PAUSE_S)
                continue
            connection.setblocking(False)
            if self._server.full:
                self._server.refused += 1
                connection.close()
            else:
                self.waiting += 1
                self._own(self._admit(connection))

    async def _admit(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        taken = False
        try:
            async with asyncio.timeout(self._server.config.header_timeout_s):
                first = await _first_byte(connection)
            if first == HANDSHAKE:
                await loop.connect_accepted_socket(self._server.connection, connection, **self._tls)
                taken = True
            elif first:
                transport, refused = await loop.connect_accepted_socket(lambda: _Refused(self._refusal), connection)
                taken = True
                try:
                    await refused.gone
                finally:
                    transport.abort()
        except OSError as exc:  # ssl.SSLError and TimeoutError are some
            log.debug("event=no_tls error=%r consequence=connection_dropped", exc)
        finally:
            self.waiting -= 1
            if not taken:
                connection.close()


async def _first_byte(connection: socket.socket) -> bytes:
    """The first byte, which stays to be read; empty when the client has gone. Raises OSError."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            return connection.recv(1, socket.MSG_PEEK)
        readable = asyncio.Event()
        watched = connection.dup()  # what watches a number may outlive its use: the connection is to have its own
        try:
            loop.add_reader(watched, readable.set)
            await readable.wait()
        finally:
            loop.remove_reader(watched)
            watched.close()


class _Refused(asyncio.Protocol):
    """Writes the refusal; `gone` is done when the client has left, or was listened to for long enough."""

    def __init__(self, refusal: bytes) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refusal = refusal
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        transport.write(self._refusal)
        transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
