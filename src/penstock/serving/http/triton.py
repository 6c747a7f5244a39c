"""The routes of Triton's extensions on the inference listener."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.errors import BadRequest
from penstock.serving.http.admin import route
from penstock.serving.protocols.bodies import JSON, decode_json
from penstock.serving.protocols.oip_routes import error_body
from penstock.serving.protocols.route import HttpRequest, Serve, Template
from penstock.serving.triton.extensions import TritonExtensions
from penstock.serving.triton.settings import NO_CUDA, SharedMemory
from penstock.types import ItemResult

GUARD: Final = "management"  # of the routes that change the server


def triton_routes(triton: TritonExtensions) -> tuple[Template, ...]:
    """They precede the other routes: `/v2/models/stats` is no model."""
    server = (*_repository_routes(triton), *_settings_routes(triton), *_memory_routes(triton.memory))
    return (*_model_routes(triton), *server)


def _model_routes(triton: TritonExtensions) -> list[Template]:
    async def config(request: HttpRequest) -> ItemResult:
        return _json(triton.repository.model_config(*_names(request)))

    async def statistics(request: HttpRequest) -> ItemResult:
        return _json(triton.statistics(*_names(request)))

    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    return [
        _route("/v2/models/stats", "Statistics of all models", GET=statistics),
        *(_route(f"{path}/stats", "Statistics of a model", GET=statistics) for path in (model, version)),
        *(_route(f"{path}/config", "Triton's configuration of a model", GET=config) for path in (model, version)),
    ]


def _repository_routes(triton: TritonExtensions) -> list[Template]:
    repository = triton.repository

    async def index(request: HttpRequest) -> ItemResult:
        ready = _object(request).get("ready", False)
        if not isinstance(ready, bool):
            raise BadRequest(f"ready must be true or false, found {ready!r:.40}")
        return _json(await repository.index(ready))

    async def load(request: HttpRequest) -> ItemResult:
        await repository.load(request.names["model"], _parameters(request))
        return ItemResult(content_type=JSON)

    async def unload(request: HttpRequest) -> ItemResult:
        await repository.unload(request.names["model"], _parameters(request))
        return ItemResult(content_type=JSON)

    model = "/v2/repository/models/{model}"
    return [
        _route("/v2/repository/index", "All models of the repository", POST=index),
        _route(f"{model}/load", "Load a model of the repository", guard=GUARD, POST=load),
        _route(f"{model}/unload", "Unload a model", guard=GUARD, POST=unload),
    ]


def _settings_routes(triton: TritonExtensions) -> list[Template]:
    async def trace(request: HttpRequest) -> ItemResult:
        return _json(triton.trace_setting(request.names.get("model", ""), _object(request)))

    async def log(request: HttpRequest) -> ItemResult:
        return _json(triton.log_settings(_object(request)))

    paths = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")
    return [
        *(_route(path, "Trace settings", GET=trace, POST=trace) for path in paths),
        _route("/v2/logging", "Log settings", guard=GUARD, GET=log, POST=log),
    ]


class _Place(Struct):
    """The body of a registration."""

    key: str
    byte_size: int
    offset: int = 0


def _memory_routes(memory: SharedMemory) -> list[Template]:
    async def status(request: HttpRequest) -> ItemResult:
        return _json(memory.status(request.names.get("region", "")))

    async def register(request: HttpRequest) -> ItemResult:
        place = decode_json(request.body, _Place)
        memory.register(request.names["region"], place.key, place.offset, place.byte_size)
        return ItemResult(content_type=JSON)

    async def unregister(request: HttpRequest) -> ItemResult:
        memory.unregister(request.names.get("region", ""))
        return ItemResult(content_type=JSON)

    async def nothing(request: HttpRequest) -> ItemResult:
        return _json([]) if request.method == "GET" else ItemResult(content_type=JSON)

    async def no_cuda(request: HttpRequest) -> ItemResult:
        raise BadRequest(NO_CUDA)

    system, cuda = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    return [
        *(_route(f"{system}{part}/status", "Registered regions", GET=status) for part in ("", "/region/{region}")),
        *(_route(f"{system}{part}/unregister", "Forget regions", POST=unregister) for part in ("", "/region/{region}")),
        _route(f"{system}/region/{{region}}/register", "Register a region", POST=register),
        *(_route(f"{cuda}{part}/status", "No regions", GET=nothing) for part in ("", "/region/{region}")),
        *(_route(f"{cuda}{part}/unregister", "No regions", POST=nothing) for part in ("", "/region/{region}")),
        _route(f"{cuda}/region/{{region}}/register", "Refused", POST=no_cuda),
    ]


def _route(path: str, summary: str, *, guard: str = "", **functions: Serve) -> Template:
    return route(path, summary, guard=guard, error_body=error_body, **functions)


def _names(request: HttpRequest) -> tuple[str, str | None]:
    return request.names.get("model", ""), request.names.get("version")


def _json(value: object) -> ItemResult:
    return ItemResult(body=msgspec.json.encode(value), content_type=JSON)


def _object(request: HttpRequest) -> dict[str, Any]:
    """The JSON object of a body; an empty one without a body. Raises BadRequest."""
    if not request.body or request.method in ("GET", "HEAD"):
        return {}
    try:
        return msgspec.json.decode(request.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body must be a JSON object: {error}") from None


def _parameters(request: HttpRequest) -> dict[str, Any]:
    """The object `parameters` of a body. Raises BadRequest."""
    found = _object(request).get("parameters") or {}
    if not isinstance(found, dict):
        raise BadRequest(f"parameters must be an object, found {type(found).__name__}")
    return found
