"""A listener of TorchServe's HTTP APIs: its route table and the OpenAPI documents generated from it."""

import re
from collections.abc import Sequence
from ssl import SSLContext
from typing import Final
from urllib.parse import quote

from msgspec.structs import replace

from penstock._version import __version__
from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.serving.http.responses import MethodNotAllowed
from penstock.serving.http.server import HttpServer
from penstock.serving.protocols.route import HttpRequest, Template
from penstock.torchserve.admin.administrator import Administrator
from penstock.torchserve.config.properties import ListenerConfig
from penstock.torchserve.http.flavor import TorchServeFlavor
from penstock.torchserve.http.management import NO_MODEL, management_actions, names, token_action
from penstock.torchserve.http.routes import (
    Action,
    Scrape,
    inference_routes,
    json_result,
    legacy_routes,
    metrics_action,
    open_inference_actions,
    templates_of,
)
from penstock.torchserve.http.workflows import workflow_actions
from penstock.torchserve.protocol.api import json_body
from penstock.torchserve.protocol.openapi import JSON, OpenApiResponses, Operation, operations_document
from penstock.types import ItemResult

TITLE: Final = "TorchServe APIs"
ABOUT: Final = "The routes that this Penstock listener serves to clients of TorchServe."
DOCUMENT: Final[OpenApiResponses] = ((200, "An OpenAPI 3.0.1 document", "description"),)
ROOT: Final = Operation("OPTIONS", "/", "apiDescription", "Describes the routes of this listener.", responses=DOCUMENT)
ALIAS: Final = Operation(
    "GET", "/api-description", "api-description", ROOT.description, responses=DOCUMENT, deprecated=True
)
PREDICTED: Final[OpenApiResponses] = (
    (200, "The model determines the type of the response", "bytes"),
    NO_MODEL,
    (503, "No worker is free, or the handler failed", "error"),
    (507, "Out of memory", "error"),
)


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
        return Operation("GET", path, name, template.summary, responses=((200, "The answer", "object"),))
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
    default = Operation("OPTIONS", base, name, "Describes the routes of a model.", responses=(*DOCUMENT, NO_MODEL))
    version = replace(default, path=base + "/{model_version}", id=f"version_{name}")
    return [Action(default, describe), Action(version, describe)]
