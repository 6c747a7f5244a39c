"""Routes of TorchServe's HTTP APIs: inference, health, metrics, and the table of functions behind the other routes.

Source: `docs/inference_api.md` of TorchServe 0.12.0, the KServe protocols V1 and V2, and SageMaker's contract.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from msgspec import Struct, structs

from penstock._version import __version__
from penstock.core.contracts import Backend
from penstock.serving.protocols.route import HttpRequest, Route, Serve, Template
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config.properties import ListenerConfig
from penstock.torchserve.protocol.api import ChangeResult, Group, json_body
from penstock.torchserve.protocol.management import unknown_parameters
from penstock.torchserve.protocol.openapi import JSON, METRICS, Operation, QueryParameter
from penstock.types import Headers, ItemResult

log = logging.getLogger("penstock.frontends")

CHANGING: Final = ("POST", "PUT", "DELETE")
GUARD: Final[Group] = "inference"
# Every method of the parser except OPTIONS, which asks for a description, and CONNECT, which has no path.
NOT_OPTIONS: Final = frozenset(
    {
        "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "COPY", "LOCK", "MKCOL", "MOVE",
        "PROPFIND", "PROPPATCH", "SEARCH", "UNLOCK", "BIND", "REBIND", "UNBIND", "ACL", "REPORT",
        "MKACTIVITY", "CHECKOUT", "MERGE", "M-SEARCH", "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE", "PURGE",
        "MKCALENDAR", "LINK", "UNLINK", "SOURCE",
    }
)  # fmt: skip
PREDICT: Final[Headers] = [(b"explain", b"False")]
EXPLAIN: Final[Headers] = [(b"explain", b"True")]
HEALTH: Final = {True: json_body({"status": "Healthy"}), False: json_body({"status": "Unhealthy"})}
SERVER: Final = {"name": "Torchserve", "version": __version__, "extenstion": ["kserve", "kubeflow"]}  # TorchServe's key
MODEL_READY: Final = "Reports whether the default version of a model has a worker."
ALL_MODELS: Final = 2**31 - 1
NO_VERSIONS: Final = {"error": "Model versioning is not yet supported."}

Scrape = Callable[[list[str]], Awaitable[bytes]]  # metric names (empty: all) -> Prometheus text 0.0.4


# ---- inference


def inference_routes(administration: Administrator, config: ListenerConfig) -> tuple[Template, ...]:
    """`/ping` and every route to a prediction or an explanation except the legacy ones."""

    def ping(backend: Backend, route: Route) -> ItemResult:
        healthy = administration.healthy()
        return ItemResult(body=HEALTH[healthy], content_type=JSON, status=200 if healthy else 500)

    return (
        Template("/ping", "Reports whether every model has its workers", answer=ping, guard=GUARD),
        Template("/ping/{rest...}", "The same", answer=ping, guard=GUARD),
        *(
            _model_route(config, f"/{verb}/{{model}}{tail}", summary, [*headers, (b"url_path", b"")])
            for verb, summary, headers in (("predictions", "Predict", PREDICT), ("explanations", "Explain", EXPLAIN))
            for tail in ("", "/{version}", "/{version}/{url_path...}")
        ),
        _model_route(config, "/v1/models/{model}:predict", "Predict, KServe V1", PREDICT),
        _model_route(config, "/v1/models/{model}:explain", "Explain, KServe V1", EXPLAIN),
        _model_route(config, "/v2/models/{model}/infer", "Predict, KServe V2", PREDICT),
        _model_route(config, "/v2/models/{model}/explain", "Explain, KServe V2", EXPLAIN),
        _model_route(config, "/wfpredict/{workflow}", "Predict with a workflow", []),
        _model_route(config, "/wfpredict/{workflow}/{rest...}", "The same", []),
        _model_route(config, "/invocations", "Predict with the only model, or the one of ?model_name=", [], query=True),
        structs.replace(  # another method means a version of this name
            _model_route(config, "/models/{model}/invoke", "Predict, SageMaker", [], query=True),
            methods=frozenset({"POST"}),
        ),
    )


def legacy_routes(config: ListenerConfig) -> tuple[Template, ...]:
    """The oldest prediction routes. They match last because their first segment is any model name."""
    return tuple(
        _model_route(config, path, "Predict, deprecated", [], query=True)
        for path in ("/{model}/predict", "/{model}/{version}/predict")
    )


def _model_route(config: ListenerConfig, path: str, summary: str, headers: Headers, query: bool = False) -> Template:
    """An inference route for every method: TorchServe does not check the method here."""
    return Template(path, summary, codec=config.codec, headers=headers, query=query, methods=NOT_OPTIONS, guard=GUARD)


# ---- other routes


class Action(Struct, frozen=True):
    """A method of a path: its OpenAPI description and the function that serves it."""

    operation: Operation
    serve: Serve
    any_method: bool = False  # TorchServe checks the method of few routes


def templates_of(actions: Iterable[Action], guard: Group | None = None) -> tuple[Template, ...]:
    """One route per path, in the order of the actions; `guard` is the group whose token opens them."""
    paths: dict[str, dict[str, Action]] = {}
    for action in actions:
        paths.setdefault(action.operation.path, {})[action.operation.method] = action
    return tuple(_template(path, table, guard) for path, table in paths.items())


def _template(path: str, table: dict[str, Action], guard: Group | None) -> Template:
    first = next(iter(table.values()))

    async def serve(request: HttpRequest) -> ItemResult:
        action = table.get(request.method, first)
        operation = action.operation
        if operation.method in CHANGING and request.query:
            ignored = unknown_parameters(request.query, (parameter.name for parameter in operation.parameters))
            if ignored:
                log.warning("event=unknown_parameters route=%s names=%r consequence=ignored", operation.id, ignored)
        return await action.serve(request)

    methods = None if first.any_method else frozenset(table)
    return Template(path, first.operation.description, serve=serve, methods=methods, guard=guard or "")


def json_result(value: Any, status: int = 200) -> ItemResult:
    return ItemResult(body=json_body(value), content_type=JSON, status=status)


def change_result(change: ChangeResult) -> ItemResult:
    return json_result({"status": change.message}, change.status)


def metrics_action(scrape: Scrape) -> Action:
    """`/metrics[?name[]=a&name[]=b]`, which never needs a token."""
    operation = Operation(
        "GET",
        "/metrics",
        "metrics",
        "Returns the metrics in the Prometheus text format.",
        (QueryParameter("name[]", "Name of a metric to return; may be repeated; by default all are returned"),),
        responses=((200, "The metrics", "metrics"),),
    )

    async def serve(request: HttpRequest) -> ItemResult:
        return ItemResult(body=await scrape(request.query.get("name[]", [])), content_type=METRICS)

    return Action(operation, serve, any_method=True)


def open_inference_actions(administration: Administrator, config: ListenerConfig) -> tuple[Action, ...]:
    """The routes of KServe's V1 and V2 protocols other than predictions and explanations. The management API has the
    readiness of V1 already, under its own key."""

    async def models(request: HttpRequest) -> ItemResult:
        return json_result({"models": [name for name, _ in administration.models(ALL_MODELS, 0)[0]]})

    async def server_ready(request: HttpRequest) -> ItemResult:
        ready = administration.ready()
        return json_result({"ready": ready}, 200 if ready else 503)

    async def model_ready(request: HttpRequest) -> ItemResult:
        name = request.names["model_name"]
        ready = await is_ready(administration, name)
        return json_result({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(request: HttpRequest) -> ItemResult:
        name = request.names["model_name"]
        versions = [each["modelVersion"] for each in await administration.describe(name, "all")]
        return json_result({"name": name, "versions": versions, "platform": "", "inputs": [], "outputs": []})

    ready = Action(_get("/v1/models/{model_name}", "modelReadyV1", MODEL_READY), model_ready)
    return (
        Action(_get("/v1/models", "modelNames", "Returns the names of all models."), models),
        *(() if "management" in config.groups else (ready,)),
        _constant("/v2", "serverMetadata", "Returns the name and version of the server.", SERVER),
        _constant("/v2/health/live", "serverLive", "Reports that the server is live.", {"live": True}),
        Action(_get("/v2/health/ready", "serverReady", "Reports whether all workers are up."), server_ready, True),
        _constant("/v2/models/{model_name}/versions/{rest...}", "modelVersions", "Not supported.", NO_VERSIONS, 501),
        Action(_get("/v2/models/{model_name}", "modelMetadata", "Returns the versions of a model."), metadata),
        Action(_get("/v2/models/{model_name}/ready", "modelReadyV2", MODEL_READY), model_ready),
    )


async def is_ready(administration: Administrator, model: str) -> bool:
    """Whether the default version of a model has a worker. Raises ApiError."""
    described = await administration.describe(model, None)
    return any(worker["status"] == "READY" for worker in described[0]["workers"])


def _get(path: str, name: str, description: str, status: int = 200) -> Operation:
    return Operation("GET", path, name, description, responses=((status, description, "object"),))


def _constant(path: str, name: str, description: str, value: dict[str, Any], status: int = 200) -> Action:
    async def serve(request: HttpRequest) -> ItemResult:
        return json_result(value, status)

    return Action(_get(path, name, description, status), serve, any_method=True)
