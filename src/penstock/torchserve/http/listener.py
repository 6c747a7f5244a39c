"""A listener of TorchServe's HTTP APIs: its routes, the functions behind them, and their OpenAPI documents.

Source: `docs/inference_api.md` of TorchServe 0.12.0, the KServe protocols V1 and V2, and SageMaker's contract.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ssl import SSLContext
from typing import Any, Final
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from penstock._version import __version__
from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.serving.http.responses import MethodNotAllowed
from penstock.serving.http.server import HttpServer
from penstock.serving.protocols.route import HttpRequest, Route, Serve, Template
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config import ListenerConfig
from penstock.torchserve.http.flavor import TorchServeFlavor
from penstock.torchserve.protocol import management as api
from penstock.torchserve.protocol.api import (
    JSON,
    METRICS,
    ChangeResult,
    Group,
    OpenApiResponses,
    Operation,
    QueryParameter,
    json_body,
    operations_document,
    page,
)
from penstock.types import Headers, ItemResult

log = logging.getLogger("penstock.torchserve")

TITLE: Final = "TorchServe APIs"
ABOUT: Final = "The routes that this Penstock listener serves to clients of TorchServe."
DOCUMENT: Final[OpenApiResponses] = ((200, "An OpenAPI 3.0.1 document", "description"),)
ROOT: Final = Operation("OPTIONS", "/", "apiDescription", "Describes the routes of this listener.", responses=DOCUMENT)
ALIAS: Final = Operation(
    "GET", "/api-description", "api-description", ROOT.description, responses=DOCUMENT, deprecated=True
)
PREDICTED: Final[OpenApiResponses] = (
    (200, "The model determines the type of the response", "bytes"),
    api.NO_MODEL,
    (503, "No worker is free, or the handler failed", "error"),
    (507, "Out of memory", "error"),
)
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
NO_VERSIONS: Final = {"error": "Model versioning is not yet supported."}

Scrape = Callable[[list[str]], Awaitable[bytes]]  # metric names (empty: all) -> Prometheus text 0.0.4

MODEL_READY = "Reports whether the default version of a model has a worker."
READY = Operation(
    "GET", "/v1/models/{model_name}", "modelReady", MODEL_READY, responses=((200, "OK", "ready"), api.NO_MODEL)
)


# ---- tables


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
        changes = action.operation.method in ("POST", "PUT", "DELETE")
        if changes and request.query and (ignored := api.unknown_parameters(action.operation, request.query)):
            log.warning("event=unknown_parameters route=%s names=%r consequence=ignored", action.operation.id, ignored)
        return await action.serve(request)

    methods = None if first.any_method else frozenset(table)
    return Template(path, first.operation.description, serve=serve, methods=methods, guard=guard or "")


def json_result(value: Any, status: int = 200) -> ItemResult:
    return ItemResult(body=json_body(value), content_type=JSON, status=status)


def names(request: HttpRequest) -> tuple[str, str | None]:
    return request.names["model_name"], request.names.get("model_version")


def _changed(change: ChangeResult) -> ItemResult:
    return json_result({"status": change.message}, change.status)


def _warn(replaced: str) -> None:
    log.warning("event=number_replaced %s", replaced)


async def _not_allowed(request: HttpRequest) -> ItemResult:
    raise MethodNotAllowed("changing models and workflows is off: enable_model_api")


# ---- the listener


def make_listener(
    backend: Backend,
    administration: Administrator,
    config: ListenerConfig,
    limits: LimitsConfig,
    *,
    ssl: SSLContext | None = None,
    scrape: Scrape | None = None,
) -> HttpServer:
    """A listener, not yet started. `/metrics` returns the result of `scrape`; without it there is no such route."""
    flavor = TorchServeFlavor(administration, config, listener_templates(administration, config, scrape))
    return HttpServer(backend, limits, ssl=ssl, flavor=flavor)


def listener_templates(
    administration: Administrator, config: ListenerConfig, scrape: Scrape | None = None
) -> tuple[Template, ...]:
    """The routes of the listener's groups and of their descriptions, in matching order."""
    inference: tuple[Template, ...] = ()
    legacy: tuple[Template, ...] = ()
    if "inference" in config.groups:
        inference, legacy = inference_routes(administration, config), legacy_routes(config)
    predictions = [operation_of(template) for template in (*inference, *legacy)]
    inferring, managing, unguarded = list[Action](), list[Action](), list[Action]()
    if "inference" in config.groups:
        own = [each for each in predictions if "{model_name}" in each.path]
        inferring += _model_actions("/predictions", administration, "RESTful API", own)
        inferring += (
            open_inference_actions(administration, config) if config.properties.ts_open_inference_protocol else ()
        )
    if "management" in config.groups:
        managing += management_actions(administration, config)
        managing += workflow_actions(administration, config)
        own = [each.operation for each in managing if each.operation.path.startswith("/models/{model_name}")]
        managing += _model_actions("/models", administration, "RESTful Management API", own)
        unguarded.append(token_action(administration))
    if "metrics" in config.groups and config.properties.enable_metrics_api and scrape is not None:
        unguarded.append(metrics_action(scrape))
    others = [action.operation for action in (*inferring, *managing, *unguarded)]
    alive = "inference" in config.groups and config.properties.ts_open_inference_protocol
    return (
        *templates_of(_description_actions([ROOT, *predictions, *others, ALIAS], alive)),
        *inference,
        *templates_of(inferring, "inference"),
        *templates_of(managing, "management"),
        *templates_of(unguarded),
        *legacy,
    )


