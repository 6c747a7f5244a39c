"""The management and metrics APIs of the native server, as route tables of a `HttpServer`."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from penstock.core.contracts import Backend, ManagementBackend
from penstock.errors import BadRequest, Forbidden, ModelNotFound, nearest
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.route import HttpRequest, Serve, Template, methods_route
from penstock.serving.protocols.routes import PING
from penstock.types import ItemResult, ModelStatus

MOST_BATCHES: Final = 1000  # in one response of /debug/batches

# examples in the errors of bodies
_TARGET: Final = '{"target": "app.py:Model"}'
_INSTANCES: Final = '{"instances": 2}'
_DRAIN: Final = '{"drained": true}'
_VERSION: Final = '{"version": "2"}'
_WEIGHTS: Final = '{"1": 0.9, "2": 0.1}'

T = TypeVar("T")


def metrics_routes(
    scrape: Callable[[bytes], Awaitable[tuple[bytes, str]]], batches: Callable[[str | None, int], bytes]
) -> tuple[Template, ...]:
    """GET /metrics: the result of `scrape`, which receives the header Accept. GET /debug/batches: recent batches as
    JSON.

    `batches` receives ?model= (None: all models) and ?limit= (1 to 1000, default 100), newest first.
    """

    async def metrics(request: HttpRequest) -> ItemResult:
        accepted = b",".join(value for name, value in request.headers if name.lower() == b"accept")
        body, content_type = await scrape(accepted)
        return ItemResult(body=body, content_type=content_type)

    async def last_batches(request: HttpRequest) -> ItemResult:
        asked = {key: values[-1] for key, values in request.query.items()}
        unknown = next((key for key in asked if key not in ("model", "limit")), None)
        if unknown is not None:
            raise BadRequest(f"unknown parameter {unknown[:100]!r}{nearest(unknown[:100], ('model', 'limit'))}")
        limit = asked.get("limit", "100")
        if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MOST_BATCHES:
            raise BadRequest(f"limit is {limit[:100]!r}, expected a whole number from 1 to {MOST_BATCHES}")
        return ItemResult(batches(asked.get("model"), int(limit)), JSON)

    return (
        methods_route("/metrics", "Metrics in the Prometheus text format", GET=metrics),
        methods_route("/debug/batches", "The last batches, with the reason for the size of each", GET=last_batches),
    )


# ---- the management API


class _Scale(Struct, forbid_unknown_fields=True):
    instances: int


class _Drain(Struct, forbid_unknown_fields=True):
    drained: bool


class _Default(Struct, forbid_unknown_fields=True):
    version: str


Change = Callable[[ManagementBackend, str, str | None, bytes], Awaitable[object]]  # manager, model, version, body


def management_routes(backend: Backend, management: ManagementBackend | None) -> tuple[Template, ...]:
    """The routes that list and change models, and GET /ping. Without `management` every change is refused."""
    statuses = backend.statuses if management is None else management.statuses

    async def models(request: HttpRequest) -> ItemResult:
        return _json({"models": _sorted(statuses())})

    async def model(request: HttpRequest) -> ItemResult:
        name = request.names["model"]
        return _json({"name": name, "versions": _versions(statuses(), name)})

    async def version(request: HttpRequest) -> ItemResult:
        name, number = request.names["model"], request.names["version"]
        versions = _versions(statuses(), name)
        found = next((status for status in versions if status.version == number), None)
        if found is None:
            known = ", ".join(dict.fromkeys(status.version for status in versions))
            raise ModelNotFound(f"model '{name[:100]}' has no version '{number[:100]}'; it has {known}")
        learned = {} if management is None else management.learned(name, number)
        return _json({**msgspec.structs.asdict(found), "batching": learned})

    def change(apply: Change) -> Serve:
        """A function that returns the resulting state of the model, whose last version it may have unloaded."""

        async def serve(request: HttpRequest) -> ItemResult:
            if management is None:
                raise Forbidden("changing models is off: set management = true in [server]")
            management.check_open()
            name = request.names["model"]
            await apply(management, name, request.names.get("version"), request.body)
            return _json({"name": name, "versions": _sorted([s for s in statuses() if s.name == name])})

        return serve

    put = change(lambda to, model, version, body: to.put(model, version, _read(body, dict[str, Any], _TARGET)))
    unload = change(lambda to, model, version, body: to.unload(model, version))
    scale = change(lambda to, model, version, body: to.scale(model, version, _read(body, _Scale, _INSTANCES).instances))
    drain = change(lambda to, model, version, body: to.drain(model, version or "", _read(body, _Drain, _DRAIN).drained))
    default = change(lambda to, model, version, body: to.set_default(model, _read(body, _Default, _VERSION).version))
    traffic = change(lambda to, model, version, body: to.set_traffic(model, _read(body, dict[str, float], _WEIGHTS)))
    return (
        PING,
        methods_route("/models", "All models", GET=models),
        methods_route("/models/{model}", "A model", GET=model, PUT=put, DELETE=unload),
        methods_route("/models/{model}/scale", "The number of instances", PUT=scale),
        methods_route("/models/{model}/default", "The default version", PUT=default),
        methods_route("/models/{model}/traffic", "The weights of the versions", PUT=traffic),
        methods_route("/models/{model}/{version}", "A version of a model", GET=version, PUT=put, DELETE=unload),
        methods_route("/models/{model}/{version}/scale", "The number of instances of a version", PUT=scale),
        methods_route("/models/{model}/{version}/drain", "Whether a version takes new requests", PUT=drain),
    )


def _versions(statuses: Sequence[ModelStatus], name: str) -> list[ModelStatus]:
    """The versions of a model. Raises ModelNotFound."""
    if found := [status for status in statuses if status.name == name]:
        return _sorted(found)
    raise ModelNotFound(f"no model '{name[:100]}' is loaded{nearest(name[:100], {s.name for s in statuses})}")


def _sorted(statuses: Sequence[ModelStatus]) -> list[ModelStatus]:
    return sorted(statuses, key=lambda status: (status.name, status.version))


def _json(value: object) -> ItemResult:
    return ItemResult(msgspec.json.encode(value), JSON)


def _read(body: bytes, kind: type[T], example: str) -> T:
    """The body of a change. Raises BadRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is invalid: {e}; expected, for example, {example}") from None
