"""The access log of TorchServe's listeners: a line for each answer, at most 170 bytes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.serving.http.connection import Connection
from penstock.torchserve.http.exchange import TorchServeExchange
from penstock.types import ItemResult

if TYPE_CHECKING:
    from penstock.serving.http.answering import Answering
    from penstock.serving.http.server import HttpServer

log = logging.getLogger("ACCESS_LOG")

MOST_OF_TARGET: Final = 80  # bytes


class LoggedExchange(TorchServeExchange):
    """One that leaves `127.0.0.1:53124 "GET /ping HTTP/1.1" 200 3` when its answer is whole; the last is ms."""

    def __init__(self, connection: Answering) -> None:
        super().__init__(connection)
        assert isinstance(connection, Connection)
        self._began_s = connection.server.now()
        self._status = 0
        self._asked = "-"
        if connection.url:
            method = connection.parser.get_method().decode("ascii")
            target = connection.url[:MOST_OF_TARGET].decode("ascii", "backslashreplace")[:MOST_OF_TARGET]
            self._asked = f"{method} {target} HTTP/{connection.parser.get_http_version()}"
        peer = connection.transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix"

    def on_result(self, result: ItemResult) -> None:
        """The sink."""
        connection = self.connection
        super().on_result(result)
        if connection is not None and self.connection is None:
            took_ms = round(1000 * (connection.server.now() - self._began_s))
            log.info('%s "%s" %d %d', self._peer, self._asked, self._status, took_ms)

    def plain_head(self, server: HttpServer, result: ItemResult) -> bytes:
        """Notes the status."""
        self._status = result.status
        return super().plain_head(server, result)

    def head_lines(self, server: HttpServer, result: ItemResult, content_type: str) -> list[bytes]:
        """Notes the status."""
        self._status = result.status
        return super().head_lines(server, result, content_type)