def operation_of(template: Template) -> Operation:
    """The OpenAPI description of an inference route."""
    path = template.path.replace("{model}", "{model_name}").replace("{version}", "{model_version}")
    path = path.replace("{workflow}", "{workflow_name}")
    words = re.findall(r"(?<=[/:])[a-z][\w-]*", path)  # literal segments and verbs
    prefix = f"{words[0]}_" if re.fullmatch(r"v\d", words[0]) else ""
    prefix += "version_" if "{model_version}" in path else ""
    name = prefix + words[-1] + ("_path" if "...}" in path else "")
    if not template.codec:
        return Operation("GET", path, name, template.summary, responses=((200, "The response", "object"),))
    return Operation("POST", path, name, template.summary, body="bytes", responses=PREDICTED)


def _description_actions(operations: Sequence[Operation], alive: bool) -> tuple[Action, ...]:
    """`OPTIONS /` and its alias. With `alive`, `GET /` answers the health check of KServe's V1 clients."""
    body = json_body(operations_document(TITLE, __version__, operations, ABOUT))

    async def describe(request: HttpRequest) -> ItemResult:
        return ItemResult(body=body, content_type=JSON)

    async def describe_root(request: HttpRequest) -> ItemResult:
        if alive and request.method == "GET":
            return json_result({"status": "alive"})
        if request.method != "OPTIONS":  # 405 without a token check: the root is unguarded
            raise MethodNotAllowed("the root accepts OPTIONS only")
        return await describe(request)

    return (Action(ROOT, describe_root, any_method=True), Action(ALIAS, describe, any_method=True))


