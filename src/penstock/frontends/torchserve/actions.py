"""Routes that stand beside inference: what each does, together with its description, so that the two cannot part."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from msgspec import Struct

from penstock.frontends.http.template import HttpRequest, Template
from penstock.protocols.torchserve.admin import unknown
from penstock.protocols.torchserve.api import ApiError, Done
from penstock.protocols.torchserve.bodies import json_body
from penstock.protocols.torchserve.openapi import JSON, Operation
from penstock.types import ItemResult

log = logging.getLogger("penstock.frontends")

Serve = Callable[[HttpRequest], Awaitable[ItemResult]]
Check = Callable[[HttpRequest], None]

NOT_ALLOWED: Final = "Requested method is not allowed, please refer to API document."


class Action(Struct, frozen=True):
    """One method of one path and the function that answers it."""

    operation: Operation
    serve: Serve
    any_method: bool = False  # as TorchServe, which looks at the method of few routes


def templates_of(
    actions: Iterable[Action], check: Check | None = None, methods: frozenset[str] | None = None
) -> tuple[Template, ...]:
    """One route a path, in the order of the actions, for every method, or for those of `methods`.

    The routes are open for the listener: it is `check` that raises for a request without the right token, before
    anything else is looked at.
    """
    paths: dict[str, dict[str, Action]] = {}
    for action in actions:
        paths.setdefault(action.operation.path, {})[action.operation.method] = action
    return tuple(
        Template(
            path,
            next(iter(table.values())).operation.description,
            open=True,
            serve=_by_method(table, check),
            methods=methods,
        )
        for path, table in paths.items()
    )


def _by_method(table: dict[str, Action], check: Check | None) -> Serve:
    always = next((action for action in table.values() if action.any_method), None)

    async def serve(request: HttpRequest) -> ItemResult:
        if check is not None:
            check(request)
        action = table.get(request.method, always)
        if action is None:
            raise ApiError("MethodNotAllowedException", NOT_ALLOWED)
        ignored = unknown(request.query, (parameter.name for parameter in action.operation.parameters))
        if ignored:
            log.warning("event=unknown_parameters route=%s names=%r consequence=ignored", action.operation.id, ignored)
        return await action.serve(request)

    return serve


def authorization(request: HttpRequest) -> bytes | None:
    """The request's Authorization header as it came."""
    return next((value for name, value in request.headers if name.lower() == b"authorization"), None)


def answer(value: Any, status: int = 200) -> ItemResult:
    """The value as TorchServe's JSON."""
    return ItemResult(body=json_body(value), content_type=JSON, status=status)


def done_answer(done: Done) -> ItemResult:
    """What a change answers."""
    return answer({"status": done.message}, done.status)
