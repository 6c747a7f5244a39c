"""What every server of this program does alike: its loop, its signals, and how it settles once it is up."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from typing import Any


def runner() -> Callable[..., int]:
    """What runs the main coroutine: uvloop where it is, else asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    found: Callable[..., int] = uvloop.run
    return found


class Stop:
    """Set by SIGINT or SIGTERM; the second signal ends the process at once, and the workers with their sockets."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._event = asyncio.Event()

    def catch(self) -> None:
        """Called on the loop's thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._event.is_set():
            os._exit(1)
        self._on_first()
        self._event.set()

    @property
    def told(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    async def unless(self, work: asyncio.Future[Any]) -> None:
        """Waits for the work, whose error is raised, or for the signal, whichever is first."""
        stop = asyncio.ensure_future(self._event.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()


def settle() -> None:
    """What is loaded now stays: the collector need not look at it again, nor run for every few hundred requests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
