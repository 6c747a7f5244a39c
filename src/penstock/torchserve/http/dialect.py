"""How TorchServe's HTTP listeners speak: which route a request takes, whose token it needs, what every answer bears.

Source: what clients of TorchServe 0.12.0 see.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, cast
from urllib.parse import unquote

from penstock.errors import PenstockError
from penstock.serving.http.answers import MethodNotAllowed, RouteNotFound
from penstock.serving.http.exchange import Exchange, status_line
from penstock.serving.http.routes import check_framing, split_target
from penstock.serving.http.table import Table, remember
from penstock.serving.http.template import Route, Template
from penstock.torchserve.http import access
from penstock.torchserve.http.base import Administration, Face, Group
from penstock.torchserve.http.exchange import TorchServeExchange, new_id
from penstock.types import Headers

NO_CACHE: Final = (
    b"Pragma: no-cache\r\n"
    b"Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
_NOTHING: Final = Template("", "")


class GuardedRoute(Route, frozen=True):
    """A route and whose token opens it, "" for none; or why there is none, which only those learn who have it."""

    guard: str = ""
    refusal: type[PenstockError] | None = None


class TorchServeDialect:
    """The first of `templates` that fits path and method, whose token is asked for before anything else is told: also
    whether there is such a route. A path that is not there has the guard of the listener's first group.
    """

    guarded = True

    def __init__(self, administration: Administration, face: Face, templates: Sequence[Template]) -> None:
        logged = access.log.isEnabledFor(logging.INFO)  # asked once: a server that is not logged pays nothing for it
        self.exchange: type[Exchange] = access.LoggedExchange if logged else TorchServeExchange
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
        return self._search_for(method.decode("ascii"), segments, query)

    def _search_for(self, method: str, segments: list[str], query: bytes) -> GuardedRoute:
        wrong: Template | None = None
        for template, names in self._table.matches(segments):
            if template.methods is None or method in template.methods:
                return _route(template, names, query)
            if method == "OPTIONS" and template.codec:  # every way to a model describes it
                described = ["predictions", names["model"], *([names["version"]] if "version" in names else [])]
                if segments != described:
                    return self._search_for(method, described, query)
            wrong = wrong or template
        if wrong is not None:
            return GuardedRoute(_NOTHING, guard=wrong.guard, refusal=MethodNotAllowed)
        return GuardedRoute(_NOTHING, guard=self._guard, refusal=RouteNotFound)

    def read_head(self, exchange: Exchange, special: dict[bytes, bytes]) -> None:
        """Gives the request its id and the headers of its route. Raises ApiError without the token; RouteNotFound,
        MethodNotAllowed; what `check_framing` raises.
        """
        exchange.request_id = new_id()
        route = cast(GuardedRoute, exchange.route)
        if route.guard:
            self._administration.check_token(cast(Group, route.guard), special.get(b"authorization"))
        if route.refusal is not None:
            raise route.refusal("")
        if special:
            check_framing(special)
        exchange.headers += route.headers


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
    return GuardedRoute(template, names.get("model", ""), names.get("version"), names, headers, guard=template.guard)


def _cors(face: Face) -> bytes:
    allowed = (("Origin", face.cors_origin), ("Methods", face.cors_methods), ("Headers", face.cors_headers))
    return "".join(f"Access-Control-Allow-{name}: {value}\r\n" for name, value in allowed if value).encode("latin-1")
