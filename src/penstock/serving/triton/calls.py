"""Triton's extensions of a server: one table of calls, answered over HTTP and over gRPC.

A call takes its arguments from the path and the JSON object of an HTTP request, or from a message, and returns the JSON
form of Triton's messages. It raises PenstockError.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Struct, field

from penstock.config.schema import Config
from penstock.core.contracts import ManagementBackend
from penstock.core.engine.engine import Engine
from penstock.errors import BadRequest
from penstock.serving.logs import ServerLog
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.oip_routes import error_body
from penstock.serving.protocols.route import HttpRequest, Serve, Template, methods_route
from penstock.serving.triton.repository import ModelRepository
from penstock.serving.triton.settings import LogSettings, SharedMemory, trace_setting
from penstock.serving.triton.statistics import ModelStatistics
from penstock.types import ItemResult

GUARD: Final = "management"  # of the calls that change the server
NO_CUDA: Final = "CUDA shared memory is not supported; register system shared memory, or send tensors in the request"


class TritonExtensions:
    """The state behind the calls.

    `repository` has the models: their configuration, the index, load and unload. `memory` has the shared memory.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        management: ManagementBackend,
        statistics: ModelStatistics,
        log: ServerLog,
    ) -> None:
        self.repository = ModelRepository(engine, config, management)
        self.memory = SharedMemory(config.server.shared_memory, config.limits.max_body_bytes)
        self._engine = engine
        self._management = management
        self._statistics = statistics
        self._log_settings = LogSettings(log)

    def statistics(self, name: str, version: str | None) -> dict[str, Any]:
        """`model_stats` of one version, of all versions of a model, or with an empty name of all models.

        Raises ModelNotFound.
        """
        if name:
            self._engine.handle(name, version)
        statuses = [s for s in self._engine.statuses() if name in ("", s.name) and version in (None, s.version)]
        return {"model_stats": [self._statistics.of(s.name, s.version).body(s.name, s.version) for s in statuses]}

    def trace_setting(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The trace settings of a model, or with an empty name of the server. Raises ModelNotFound, BadRequest."""
        if name:
            self._engine.handle(name, None)
        return trace_setting(changes)

    def log_settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The log settings after the changes. Raises BadRequest, and the errors of every change of the server."""
        if changes:
            self._management.check_open()
        return self._log_settings.change(changes)


# ---- the table


class Arguments(Struct):
    """The arguments of a call: the name of a model or region, "" for all; a version; and the other values by name."""

    name: str = ""
    version: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


class TritonCall(Struct, frozen=True):
    """A call by its name in gRPC, with its HTTP paths.

    `run` answers it; the result None means a response without a body. `message` makes a gRPC message, as JSON, of the
    result. The arguments' values are the object at the key `within` of the body, or the body.
    """

    name: str
    run: Callable[[TritonExtensions, Arguments], Any | Awaitable[Any]]
    paths: tuple[str, ...]
    methods: tuple[str, ...] = ("GET",)
    message: Callable[[Any], Any] = lambda value: value
    guard: str = ""
    within: str = ""


def _index(triton: TritonExtensions, given: Arguments) -> Awaitable[Any]:
    ready = given.values.get("ready", False)
    if not isinstance(ready, bool):
        raise BadRequest(f"ready must be true or false, found {ready!r:.40}")
    return triton.repository.index(ready)


class _Place(Struct):
    """The values of a registration."""

    key: str
    byte_size: int
    offset: int = 0


def _register(triton: TritonExtensions, given: Arguments) -> None:
    try:
        place = msgspec.convert(given.values, _Place)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the region has the wrong form: {error}") from None
    triton.memory.register(given.name, place.key, place.offset, place.byte_size)


def _no_cuda(triton: TritonExtensions, given: Arguments) -> NoReturn:
    raise BadRequest(NO_CUDA)


def _log_message(settings: dict[str, Any]) -> dict[str, Any]:
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {name: {kinds[type(value)]: value} for name, value in settings.items()}}