def _model_actions(
    root: str, administration: Administrator, title: str, operations: Sequence[Operation]
) -> list[Action]:
    """`OPTIONS {root}/{model}[/{version}]`; an unknown model is an error."""

    async def describe(request: HttpRequest) -> ItemResult:
        model, version = names(request)
        await administration.describe(model, version)
        segment = quote(model, safe="") if root == "/predictions" else "{model_name}"
        own = [replace(each, path=each.path.replace("{model_name}", segment)) for each in operations]
        return json_result(operations_document(f"{title} for: {model}", __version__, own))

    base, name = f"{root}/{{model_name}}", "apiOf" + root[1:].capitalize()
    default = Operation("OPTIONS", base, name, "Describes the routes of a model.", responses=(*DOCUMENT, api.NO_MODEL))
    version = replace(default, path=base + "/{model_version}", id=f"version_{name}")
    return [Action(default, describe), Action(version, describe)]


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
        replace(  # another method means a version of this name
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
        return json_result({"models": [name for name, _ in administration.models()]})

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


def _get(path: str, name: str, description: str, status: int = 200) -> Operation:
    return Operation("GET", path, name, description, responses=((status, description, "object"),))


def _constant(path: str, name: str, description: str, value: dict[str, Any], status: int = 200) -> Action:
    async def serve(request: HttpRequest) -> ItemResult:
        return json_result(value, status)

    return Action(_get(path, name, description, status), serve, any_method=True)


# ---- management


def management_actions(administration: Administrator, config: ListenerConfig) -> tuple[Action, ...]:
    """The routes of models that need the management key. Registering and unregistering also need `enable_model_api`."""

    async def list_models(request: HttpRequest) -> ItemResult:
        return json_result(page("model", administration.models(), *api.read_page(request.query, _warn)))

    async def describe(request: HttpRequest) -> ItemResult:
        model, version = names(request)
        customized = version != "all" and api.read_query(api.DESCRIBE, request.query, _warn)["customized"]
        return json_result(await administration.describe(model, version, customized=customized))

    async def ready(request: HttpRequest) -> ItemResult:
        model = names(request)[0].partition(":")[0]
        return json_result({"name": model, "ready": await is_ready(administration, model)})

    async def register(request: HttpRequest) -> ItemResult:
        registration = api.read_registration(request.query, request.content_type, request.body, _warn)
        return _changed(await administration.register(registration))

    async def scale(request: HttpRequest) -> ItemResult:
        model, version = names(request)
        scaling = api.read_scaling(request.query, _warn)
        return _changed(await administration.scale(model, **scaling | ({"version": version} if version else {})))

    async def set_default(request: HttpRequest) -> ItemResult:
        model, version = names(request)
        return _changed(await administration.set_default(model, version or ""))

    async def traffic(request: HttpRequest) -> ItemResult:
        weights = api.read_weights(request.body)
        return _changed(await administration.set_traffic(names(request)[0], weights))

    async def unregister(request: HttpRequest) -> ItemResult:
        return _changed(await administration.unregister(*names(request)))

    changes = config.properties.enable_model_api
    remove = unregister if changes else _not_allowed
    return (
        Action(api.LIST, list_models),
        Action(api.REGISTER, register if changes else _not_allowed),
        Action(api.DESCRIBE, describe),
        Action(api.SCALE, scale),
        Action(api.UNREGISTER, remove),
        Action(api.TRAFFIC, traffic),  # matches before a version named "traffic"
        Action(api.of_version(api.DESCRIBE), describe),
        Action(api.of_version(api.SCALE), scale),
        Action(api.of_version(api.UNREGISTER), remove),
        Action(api.SET_DEFAULT, set_default),
        Action(READY, ready),
    )


def workflow_actions(administration: Administrator, config: ListenerConfig) -> tuple[Action, ...]:
    """The routes of workflows. They need the management key; those that change workflows also `enable_model_api`."""
    workflows = administration.workflows

    async def list_workflows(request: HttpRequest) -> ItemResult:
        return json_result(page("workflow", workflows.listed(), *api.read_page(request.query, _warn)))

    async def register(request: HttpRequest) -> ItemResult:
        found = api.read_workflow(request.query, request.content_type, request.body, _warn)
        return _changed(await workflows.register(found))

    async def describe(request: HttpRequest) -> ItemResult:
        return json_result([workflows.describe(request.names["workflow_name"])])

    async def unregister(request: HttpRequest) -> ItemResult:
        return _changed(await workflows.unregister(request.names["workflow_name"]))

    changes = config.properties.enable_model_api
    return (
        Action(api.LIST_WORKFLOWS, list_workflows),
        Action(api.REGISTER_WORKFLOW, register if changes else _not_allowed),
        Action(api.DESCRIBE_WORKFLOW, describe),
        Action(api.UNREGISTER_WORKFLOW, unregister if changes else _not_allowed),
    )


def token_action(administration: Administrator) -> Action:
    """The route that renews keys, authorized by the API key."""

    async def new_token(request: HttpRequest) -> ItemResult:
        authorization = next((value for name, value in request.headers if name.lower() == b"authorization"), None)
        administration.new_token(request.query.get("type", [""])[0], authorization)
        return ItemResult(body=b"\n", content_type=JSON)

    return Action(api.TOKEN, new_token)


async def is_ready(administration: Administrator, model: str) -> bool:
    """Whether the default version of a model has a worker. Raises ApiError."""
    described = await administration.describe(model, None)
    return any(worker["status"] == "READY" for worker in described[0]["workers"])
