"""What stands between requests of another form and a handler."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any


class BaseEnvelope(abc.ABC):
    """Wraps a handler's `handle`: its data pass `parse_input`, its results `format_output`."""

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: Any, context: Any) -> Any:
        """What the handler answers, in the envelope's form. No data (the call that loads) and no results stay so."""
        self.context = context
        results = self._handle_fn(self.parse_input(data) if data else data, context)
        return self.format_output(results) if results else results

    @abc.abstractmethod
    def parse_input(self, data: Any) -> Any:
        """The handler's data, of `[{"body" or field: value}]`."""

    @abc.abstractmethod
    def format_output(self, data: Any) -> Any:
        """The answers, of the handler's."""


def body_of(row: Any) -> Any:
    """The field "data" of a request, else its body."""
    return row.get("data") or row.get("body")


def wants_explanation(context: Any) -> bool:
    """Whether the batch's first request came by a route of explanations."""
    return bool(context) and context.get_request_header(0, "explain") == "True"