def _trace_message(settings: dict[str, Any]) -> dict[str, Any]:
    texts = {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
    return {"settings": {name: {"value": value} for name, value in texts.items()}}


_MODELS: Final = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_STORED: Final = "/v2/repository/models/{model}"
_SYSTEM: Final = ("/v2/systemsharedmemory", "/v2/systemsharedmemory/region/{region}")
_CUDA: Final = ("/v2/cudasharedmemory", "/v2/cudasharedmemory/region/{region}")


def _each(paths: tuple[str, ...], end: str) -> tuple[str, ...]:
    return tuple(path + end for path in paths)


CALLS: Final = (
    TritonCall(
        "ModelStatistics",
        lambda triton, given: triton.statistics(given.name, given.version),
        ("/v2/models/stats", *_each(_MODELS, "/stats")),
    ),
    TritonCall(
        "ModelConfig",
        lambda triton, given: triton.repository.model_config(given.name, given.version),
        _each(_MODELS, "/config"),
        message=lambda config: {"config": config},
    ),
    TritonCall(
        "RepositoryIndex", _index, ("/v2/repository/index",), ("POST",), message=lambda models: {"models": models}
    ),
    TritonCall(
        "RepositoryModelLoad",
        lambda triton, given: triton.repository.load(given.name, given.values),
        (f"{_STORED}/load",),
        ("POST",),
        guard=GUARD,
        within="parameters",
    ),
    TritonCall(
        "RepositoryModelUnload",
        lambda triton, given: triton.repository.unload(given.name, given.values),
        (f"{_STORED}/unload",),
        ("POST",),
        guard=GUARD,
        within="parameters",
    ),
    TritonCall(  # a setting without values is reset, which changes nothing
        "TraceSetting",
        lambda triton, given: triton.trace_setting(given.name, given.values),
        ("/v2/trace/setting", f"{_MODELS[0]}/trace/setting"),
        ("GET", "POST"),
        _trace_message,
    ),
    TritonCall(
        "LogSettings",
        lambda triton, given: triton.log_settings(given.values),
        ("/v2/logging",),
        ("GET", "POST"),
        _log_message,
        guard=GUARD,
    ),
    TritonCall(
        "SystemSharedMemoryStatus",
        lambda triton, given: triton.memory.status(given.name),
        _each(_SYSTEM, "/status"),
        message=lambda regions: {"regions": {region["name"]: region for region in regions}},
    ),
    TritonCall("SystemSharedMemoryRegister", _register, (f"{_SYSTEM[1]}/register",), ("POST",)),
    TritonCall(
        "SystemSharedMemoryUnregister",
        lambda triton, given: triton.memory.unregister(given.name),
        _each(_SYSTEM, "/unregister"),
        ("POST",),
    ),
    TritonCall("CudaSharedMemoryStatus", lambda *_: [], _each(_CUDA, "/status"), message=lambda regions: {}),
    TritonCall("CudaSharedMemoryRegister", _no_cuda, (f"{_CUDA[1]}/register",), ("POST",)),
    TritonCall("CudaSharedMemoryUnregister", lambda *_: None, _each(_CUDA, "/unregister"), ("POST",)),
)
GUARDS: Final = {call.name: call.guard for call in CALLS if call.guard}


async def _run(triton: TritonExtensions, call: TritonCall, given: Arguments) -> Any:
    result = call.run(triton, given)
    return await result if isawaitable(result) else result


# ---- HTTP


def triton_routes(triton: TritonExtensions) -> tuple[Template, ...]:
    """They precede the other routes: `/v2/models/stats` is no model."""

    def serve(call: TritonCall) -> Serve:
        async def answer(request: HttpRequest) -> ItemResult:
            names = request.names
            name = names.get("model") or names.get("region", "")
            result = await _run(triton, call, Arguments(name, names.get("version"), _values(request, call.within)))
            return ItemResult(b"" if result is None else msgspec.json.encode(result), JSON)

        return answer

    return tuple(
        methods_route(
            path, call.name, guard=call.guard, error_body=error_body, **dict.fromkeys(call.methods, serve(call))
        )
        for call in CALLS
        for path in call.paths
    )


def _values(request: HttpRequest, within: str) -> dict[str, Any]:
    """The JSON object of a body, or the one in it; an empty one without a body. Raises BadRequest."""
    if not request.body or request.method in ("GET", "HEAD"):
        return {}
    try:
        found = msgspec.json.decode(request.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body must be a JSON object: {error}") from None
    inner = (found.get(within) or {}) if within else found
    if not isinstance(inner, dict):
        raise BadRequest(f"{within} must be an object, found {type(inner).__name__}")
    return inner


# ---- gRPC


def grpc_functions(triton: TritonExtensions) -> SimpleNamespace:
    """The functions of the gRPC calls, under their names. They take and return messages."""
    from google.protobuf import json_format  # the extra `grpc`

    from penstock.serving.protocols.oip_grpc import open_inference

    def function(call: TritonCall) -> Callable[[Any, Any], Awaitable[Any]]:
        response = open_inference().message(f"inference.{call.name}Response")

        async def answer(request: Any, context: Any) -> Any:
            result = await _run(triton, call, _arguments(request))
            return json_format.ParseDict({} if result is None else call.message(result), response())

        return answer

    return SimpleNamespace(**{call.name: function(call) for call in CALLS})


def _arguments(request: Any) -> Arguments:
    """The fields of a message; those of a map of parameters or settings are the values."""
    given = {each.name: getattr(request, each.name) for each in request.DESCRIPTOR.fields}
    name, version = given.pop("name", "") or given.pop("model_name", ""), given.pop("version", "") or None
    values = given.get("parameters", given.get("settings"))
    return Arguments(name, version, given if values is None else {key: _chosen(each) for key, each in values.items()})


def _chosen(parameter: Any) -> Any:
    """The value of a parameter, or the list of a trace setting; None for one that is not set."""
    if "parameter_choice" not in parameter.DESCRIPTOR.oneofs_by_name:
        return list(parameter.value) or None
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)
