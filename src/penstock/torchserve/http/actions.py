"""Routes that stand beside inference: what each does, together with its description, so that the two cannot part."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from msgspec import Struct

from penstock.serving.http.template import HttpRequest, Template
from penstock.torchserve.http.base import Group
from penstock.torchserve.protocol.admin import unknown
from penstock.torchserve.protocol.api import Done
from penstock.torchserve.protocol.bodies import json_body
from penstock.torchserve.protocol.openapi import JSON, Operation
from penstock.types import ItemResult

log = logging.getLogger("penstock.frontends")

CHANGING: Final = ("POST", "PUT", "DELETE")

Serve = Callable[[HttpRequest], Awaitable[ItemResult]]


class Action(Struct, frozen=True):
    """One method of one path and the function that answers it."""

    operation: Operation
    serve: Serve
    any_method: bool = False  # as TorchServe, which looks at the method of few routes


def templates_of(actions: Iterable[Action], guard: Group | None = None) -> tuple[Template, ...]:
    """One route a path, in the order of the actions, for their methods; `guard` is the group whose token opens them."""
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
            ignored = unknown(request.query, (parameter.name for parameter in operation.parameters))
            if ignored:
                log.warning("event=unknown_parameters route=%s names=%r consequence=ignored", operation.id, ignored)
        return await action.serve(request)

    methods = None if first.any_method else frozenset(table)
    return Template(path, first.operation.description, serve=serve, methods=methods, guard=guard or "")


def authorization(request: HttpRequest) -> bytes | None:
    """The request's Authorization header as it came."""
    return next((value for name, value in request.headers if name.lower() == b"authorization"), None)


def answer(value: Any, status: int = 200) -> ItemResult:
    """The value as TorchServe's JSON."""
    return ItemResult(body=json_body(value), content_type=JSON, status=status)


def done_answer(done: Done) -> ItemResult:
    """What a change answers."""
    return answer({"status": done.message}, done.status)
