"""The entrance of a listener that speaks TLS and tells those who do not: one byte is looked at before it is read."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from penstock.frontends.http.server import HttpServer

log = logging.getLogger("penstock.frontends")

HANDSHAKE: Final = b"\x16"  # the first byte of a TLS connection; no method of HTTP begins with it
LINGER_S: Final = 2.0  # how long a refused client is listened to, so that it reads the answer and not a reset


class Gate(asyncio.Protocol):
    """A connection until its first byte is known: then a TLS connection takes its place, or `refusal` is its answer."""

    def __init__(self, server: HttpServer, tls: dict[str, Any], refusal: bytes) -> None:
        self._server = server
        self._tls = tls
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._peek: socket.socket | None = None  # the same connection under another number, which the loop may watch
        self._timer: asyncio.TimerHandle | None = None
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Reads nothing: what is read here would be missing in the handshake."""
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.pause_reading()
        if not self._server.enter(self):
            transport.abort()
            return
        self._peek = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._peek.setblocking(False)
        self._loop.add_reader(self._peek, self._look)
        self._timer = self._loop.call_later(self._server.config.header_timeout_s, self.drop)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left, or its time was over; or it goes on under its other number."""
        self._transport = None
        if self._handshake is None:
            self._leave()

    def data_received(self, data: bytes) -> None:
        """What a refused client says is not looked at."""

    def drop(self) -> None:
        """Ends the connection, whatever it is at."""
        if self._handshake is not None:
            self._handshake.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _look(self) -> None:
        peek, transport = self._peek, self._transport
        assert peek is not None
        assert transport is not None
        try:
            first = peek.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        self._loop.remove_reader(peek)
        if first == HANDSHAKE:
            self._peek = None
            self._handshake = self._server.own(self._begin_tls(peek))
            transport.abort()
        elif first:
            transport.write(self._refusal)
            transport.write_eof()
            transport.resume_reading()
            assert self._timer is not None
            self._timer.cancel()
            self._timer = self._loop.call_later(LINGER_S, self.drop)
        else:
            transport.abort()

    async def _begin_tls(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._server.connection, connection, **self._tls)
        except OSError as exc:  # of which ssl.SSLError is one
            log.debug("event=no_tls error=%r consequence=connection_dropped", exc)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        self._server.leave(self)
        if self._peek is not None:
            self._loop.remove_reader(self._peek)
            self._peek.close()
            self._peek = None
        if self._timer is not None:
            self._timer.cancel()
