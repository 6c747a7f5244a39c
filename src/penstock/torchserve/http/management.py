"""The routes of TorchServe's management API: models, workflows and tokens, and the table of functions behind them."""

import logging
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from penstock.serving.http.responses import MethodNotAllowed
from penstock.serving.protocols.route import HttpRequest, Serve, Template
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config import ListenerConfig
from penstock.torchserve.protocol import management as api
from penstock.torchserve.protocol.api import ChangeResult, Group, json_body, page
from penstock.torchserve.protocol.openapi import JSON, Operation
from penstock.types import ItemResult

log = logging.getLogger("penstock.torchserve")

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


# ---- routes


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
