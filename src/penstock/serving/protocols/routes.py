"""The native route table: the routes of every protocol, health checks and the OpenAPI document."""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import msgspec

from penstock._version import __version__
from penstock.core.contracts import Backend, Codec
from penstock.errors import PenstockError
from penstock.plugins import resolve
from penstock.serving.protocols import kserve, native, oip_json
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.route import Route, Template, error_body
from penstock.types import ItemResult, TensorSpec

_ERROR = {"description": "An error: a code and a message", "content": {"application/json": {"schema": {}}}}


def _ping(backend: Backend, route: Route) -> ItemResult:
    healthy = backend.ready()
    body = b'{"status":"Healthy"}' if healthy else b'{"status":"Unhealthy"}'
    return ItemResult(body=body, content_type=JSON, status=200 if healthy else 503)


def _openapi(backend: Backend, route: Route) -> ItemResult:
    return ItemResult(body=openapi_body(backend), content_type=JSON)


PING: Final = Template("/ping", "Whether every model can answer", answer=_ping, open=True)
TEMPLATES: Final = (
    *native.ROUTES,
    *oip_json.ROUTES,
    *kserve.ROUTES,
    PING,
    Template("/healthz", "Whether the server is alive", answer=oip_json.live, open=True),
    Template("/readyz", "Whether every model can answer", answer=oip_json.ready, open=True),
    Template("/openapi.json", "This document", answer=_openapi),
)


def error_body_of(route: Route | None, target: bytes) -> Callable[[PenstockError], bytes]:
    """The error format of a route; without a route, the format of the neighbouring routes."""
    if route is not None:
        return route.template.error_body
    return oip_json.error_body if target.startswith((b"/v1/", b"/v2/")) else error_body


# ---- the OpenAPI document


def openapi_body(backend: Backend) -> bytes:
    """The OpenAPI 3.1 document of the inference listener, with one path per loaded model."""
    paths: dict[str, Any] = {t.path: {"get": _get(t.summary)} for t in TEMPLATES if t.answer and "{" not in t.path}
    for name in sorted({status.name for status in backend.statuses() if status.state == "READY"}):
        inputs = _inputs(backend, name)
        for template in TEMPLATES:
            if "{version}" in template.path or "{model}" not in template.path:
                continue
            path = template.path.replace("{model}", quote(name, safe=""))
            summary = f"{template.summary}: {name}"
            if not template.codec:
                paths[path] = {"get": _get(summary)}
            else:
                paths[path] = dict.fromkeys(("post", "put"), _infer(summary, template.codec, inputs))
    document = {"openapi": "3.1.0", "info": {"title": "Penstock", "version": __version__}, "paths": paths}
    return msgspec.json.encode(document)


def _inputs(backend: Backend, name: str) -> tuple[TensorSpec, ...]:
    try:
        return backend.metadata(name, None)[0].inputs
    except PenstockError:  # the model has been unloaded
        return ()


def _get(summary: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {"summary": summary, "responses": {"200": {"description": "The answer", "content": content}}}


def _infer(summary: str, codec: str, inputs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    found: type[Codec] = resolve("codec", codec)
    content: dict[str, Any] = {kind: {"schema": {}} for kind in found.request_types}
    content["application/json"] = {"schema": found.request_schema(inputs)}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The answer of the model"}, "default": _ERROR},
    }
