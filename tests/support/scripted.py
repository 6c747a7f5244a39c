"""Models controlled by their items; models that end, hang or crash their worker; models of every form."""

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock import metrics
from penstock.core.worker.python_model import model
from penstock.errors import BadRequest

CRASHING = "support.scripted:CrashingModel"


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


def endless(items: list[Any]) -> Iterator[list[int]]:
    """Parts without end."""
    for step in itertools.count():
        yield [step] * len(items)


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


class CrashingModel(ScriptedModel):
    """A scripted model with verbs that harm its process."""

    def _do(self, verb: str, argument: Any, size: int) -> Any:
        return VERBS[verb](argument) if verb in VERBS else super()._do(verb, argument, size)


def _hold_the_gil(seconds: float) -> None:
    """Calls C without releasing the GIL, which blocks all Python threads of this process."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


VERBS: dict[str, Callable[[Any], Any]] = {
    "pid": lambda _: os.getpid(),
    "start": lambda command: subprocess.Popen(command).pid,
    "vanish": os._exit,
    "signal": lambda number: os.kill(os.getpid(), number),
    "segfault": ctypes.string_at,
    "hang": lambda _: threading.Event().wait(),
    "hold_the_gil": _hold_the_gil,
}


async def stream_async(items: list[Any]) -> Any:
    """`stream` as an async generator."""
    for part in stream(items):
        yield part


async def echo_async(items: list[Any]) -> list[Any]:
    """Echoes the items."""
    return items


def apart(target: Any) -> Any:
    """Wrapper (`worker.spec.Wrapped`) that makes the worker finish the target's results in a separate thread."""
    target.__penstock_finishes_apart__ = True
    return target


@model(inputs={"x": "FP32[-1,2]", "bias": "FP32[-1,1]"}, outputs={"y": "FP32[-1,2]", "n": "INT64[-1]"})
class DeclaredModel:
    """Doubles rows, adds an optional bias, and counts the rows of the call; a negative row raises."""

    def predict(self, x: Any, bias: Any = None) -> Any:
        if (x < 0).any():
            raise ValueError("negative")
        counts = (x[:, 0] * 0 + len(x)).astype("int64")
        return {"y": x * 2 if bias is None else x * 2 + bias, "n": counts}


@model(inputs={"x": "FP32[-1,2]"}, outputs={"y": "FP32[-1,2]"})
async def doubled_rows(x: Any) -> Any:
    """Doubles rows."""
    return x * 2
