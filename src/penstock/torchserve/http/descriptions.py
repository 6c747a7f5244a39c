"""All routes of one TorchServe listener, and the OpenAPI documents that are made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from penstock._version import __version__
from penstock.serving.http.answers import MethodNotAllowed
from penstock.serving.http.template import HttpRequest, Template
from penstock.torchserve.http.actions import Action, answer, templates_of
from penstock.torchserve.http.base import Administration, Face
from penstock.torchserve.http.management import NO_MODEL, management_actions, names, token_action
from penstock.torchserve.http.metrics import Scrape, metrics_action
from penstock.torchserve.http.open_inference import open_inference_actions
from penstock.torchserve.protocol.bodies import json_body
from penstock.torchserve.protocol.openapi import JSON, Answers, Operation, operations_document
from penstock.types import ItemResult

Document = Callable[[str], dict[str, Any]]  # name of a model -> what describes its routes

TITLE: Final = "TorchServe APIs"
ABOUT: Final = "What this listener of Penstock serves to clients of TorchServe."
DOCUMENT: Final[Answers] = ((200, "An OpenAPI 3.0.1 document", "description"),)
ROOT: Final = Operation("OPTIONS", "/", "apiDescription", "Describes the routes of this listener.", answers=DOCUMENT)
ALIAS: Final = Operation(
    "GET", "/api-description", "api-description", ROOT.description, answers=DOCUMENT, deprecated=True
)
PREDICTED: Final[Answers] = (
    (200, "The form of the answer is up to the model", "bytes"),
    NO_MODEL,
    (503, "No worker is free, or the handler failed", "error"),
    (507, "Out of memory", "error"),
)


def listener_templates(
    administration: Administration,
    face: Face,
    inference: Sequence[Template],
    scrape: Scrape | None = None,
    legacy: Sequence[Template] = (),
) -> tuple[Template, ...]:
    """The routes of the listener's groups in the order in which they are tried, and what describes them.

    `inference` are those that predict, `legacy` those of them that stand behind all others; they are left out where the
    group is not the listener's. Without `scrape` there is no `/metrics`.
    """
    if "inference" not in face.groups:
        inference, legacy = (), ()
    predictions = [operation_of(template) for template in (*inference, *legacy)]
    asking, managing, unguarded = list[Action](), list[Action](), list[Action]()
    if "inference" in face.groups:
        asking += _model_actions("/predictions", administration, _inference_document(predictions))
        asking += open_inference_actions() if face.open_inference else ()
    if "management" in face.groups:
        managing += management_actions(administration, face)
        managing += _model_actions("/models", administration, _management_document(tuple(managing)))
        unguarded.append(token_action(administration))
    if "metrics" in face.groups and face.metrics_api and scrape is not None:
        unguarded.append(metrics_action(scrape))
    others = [action.operation for action in (*asking, *managing, *unguarded)]
    return (
        *templates_of(_description_actions([ROOT, *predictions, *others, ALIAS])),
        *inference,
        *templates_of(asking, "inference"),
        *templates_of(managing, "management"),
        *templates_of(unguarded),
        *legacy,
    )


def operation_of(template: Template) -> Operation:
    """What a document says of a route of the inference table."""
    path = template.path.replace("{model}", "{model_name}").replace("{version}", "{model_version}")
    words = re.findall(r"(?<=[/:])[a-z][\w-]*", path)  # what stands in the path as it is, and verbs
    prefix = f"{words[0]}_" if re.fullmatch(r"v\d", words[0]) else ""
    prefix += "version_" if "{model_version}" in path else ""
    name = prefix + words[-1] + ("_path" if "...}" in path else "")
    if not template.codec:
        return Operation("GET", path, name, template.summary, answers=((200, "The answer", "object"),))
    return Operation("POST", path, name, template.summary, takes="bytes", answers=PREDICTED)


def _description_actions(operations: Sequence[Operation]) -> tuple[Action, ...]:
    body = json_body(operations_document(TITLE, __version__, operations, ABOUT))

    async def describe(request: HttpRequest) -> ItemResult:
        return ItemResult(body=body, content_type=JSON)

    async def describe_root(request: HttpRequest) -> ItemResult:
        if request.method != "OPTIONS":  # nobody is asked for a token before being told so
            raise MethodNotAllowed("the root is there for OPTIONS only")
        return await describe(request)

    return (Action(ROOT, describe_root, any_method=True), Action(ALIAS, describe, any_method=True))


def _inference_document(operations: Sequence[Operation]) -> Document:
    def document(model: str) -> dict[str, Any]:
        name = quote(model, safe="")
        own = [
            msgspec.structs.replace(operation, path=operation.path.replace("{model_name}", name))
            for operation in operations
            if "{model_name}" in operation.path
        ]
        return operations_document(f"RESTful API for: {model}", __version__, own)

    return document


def _management_document(actions: Sequence[Action]) -> Document:
    own = [action.operation for action in actions if action.operation.path.startswith("/models/{model_name}")]

    def document(model: str) -> dict[str, Any]:
        return operations_document(f"RESTful Management API for: {model}", __version__, own)

    return document


def _model_actions(root: str, administration: Administration, document: Document) -> list[Action]:
    """`OPTIONS {root}/{model}[/{version}]`, an error for a model that is not there."""

    async def describe(request: HttpRequest) -> ItemResult:
        model, version = names(request)
        await administration.describe(model, version)
        return answer(document(model))

    base, name = f"{root}/{{model_name}}", "apiOf" + root[1:].capitalize()
    default = Operation("OPTIONS", base, name, "Describes the routes of a model.", answers=(*DOCUMENT, NO_MODEL))
    version = msgspec.structs.replace(default, path=base + "/{model_version}", id=f"version_{name}")
    return [Action(default, describe), Action(version, describe)]
