"""The native route table: the routes of every protocol, health checks and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock._version import __version__
from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.serving.protocols import native, oip_json
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.openapi import openapi_body
from penstock.serving.protocols.route import Route, Template, error_body
from penstock.types import ItemResult


def _ping(backend: Backend, route: Route) -> ItemResult:
    healthy = backend.ready()
    body = b'{"status":"Healthy"}' if healthy else b'{"status":"Unhealthy"}'
    return ItemResult(body=body, content_type=JSON, status=200 if healthy else 503)


def _openapi(backend: Backend, route: Route) -> ItemResult:
    return ItemResult(body=openapi_body(backend, __version__, TEMPLATES), content_type=JSON)


TEMPLATES: Final = (
    *native.ROUTES,
    *oip_json.ROUTES,
    Template("/ping", "Whether every model can answer", answer=_ping, open=True),
    Template("/healthz", "Whether the server is alive", answer=oip_json.live, open=True),
    Template("/readyz", "Whether every model can answer", answer=oip_json.ready, open=True),
    Template("/openapi.json", "This document", answer=_openapi),
)


def error_body_of(route: Route | None, target: bytes) -> Callable[[PenstockError], bytes]:
    """The error format of a route; without a route, the format of the neighbouring routes."""
    if route is not None:
        return route.template.error_body
    return oip_json.error_body if target.startswith(b"/v2/") else error_body
