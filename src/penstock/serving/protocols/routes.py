"""The native route table: the routes of every protocol, health checks, and the headers that select among them."""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.serving.protocols import kserve, native, oip_routes, openai, openai_embeddings, openai_text
from penstock.serving.protocols.bodies import CONTENT_ENCODING, JSON
from penstock.serving.protocols.route import READINESS, Route, Template, error_body, json_route
from penstock.types import ItemResult


class Ping(Struct):
    """The body of /ping."""

    status: str


def _ping(backend: Backend, route: Route) -> ItemResult:
    healthy = backend.ready()
    body = b'{"status":"Healthy"}' if healthy else b'{"status":"Unhealthy"}'
    return ItemResult(body=body, content_type=JSON, status=200 if healthy else 503)


PING: Final = Template(
    "/ping", "Whether every model can answer", answer=_ping, open=True, response=Ping, statuses=READINESS
)
TEMPLATES: Final = (
    *native.ROUTES,
    *oip_routes.ROUTES,
    *kserve.ROUTES,
    *openai.ROUTES,
    *openai_text.ROUTES,
    *openai_embeddings.ROUTES,
    PING,
    json_route("/healthz", "Whether the server is alive", oip_routes.live, oip_routes.Live, open=True),
    json_route("/readyz", "Whether every model can answer", oip_routes.ready, oip_routes.Ready, open=True),
)


SPECIAL_NAMES: Final = frozenset(
    {
        b"accept", b"authorization", b"connection", b"expect", b"idempotency-key", b"origin", b"traceparent",
        b"transfer-encoding", b"x-deadline-ms", b"x-priority", b"x-request-id", CONTENT_ENCODING,
    }
    | {name for template in TEMPLATES for name in template.select_headers}
)  # fmt: skip
"""Headers that change how a request is handled; most requests have none of them."""
PLAIN_TYPE: Final = b"application/json"  # never selects another codec


def error_body_of(route: Route | None, target: bytes) -> Callable[[PenstockError], bytes]:
    """The error format of a route; without a route, the format of the neighbouring routes."""
    if route is not None:
        return route.template.error_body
    neighbours = {b"/v1/": openai.error_body, b"/v2/": oip_routes.error_body}
    return neighbours.get(target[:4], error_body)
