"""How a listener speaks: which routes it has, who may come in, and how answers are written."""

from __future__ import annotations

from typing import Protocol

from penstock.serving.http.exchange import Exchange, status_line
from penstock.serving.http.routes import Router, check_method, read_special
from penstock.serving.http.table import remember
from penstock.serving.http.template import Route


class Dialect(Protocol):
    """What a `HttpServer` asks once for each head; how its answer is written is up to the class of `exchange`."""

    exchange: type[Exchange]
    known: dict[bytes, Route]  # inference routes by the target of a POST, which need no `find`
    guarded: bool  # `read_head` is called for every request, not only for those with a header of SPECIAL_NAMES

    def too_many(self) -> bytes:
        """The whole answer to a connection that there is no room for."""
        ...

    def no_tls(self) -> bytes:
        """The whole answer to plain HTTP where TLS is spoken; empty: there is none, the connection is dropped."""
        ...

    def find(self, exchange: Exchange, method: bytes, target: bytes) -> Route:
        """The route, also set on the exchange before what is wrong with the method is raised. Raises PenstockError."""
        ...

    def read_head(self, exchange: Exchange, special: dict[bytes, bytes]) -> None:
        """Checks who comes and what they wish, by the headers of SPECIAL_NAMES in lower case. Raises PenstockError."""
        ...


class NativeDialect:
    """Penstock's own routes, with bearer tokens."""

    exchange = Exchange

    def __init__(self, tokens: frozenset[bytes] = frozenset()) -> None:
        self.known: dict[bytes, Route] = {}
        self.guarded = bool(tokens)
        self._tokens = tokens
        self._router = Router()

    def too_many(self) -> bytes:
        """503, to be tried again in a second."""
        return status_line(503) + b"retry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

    def no_tls(self) -> bytes:
        """None."""
        return b""

    def find(self, exchange: Exchange, method: bytes, target: bytes) -> Route:
        """Raises RouteNotFound, BadRequest, MethodNotAllowed."""
        exchange.route = route = self._router.resolve(target)
        check_method(route, method)
        if route.template.codec:
            remember(self.known, target, route)
        return route

    def read_head(self, exchange: Exchange, special: dict[bytes, bytes]) -> None:
        """Raises Unauthorized, BadRequest, DeadlineExceeded, NotImplementedHere, ExpectationFailed."""
        assert exchange.route is not None
        read_special(exchange, exchange.route, special, self._tokens)
