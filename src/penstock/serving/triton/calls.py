"""Triton's extensions of a server: one table of calls, answered over HTTP and over gRPC.

A call takes its arguments from the path and the JSON object of an HTTP request, or from a message, and returns the JSON
form of Triton's messages. It raises PenstockError.
"""

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from penstock.config.schema import Config
from penstock.core.contracts import ManagementBackend
from penstock.core.engine.engine import Engine
from penstock.errors import BadRequest, ModelNotFound, NotSupported, RegionNotFound
from penstock.serving.process import ServerLog
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.oip_routes import error_body
from penstock.serving.protocols.route import HttpRequest, Serve, Template, methods_route
from penstock.serving.triton.repository import ModelRepository
from penstock.serving.triton.settings import LogSettings, SharedMemory, trace_setting
from penstock.serving.triton.statistics import ModelStatistics
from penstock.types import ItemResult

GUARD: Final = "management"  # of the calls that change the server
NO_CUDA: Final = "CUDA shared memory is not supported; register system shared memory, or send tensors in the request"


class Arguments(Struct):
    """The arguments of a call: the name of a model or region, "" for all; a version; and the other values by name."""

    name: str = ""
    version: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


class _Place(Struct):
    """The values of a registration."""

    key: str
    byte_size: int
    offset: int = 0


class TritonExtensions:
    """The calls as methods, and their state. A method returns the result or awaits it; None is an empty response."""

    def __init__(
        self, engine: Engine, config: Config, management: ManagementBackend, statistics: ModelStatistics, log: ServerLog
    ) -> None:
        self.memory = SharedMemory(config.server.shared_memory, config.limits.max_body_bytes)
        self._repository = ModelRepository(engine, config, management)
        self._engine = engine
        self._management = management
        self._statistics = statistics
        self._log_settings = LogSettings(log)

    def statistics(self, given: Arguments) -> Any:
        """`model_stats` of one version, of all versions of a model, or of all models."""
        name, version = given.name, given.version
        if name:
            self._check_known(name, version)
        statuses = [s for s in self._engine.statuses() if name in ("", s.name) and version in (None, s.version)]
        return {"model_stats": [self._statistics.of(s.name, s.version).body(s.name, s.version) for s in statuses]}

    def config(self, given: Arguments) -> Any:
        """The configuration of a version."""
        return self._repository.model_config(given.name, given.version)

    def index(self, given: Arguments) -> Any:
        """All models of the repository, or those that are `ready`."""
        ready = given.values.get("ready", False)
        if not isinstance(ready, bool):
            raise BadRequest(f"ready must be true or false, found {ready!r:.40}")
        return self._repository.index(ready)

    def load(self, given: Arguments) -> Any:
        """Loads or replaces a model."""
        return self._repository.load(given.name, given.values)

    def unload(self, given: Arguments) -> Any:
        """Unloads all versions of a model."""
        return self._repository.unload(given.name, given.values)

    def trace_setting(self, given: Arguments) -> Any:
        """The trace settings of a model or of the server. A setting without values is reset, which changes nothing."""
        if given.name:
            self._check_known(given.name, None)
        return trace_setting(given.values)

    def _check_known(self, name: str, version: str | None) -> None:
        """Raises BadRequest for an unknown model or version: in Triton it is NOT_FOUND to other calls only."""
        try:
            self._engine.handle(name, version)
        except ModelNotFound as error:
            raise BadRequest(error.message) from None

    def log_settings(self, given: Arguments) -> Any:
        """The log settings after the changes."""
        if given.values:
            self._management.check_open()
        return self._log_settings.change(given.values)

    def regions(self, given: Arguments) -> Any:
        """The registered regions of shared memory."""
        return self.memory.status(given.name)

    def register(self, given: Arguments) -> Any:
        """Registers a region."""
        try:
            place = msgspec.convert(given.values, _Place)
        except msgspec.ValidationError as error:
            raise BadRequest(f"the region has the wrong form: {error}") from None
        self.memory.register(given.name, place.key, place.offset, place.byte_size)

    def unregister(self, given: Arguments) -> Any:
        """Forgets a region, or all of them."""
        self.memory.unregister(given.name)

    def cuda_regions(self, given: Arguments) -> Any:
        """No regions. Raises RegionNotFound for a named one."""
        if given.name:
            raise RegionNotFound(f"no region of CUDA shared memory has the name '{given.name[:100]}'")
        return []

    def register_cuda(self, given: Arguments) -> Any:
        """Raises BadRequest: CUDA shared memory is not supported."""
        raise BadRequest(NO_CUDA)


# ---- the table


