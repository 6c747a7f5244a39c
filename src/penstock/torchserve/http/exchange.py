"""One request to a TorchServe listener, and its answer as TorchServe writes it.

Source: what clients of TorchServe 0.12.0 see.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from penstock.errors import PenstockError
from penstock.serving.http.answers import REASONS
from penstock.serving.http.exchange import Exchange, status_line
from penstock.serving.http.template import Route, Template
from penstock.torchserve.http.errors import api_error
from penstock.torchserve.http.inference import JSON
from penstock.torchserve.protocol.bodies import error_body
from penstock.types import ItemResult

if TYPE_CHECKING:
    from penstock.serving.http.server import HttpServer
    from penstock.torchserve.http.dialect import TorchServeDialect

OWN_HEADERS: Final = frozenset(
    {
        "cache-control", "connection", "content-length", "content-type", "expires", "pragma", "transfer-encoding",
        "ts_stream_next", "x-request-id",
    }
)  # fmt: skip
_UNROUTED: Final = Route(Template("", ""))


class TorchServeExchange(Exchange):
    """One request and its answer as TorchServe writes it."""

    def plain_head(self, server: HttpServer, result: ItemResult) -> bytes:
        """Only an inference that keeps the connection comes here often."""
        kind = f"content-type: {result.content_type}\r\n".encode("latin-1") if result.content_type else b""
        first, fixed = self._status_line(result), cast("TorchServeDialect", server.dialect).fixed
        return b"%b%bx-request-id: %b\r\n%bconnection: keep-alive\r\ncontent-length: " % (
            first,
            kind,
            self._id(),
            fixed,
        )

    def head_lines(self, server: HttpServer, result: ItemResult, content_type: str) -> list[bytes]:
        """As every answer: the connection ends with any that is an error."""
        self.close = self.close or result.status >= 400
        lines = [self._status_line(result)]
        for name, value in result.headers or ():
            if name.lower() not in OWN_HEADERS:
                lines.append(f"{name}: {value}\r\n".encode("latin-1"))
        if self.started:
            lines.append(b"ts_stream_next: true\r\n")
        if content_type:
            lines.append(f"content-type: {content_type}\r\n".encode("latin-1"))
        lines.append(b"x-request-id: %b\r\n" % self._id())
        lines.append(cast("TorchServeDialect", server.dialect).fixed)
        lines.append(b"connection: close\r\n" if self.close else b"connection: keep-alive\r\n")
        return lines

    def failure(self, server: HttpServer, error: PenstockError) -> ItemResult:
        """The error as JSON; a body that is too large is refused without a word."""
        route = self.route or _UNROUTED
        found = api_error(error, server.backend, route.model, route.version)
        reason = REASONS.get(found.status, "")
        if found.status == 413:
            return ItemResult(status=413, reason=reason)
        body = error_body(found.status, found.kind, found.message)
        return ItemResult(body=body, content_type=JSON, status=found.status, reason=reason)

    def part_type(self, result: ItemResult) -> str:
        """None, unless the handler set one."""
        return result.content_type

    def part_data(self, result: ItemResult) -> bytes:
        """A chunk is what the handler sent, as it is."""
        return bytes(result.body)

    def _id(self) -> bytes:
        if not self.request_id:
            self.request_id = new_id()
        return self.request_id.encode("ascii")

    def _status_line(self, result: ItemResult) -> bytes:
        """The phrase of a prediction is the handler's, or none."""
        if result.reason is None and self.route is not None and self.route.template.codec:
            return b"HTTP/1.1 %d \r\n" % result.status
        return status_line(result.status, result.reason)


def _ids() -> Callable[[], str]:
    bits = random.Random().getrandbits  # seeded by the system once: an id need not be hard to guess

    def new() -> str:
        h = bits(128).to_bytes(16, "big").hex()
        return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[bits(2)]}{h[17:20]}-{h[20:]}"

    return new


new_id: Final = _ids()
"""A fresh UUID of version 4, from random bits without a call of the system."""
