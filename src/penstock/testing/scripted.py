"""Models controlled by their items, for the checks of transports and the tests of higher layers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock import metrics
from penstock.errors import BadRequest


class ScriptedModel:
    """Items are `(verb, argument)`; most verbs return the argument. Any other item is echoed."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def load(self, device: str) -> None:
        self.device = device

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
        if verb == "keep":
            self.kept.append(argument)
            return len(argument)
        if verb == "release":
            self.kept.clear()
        if verb == "count":
            metrics.counter("counted", argument, kind="test")
        if verb == "size":
            return size
        if verb == "pid":
            return os.getpid()
        if verb == "device":
            return self.device
        if verb == "environment":
            return os.environ.get(argument)
        if verb == "modules":
            return sorted(sys.modules)
        if verb == "start":
            return subprocess.Popen(argument).pid
        if verb == "repeat":
            return b"r" * argument
        return _ENDS[verb](argument) if verb in _ENDS else argument


def _hold_the_gil(seconds: float) -> None:
    """Calls C without releasing the GIL, which blocks all Python threads of this process."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


_ENDS: dict[str, Callable[[Any], Any]] = {
    "exit": sys.exit,
    "vanish": os._exit,
    "signal": lambda number: os.kill(os.getpid(), number),
    "segfault": ctypes.string_at,
    "hang": lambda _: threading.Event().wait(),
    "hold_the_gil": _hold_the_gil,
}


def stream(items: list[Any]) -> Iterator[list[Any]]:
    """Item n gets the parts 0 .. n-1; a negative item raises at once."""
    if min(items) < 0:
        raise ValueError("negative")
    for step in range(max(items)):
        yield [step if step < n else None for n in items]


async def stream_async(items: list[Any]) -> Any:
    """`stream` as an async generator."""
    for part in stream(items):
        yield part


async def echo_async(items: list[Any]) -> list[Any]:
    """Echoes the items."""
    return items


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


def apart(target: Any) -> Any:
    """Wrapper (`worker.spec.Wrapped`) that makes the worker finish the target's results in a separate thread."""
    target.__penstock_finishes_apart__ = True
    return target
