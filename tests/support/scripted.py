"""Models that end, hang or crash their worker, and models of every form."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from penstock.testing import scripted

CRASHING = "support.scripted:CrashingModel"


class CrashingModel(scripted.ScriptedModel):
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
    """`scripted.stream` as an async generator."""
    for part in scripted.stream(items):
        yield part


async def echo_async(items: list[Any]) -> list[Any]:
    """Echoes the items."""
    return items


def apart(target: Any) -> Any:
    """Wrapper (`worker.spec.Wrapped`) that makes the worker finish the target's results in a separate thread."""
    target.__penstock_finishes_apart__ = True
    return target
