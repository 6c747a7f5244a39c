"""Waits for a condition, in threads and in event loops."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0


def wait_for(
    condition: Callable[[], T],
    patience_s: float = PATIENCE_S,
    *,
    process: subprocess.Popen[Any] | None = None,
    said: Callable[[], object] = lambda: "waited in vain",
) -> T:
    """The value of the condition once it is true. Fails with `said()` after `patience_s`, or if the process ends."""
    end = time.monotonic() + patience_s
    while not (found := condition()):
        assert process is None or process.poll() is None, said()
        assert time.monotonic() < end, said()
        time.sleep(0.01)
    return found


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Returns once the condition is true; fails after `patience_s`."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.001)
