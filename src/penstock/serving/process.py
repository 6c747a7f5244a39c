"""Process lifetime of servers: the event loop, stop signals, the ready message and garbage collection."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from penstock.config.checks import is_loopback
from penstock.core.os_threads import keep_standard_files, silence
from penstock.errors import PenstockError

log = logging.getLogger("penstock.serving")

READY_FD: Final = "PENSTOCK_READY_FD"
PARENT_FD: Final = "PENSTOCK_PARENT_FD"
LAME_DUCK_S: Final = 5.0


def runner() -> Callable[..., int]:
    """The function that runs a main coroutine: uvloop's if it is installed, otherwise asyncio's."""
    keep_standard_files()
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    run: Callable[..., int] = uvloop.run
    return run


class StopSignal:
    """Set by SIGINT, SIGTERM, or the end of the process at the other end of PENSTOCK_PARENT_FD.

    A second signal ends the process at once; the workers end with their sockets. SIGHUP calls `reload` until then, in
    one task at a time.
    """

    def __init__(self, on_first: Callable[[], None], reload: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._on_first = on_first
        self._reload = reload
        self._reloading: asyncio.Task[None] | None = None
        self._again = False
        self._event = asyncio.Event()

    def catch(self) -> None:
        """Installs the handlers. Must be called on the loop's thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        fd = os.environ.pop(PARENT_FD, "")  # workers must not inherit it
        if fd.isdigit():
            with contextlib.suppress(OSError):
                loop.add_reader(int(fd), self._on_parents_end, int(fd))

    def _on_signal(self) -> None:
        if self._event.is_set():
            os._exit(1)
        self._on_first()
        self._event.set()

    def _on_hangup(self) -> None:
        if self._reloading is not None and not self._reloading.done():
            self._again = True
        elif not self._event.is_set():
            self._reloading = asyncio.ensure_future(self._reload_all())

    async def _reload_all(self) -> None:
        try:
            await self._reload()
        except PenstockError as error:
            log.error("event=reload_failed error=%r consequence=nothing_else_is_reloaded", str(error))
        except Exception:
            log.exception("event=reload_failed consequence=nothing_else_is_reloaded")
        else:
            log.info("event=reloaded")
        if self._again:
            self._again = False
            await self._reload_all()

    def _on_parents_end(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        if not self._event.is_set():
            self._on_signal()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    async def unless(self, work: asyncio.Future[Any]) -> None:
        """Waits for the work or the signal, whichever is first. Raises the error of the work."""
        stop = asyncio.ensure_future(self._event.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()


def lame_duck_s(hosts: Iterable[str]) -> float:
    """How long a server that is not ready accepts connections: a balancer elsewhere needs time to notice."""
    return 0.0 if all(map(is_loopback, hosts)) else LAME_DUCK_S


def say(text: str) -> None:
    """Prints on stdout. A full disk or a pipe without a reader is no reason to end, now or when Python exits."""
    try:
        print(text, flush=True)
    except OSError as error:
        silence(sys.stdout)
        log.warning("event=not_printed error=%s consequence=stdout_is_silent", error.strerror)


def report_ready(urls: Mapping[str, str]) -> None:
    """Writes the addresses as one JSON line to PENSTOCK_READY_FD, if set, and closes it."""
    fd = os.environ.get(READY_FD, "")
    if fd.isdigit():
        with contextlib.suppress(OSError), os.fdopen(int(fd), "w") as file:
            file.write(json.dumps(urls) + "\n")


def freeze_heap() -> None:
    """Excludes all loaded objects from garbage collection, and makes collections rarer under load."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
