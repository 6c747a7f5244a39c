"""What every server of this program does alike: its loop, its signals, and how it settles once it is up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

READY_FD: Final = "PENSTOCK_READY_FD"
PARENT_FD: Final = "PENSTOCK_PARENT_FD"


def runner() -> Callable[..., int]:
    """What runs the main coroutine: uvloop where it is, else asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    found: Callable[..., int] = uvloop.run
    return found


class StopSignal:
    """Set by SIGINT, SIGTERM or the end of the process that holds the other end of PENSTOCK_PARENT_FD.

    The second signal ends the process at once, and the workers with their sockets.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._event = asyncio.Event()

    def catch(self) -> None:
        """Called on the loop's thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        fd = os.environ.pop(PARENT_FD, "")  # what the workers start does not end with this process's parent
        if fd.isdigit():
            with contextlib.suppress(OSError):
                loop.add_reader(int(fd), self._on_parents_end, int(fd))

    def _on_signal(self) -> None:
        if self._event.is_set():
            os._exit(1)
        self._on_first()
        self._event.set()

    def _on_parents_end(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        if not self._event.is_set():
            self._on_signal()

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


def report_ready(urls: Mapping[str, str]) -> None:
    """Writes the addresses as one JSON line to PENSTOCK_READY_FD, if there is one, and closes it."""
    fd = os.environ.get(READY_FD, "")
    if fd.isdigit():
        with contextlib.suppress(OSError), os.fdopen(int(fd), "w") as file:
            file.write(json.dumps(urls) + "\n")


def freeze_heap() -> None:
    """What is loaded now stays: the collector need not look at it again, nor run for every few hundred requests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