class TritonCall(Struct, frozen=True):
    """A call by its name in gRPC, with its HTTP paths.

    `message` makes the JSON form of a gRPC message of the result. The values of the arguments are the object at the key
    `within` of an HTTP body, or the body.
    """

    name: str
    run: Callable[[TritonExtensions, Arguments], Any | Awaitable[Any]]
    paths: tuple[str, ...]
    methods: tuple[str, ...] = ("GET",)
    message: Callable[[Any], Any] = lambda value: value
    guard: str = ""
    within: str = ""


def _log_message(settings: dict[str, Any]) -> dict[str, Any]:
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    return {"settings": {name: {kinds[type(value)]: value} for name, value in settings.items()}}


def _trace_message(settings: dict[str, Any]) -> dict[str, Any]:
    texts = {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
    return {"settings": {name: {"value": value} for name, value in texts.items()}}


def _regions_message(regions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"regions": {region["name"]: region for region in regions}}


def _each(path: str, part: str, end: str) -> tuple[str, str]:
    return path + end, path + part + end


_MODEL: Final = ("/v2/models/{model}", "/versions/{version}")
_SYSTEM: Final = ("/v2/systemsharedmemory", "/region/{region}")
_CUDA: Final = ("/v2/cudasharedmemory", "/region/{region}")
_STORED: Final = "/v2/repository/models/{model}/"
_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_T: Final = TritonExtensions
CALLS: Final = (
    TritonCall("ModelStatistics", _T.statistics, ("/v2/models/stats", *_each(*_MODEL, "/stats"))),
    TritonCall("ModelConfig", _T.config, _each(*_MODEL, "/config"), _GET, lambda config: {"config": config}),
    TritonCall("RepositoryIndex", _T.index, ("/v2/repository/index",), _POST, lambda models: {"models": models}),
    TritonCall("RepositoryModelLoad", _T.load, (_STORED + "load",), _POST, guard=GUARD, within="parameters"),
    TritonCall("RepositoryModelUnload", _T.unload, (_STORED + "unload",), _POST, guard=GUARD, within="parameters"),
    TritonCall(
        "TraceSetting", _T.trace_setting, ("/v2/trace/setting", f"{_MODEL[0]}/trace/setting"), _BOTH, _trace_message
    ),
    TritonCall("LogSettings", _T.log_settings, ("/v2/logging",), _BOTH, _log_message, GUARD),
    TritonCall("SystemSharedMemoryStatus", _T.regions, _each(*_SYSTEM, "/status"), _GET, _regions_message),
    TritonCall("SystemSharedMemoryRegister", _T.register, ("".join((*_SYSTEM, "/register")),), _POST),
    TritonCall("SystemSharedMemoryUnregister", _T.unregister, _each(*_SYSTEM, "/unregister"), _POST),
    TritonCall("CudaSharedMemoryStatus", _T.cuda_regions, _each(*_CUDA, "/status"), _GET, lambda regions: {}),
    TritonCall("CudaSharedMemoryRegister", _T.register_cuda, ("".join((*_CUDA, "/register")),), _POST),
    TritonCall("CudaSharedMemoryUnregister", lambda *_: None, _each(*_CUDA, "/unregister"), _POST),
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
    inner = found.get(within) if within else found
    if inner is None:
        return {}
    if not isinstance(inner, dict):
        raise BadRequest(f"{within} must be an object, found {type(inner).__name__}")
    return inner


# ---- gRPC


def grpc_functions(triton: TritonExtensions) -> SimpleNamespace:
    """The functions of the gRPC calls, under their names. They take and return messages."""
    from google.protobuf import json_format  # the extra `grpc`

    from penstock.serving.protocols.oip_protobuf import open_inference

    def function(call: TritonCall) -> Callable[[Any, Any], Awaitable[Any]]:
        response = open_inference().message(f"inference.{call.name}Response")

        async def answer(request: Any, context: Any) -> Any:
            result = await _run(triton, call, _arguments(request))
            return json_format.ParseDict({} if result is None else call.message(result), response())

        return answer

    return SimpleNamespace(**{call.name: function(call) for call in CALLS})


def _arguments(request: Any) -> Arguments:
    """The arguments in a message's fields. A map of parameters or settings, if there is one, becomes the values.

    Raises NotSupported for the name of a repository.
    """
    given = {each.name: getattr(request, each.name) for each in request.DESCRIPTOR.fields}
    if given.pop("repository_name", ""):
        raise NotSupported("there is one repository; leave repository_name empty")
    name, version = given.pop("name", "") or given.pop("model_name", ""), given.pop("version", "") or None
    values = given.get("parameters", given.get("settings"))
    return Arguments(name, version, given if values is None else {key: _chosen(each) for key, each in values.items()})


def _chosen(parameter: Any) -> Any:
    """The value of a parameter, or the list of a trace setting; None for one that is not set."""
    if "parameter_choice" not in parameter.DESCRIPTOR.oneofs_by_name:
        return list(parameter.value) or None
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)
