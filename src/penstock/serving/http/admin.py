"""The management and metrics APIs of the native server, as route tables of a `HttpServer`."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from penstock.core.contracts import Backend, ManagementBackend
from penstock.errors import BadRequest, Forbidden, ModelNotFound, nearest
from penstock.serving.http import admin
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.route import HttpRequest, Serve, Template, methods_route
from penstock.serving.protocols.routes import PING
from penstock.types import ItemResult, ModelStatus

T = TypeVar("T")


class _Scale(Struct, forbid_unknown_fields=True):
    instances: int


class _Default(Struct, forbid_unknown_fields=True):
    version: str


# ---- responses


def models_body(statuses: Sequence[ModelStatus]) -> bytes:
    """`{"models": [...]}`: every version of every model, sorted by name."""
    return msgspec.json.encode({"models": _sorted(statuses)})


def model_body(statuses: Sequence[ModelStatus], name: str) -> bytes:
    """`{"name", "versions": [...]}` of a model. Raises ModelNotFound."""
    versions = [s for s in statuses if s.name == name]
    if not versions:
        raise ModelNotFound(f"no model '{name[:100]}' is loaded{nearest(name[:100], {s.name for s in statuses})}")
    return changed_body(versions, name)


def changed_body(statuses: Sequence[ModelStatus], name: str) -> bytes:
    """`model_body` without the check: a change may have unloaded the last version."""
    return msgspec.json.encode({"name": name, "versions": _sorted([s for s in statuses if s.name == name])})


def version_body(statuses: Sequence[ModelStatus], name: str, version: str, statistics: Mapping[str, object]) -> bytes:
    """The status of a version; "batching" holds the state of its scheduler. Raises ModelNotFound."""
    model_body(statuses, name)
    found = [s for s in statuses if (s.name, s.version) == (name, version)]
    if not found:
        versions = ", ".join(dict.fromkeys(s.version for s in statuses if s.name == name))
        raise ModelNotFound(f"model '{name[:100]}' has no version '{version[:100]}'; it has {versions}")
    return msgspec.json.encode({**msgspec.structs.asdict(found[0]), "batching": statistics})


def _sorted(statuses: Sequence[ModelStatus]) -> list[ModelStatus]:
    return sorted(statuses, key=lambda s: (s.name, s.version))


# ---- requests; every reader raises BadRequest


def read_keys(body: bytes) -> dict[str, Any]:
    """The keys of `[models.NAME]`."""
    return _read(body, dict[str, Any], '{"target": "app.py:Model"}')


def read_instances(body: bytes) -> int:
    """The number in `{"instances": n}`."""
    return _read(body, _Scale, '{"instances": 2}').instances


def read_version(body: bytes) -> str:
    """The version in `{"version": v}`."""
    return _read(body, _Default, '{"version": "2"}').version


def read_weights(body: bytes) -> dict[str, float]:
    """The weights by version, such as `{"1": 0.9, "2": 0.1}`."""
    return _read(body, dict[str, float], '{"1": 0.9, "2": 0.1}')


def _read(body: bytes, kind: type[T], example: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is invalid: {e}; expected, for example, {example}") from None


MOST_BATCHES: Final = 1000  # in one response of /debug/batches
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Change = Callable[[ManagementBackend, HttpRequest], Awaitable[None]]


def metrics_routes(
    scrape: Callable[[], Awaitable[bytes]], batches: Callable[[str | None, int], bytes]
) -> tuple[Template, ...]:
    """GET /metrics: the result of `scrape`, in the Prometheus text format. GET /debug/batches: recent batches as JSON.

    `batches` receives ?model= (None: all models) and ?limit= (1 to 1000, default 100), newest first.
    """

    async def metrics(request: HttpRequest) -> ItemResult:
        return ItemResult(body=await scrape(), content_type=METRICS_TYPE)

    async def last_batches(request: HttpRequest) -> ItemResult:
        asked = {key: values[-1] for key, values in request.query.items()}
        unknown = next((key for key in asked if key not in ("model", "limit")), None)
        if unknown is not None:
            raise BadRequest(f"unknown parameter {unknown[:100]!r}{nearest(unknown[:100], ('model', 'limit'))}")
        limit = asked.get("limit", "100")
        if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MOST_BATCHES:
            raise BadRequest(f"limit is {limit[:100]!r}, expected a whole number from 1 to {MOST_BATCHES}")
        return _json(batches(asked.get("model"), int(limit)))

    return (
        methods_route("/metrics", "Metrics in the Prometheus text format", GET=metrics),
        methods_route("/debug/batches", "The last batches, with the reason for the size of each", GET=last_batches),
    )


def management_routes(backend: Backend, management: ManagementBackend | None) -> tuple[Template, ...]:
    """The routes that list and change models, and GET /ping. Without `management` every change is refused."""
    statuses = backend.statuses if management is None else management.statuses

    async def models(request: HttpRequest) -> ItemResult:
        return _json(admin.models_body(statuses()))

    async def model(request: HttpRequest) -> ItemResult:
        return _json(admin.model_body(statuses(), request.names["model"]))

    async def version(request: HttpRequest) -> ItemResult:
        name, number = request.names["model"], request.names["version"]
        learned = {} if management is None else management.learned(name, number)
        return _json(admin.version_body(statuses(), name, number, learned))

    def change(apply: Change) -> Serve:
        """A function that answers with the resulting state of the model."""

        async def serve(request: HttpRequest) -> ItemResult:
            if management is None:
                raise Forbidden("changing models is off: set management = true in [server]")
            management.check_open()
            await apply(management, request)
            return _json(admin.changed_body(statuses(), request.names["model"]))

        return serve

    put, unload, scale = change(_put), change(_unload), change(_scale)
    return (
        PING,
        methods_route("/models", "All models", GET=models),
        methods_route("/models/{model}", "A model", GET=model, PUT=put, DELETE=unload),
        methods_route("/models/{model}/scale", "The number of instances", PUT=scale),
        methods_route("/models/{model}/default", "The default version", PUT=change(_set_default)),
        methods_route("/models/{model}/traffic", "The weights of the versions", PUT=change(_set_traffic)),
        methods_route("/models/{model}/{version}", "A version of a model", GET=version, PUT=put, DELETE=unload),
        methods_route("/models/{model}/{version}/scale", "The number of instances of a version", PUT=scale),
    )


def _json(body: bytes) -> ItemResult:
    return ItemResult(body=body, content_type=JSON)


async def _put(management: ManagementBackend, request: HttpRequest) -> None:
    await management.put(*_names(request), admin.read_keys(request.body))


async def _unload(management: ManagementBackend, request: HttpRequest) -> None:
    await management.unload(*_names(request))


async def _scale(management: ManagementBackend, request: HttpRequest) -> None:
    await management.scale(*_names(request), admin.read_instances(request.body))


async def _set_default(management: ManagementBackend, request: HttpRequest) -> None:
    await management.set_default(request.names["model"], admin.read_version(request.body))


async def _set_traffic(management: ManagementBackend, request: HttpRequest) -> None:
    await management.set_traffic(request.names["model"], admin.read_weights(request.body))


def _names(request: HttpRequest) -> tuple[str, str | None]:
    return request.names["model"], request.names.get("version")
