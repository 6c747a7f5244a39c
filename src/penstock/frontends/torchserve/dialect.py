"""How TorchServe's HTTP listeners speak: their order of routes, their tokens, and the heads of their answers.

Source: what clients of TorchServe 0.12.0 see.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote

from penstock.errors import PenstockError
from penstock.frontends.http.answers import REASONS, MethodNotAllowed, RouteNotFound
from penstock.frontends.http.exchange import Exchange, status_line
from penstock.frontends.http.routes import check_framing, split_target
from penstock.frontends.http.table import Table, remember
from penstock.frontends.http.template import Route, Template
from penstock.frontends.torchserve.base import Administration, Face, Group
from penstock.frontends.torchserve.errors import api_error
from penstock.frontends.torchserve.inference import JSON
from penstock.protocols.torchserve.bodies import error_body
from penstock.types import Headers, Item, ItemResult

if TYPE_CHECKING:
    from penstock.frontends.http.server import HttpServer

NO_CACHE: Final = (
    b"Pragma: no-cache\r\n"
    b"Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
OWN_HEADERS: Final = frozenset(
    ["x-request-id", "pragma", "cache-control", "expires", "connection", "content-length", "transfer-encoding"]
)
_NOTHING: Final = Template("", "")


class GuardedRoute(Route, frozen=True):
    """A route and whose token opens it, "" for none; or why there is none, which only those learn who have it."""

    guard: str = ""
    refusal: type[PenstockError] | None = None


class TorchServeExchange(Exchange):
    """One request and its answer as TorchServe writes it."""

    def item(self, route: Route) -> Item:
        """The request for the codec of the face, under the id that its answer carries."""
        self.request_id = request_id = new_id()
        headers = self.headers + route.headers
        return Item(self.payload, route.template.codec, self.content_type, 1, False, request_id, headers)

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


class TorchServeDialect:
    """The first of `templates` that fits path and method, whose token is asked for before anything else is told: also
    whether there is such a route. A path that is not there has the guard of the listener's first group.
    """

    guarded = True

    def __init__(self, administration: Administration, face: Face, templates: Sequence[Template]) -> None:
        self.exchange: type[Exchange] = TorchServeExchange
        self.known: dict[bytes, Route] = {}
        self.fixed = NO_CACHE + _cors(face)
        self._administration = administration
        self._others: dict[bytes, Route] = {}  # inference routes by method and target
        self._table = Table(templates)
        guards: tuple[Group, ...] = ("inference", "management")
        self._guard = next((group for group in guards if group in face.groups), "")

    def too_many(self) -> bytes:
        """503, to be tried again in a second."""
        return status_line(503) + b"retry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

    def no_tls(self) -> bytes:
        """403, with the whole message in its first line."""
        first = status_line(403, "This TorchServe instance only accepts HTTPS requests")
        return b"%b%bcontent-length: 0\r\nconnection: close\r\n\r\n" % (first, self.fixed)

    def find(self, exchange: Exchange, method: bytes, target: bytes) -> Route:
        """Refuses nothing: that is left to `read_head`."""
        key = b"%b %b" % (method, target)
        route = self._others.get(key)
        if route is None:
            route = self._search(method, target)
            if route.template.codec:
                known, key = (self.known, target) if method == b"POST" else (self._others, key)
                remember(known, key, route)
        exchange.route = route
        return route

    def _search(self, method: bytes, target: bytes) -> GuardedRoute:
        segments, query = _segments(target)
        name = method.decode("ascii")
        wrong: Template | None = None
        for template, names in self._table.matches(segments):
            if template.methods is None or name in template.methods:
                return _route(template, names, query)
            wrong = wrong or template
        if wrong is not None:
            return GuardedRoute(_NOTHING, guard=wrong.guard, refusal=MethodNotAllowed)
        return GuardedRoute(_NOTHING, guard=self._guard, refusal=RouteNotFound)

    def read_head(self, exchange: Exchange, special: dict[bytes, bytes]) -> None:
        """Raises ApiError without the token; RouteNotFound, MethodNotAllowed; what no listener of ours does."""
        route = cast(GuardedRoute, exchange.route)
        if route.guard:
            self._administration.check_token(cast(Group, route.guard), special.get(b"authorization"))
        if route.refusal is not None:
            raise route.refusal("")
        check_framing(special)


_UNROUTED: Final = Route(_NOTHING)


def _segments(target: bytes) -> tuple[list[str], bytes]:
    """The path as TorchServe parts it: an encoded slash counts, slashes at the end do not; and the raw query."""
    path, query = split_target(target)
    segments = unquote(path.decode("latin-1"), errors="replace").split("/")[1:]
    while len(segments) > 1 and not segments[-1]:
        segments.pop()
    return segments, query


def _route(template: Template, names: dict[str, str], query: bytes) -> GuardedRoute:
    headers: Headers = list(template.headers)
    if "url_path" in names:
        headers[-1] = (b"url_path", names["url_path"].encode())
    if template.query and query:
        headers.append((b":query", query))
    return GuardedRoute(template, names.get("model", ""), names.get("version"), names, headers, template.guard)


def _cors(face: Face) -> bytes:
    allowed = (("Origin", face.cors_origin), ("Methods", face.cors_methods), ("Headers", face.cors_headers))
    return "".join(f"Access-Control-Allow-{name}: {value}\r\n" for name, value in allowed if value).encode("latin-1")


def _ids() -> Callable[[], str]:
    bits = random.Random().getrandbits  # seeded by the system once: an id need not be hard to guess

    def new() -> str:
        h = f"{bits(128):032x}"
        return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[int(h[16], 16) & 3]}{h[17:20]}-{h[20:]}"

    return new


new_id: Final = _ids()
"""A fresh UUID of version 4, from random bits without a call of the system."""
