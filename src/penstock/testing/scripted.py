"""Models controlled by their items, for the checks of transports."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from penstock import metrics
from penstock.errors import BadRequest


class ScriptedModel:
    """Items are `(verb, argument)`; most verbs return the argument. Any other item is echoed."""

    def predict(self, items: list[Any]) -> Any:
        results: list[Any] = []
        for item in items:
            verb, argument = item if isinstance(item, tuple) else ("echo", item)
            if verb == "length":
                return [None] * argument
            if verb == "instead":
                return argument
            results.append(self._do(verb, argument, len(items)))
        return results

    def _do(self, verb: str, argument: Any, size: int) -> Any:
        if verb == "raise":
            raise ValueError(argument)
        if verb == "refuse":
            raise BadRequest(argument)
        if verb == "return":
            return ValueError(argument)
        if verb == "memory" and size > argument:
            raise MemoryError
        if verb == "sleep":
            time.sleep(argument)
        if verb == "count":
            metrics.counter("counted", argument, kind="test")
        if verb == "size":
            return size
        if verb == "repeat":
            return b"r" * argument
        if verb == "exit":
            sys.exit(argument)
        return argument


def stream(items: list[Any]) -> Iterator[list[Any]]:
    """Item n gets the parts 0 .. n-1; a negative item raises at once."""
    if min(items) < 0:
        raise ValueError("negative")
    for step in range(max(items)):
        yield [step if step < n else None for n in items]


class NeverLoads:
    """A model whose `load` raises."""

    def load(self, device: str) -> None:
        raise RuntimeError("no weights here")

    def predict(self, items: list[Any]) -> list[Any]:
        return items


class DiesWhileLoading(NeverLoads):
    """A model whose `load` ends its process, or its thread under the thread transport."""

    def load(self, device: str) -> None:
        sys.exit(7)
