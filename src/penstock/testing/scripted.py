"""Models that do what their items say: for the checks of transports, and for tests of what lies above them."""

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
    """Items are `(verb, argument)`; the result is the argument, unless the verb says otherwise. Others are echoed."""

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
        if verb == "let_go":
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
    """One call into C that does not give the GIL back: no Python thread of this process runs meanwhile."""
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
    """Item n gets the parts 0 .. n-1; a negative one raises at once."""
    if min(items) < 0:
        raise ValueError("negative")
    for step in range(max(items)):
        yield [step if step < n else None for n in items]


async def stream_async(items: list[Any]) -> Any:
    """As `stream`, asynchronously."""
    for part in stream(items):
        yield part


async def echo_async(items: list[Any]) -> list[Any]:
    """The items."""
    return items


class NeverLoads:
    """Raises in `load`."""

    def load(self, device: str) -> None:
        raise RuntimeError("no weights here")

    def predict(self, items: list[Any]) -> list[Any]:
        return items


class DiesWhileLoading(NeverLoads):
    """Ends its process in `load`; under the thread transport, its thread."""

    def load(self, device: str) -> None:
        sys.exit(7)


def apart(target: Any) -> Any:
    """The target, whose answers are then finished in a thread of their own: the wrapper of a `worker.spec.Wrapped`."""
    target.__penstock_finishes_apart__ = True
    return target
