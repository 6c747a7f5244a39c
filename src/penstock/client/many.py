"""Many calls at once: a window of running calls, with results in order or as they complete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from penstock.errors import BadRequest, PenstockError

MAX_CONCURRENCY: Final = 10_000


class CallWindow:
    """At most `concurrency` calls run, or have a result that was not taken. Used on one event loop.

    With `ordered`, results come in the order of the values; otherwise each is (position of its value, result), as they
    complete. An error takes the place of a result if `return_exceptions`; otherwise it is raised, and ends the window.
    """

    def __init__(
        self,
        send: Callable[[Any], Awaitable[Any]],
        concurrency: int = 16,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> None:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise BadRequest(f"concurrency is {concurrency}, expected a whole number from 1 to {MAX_CONCURRENCY}")
        self._send = send
        self._concurrency = concurrency
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._running: dict[asyncio.Task[Any], int] = {}  # in the order of their values
        self._count = 0

    async def put(self, value: Any) -> list[Any]:
        """Starts a call, and returns the results that are due. Waits for one if the window is full."""
        self._running[asyncio.ensure_future(self._call(value))] = self._count
        self._count += 1
        await asyncio.sleep(0)  # the call begins even if the next value takes long
        return await self.take() if len(self._running) >= self._concurrency else self._due()

    async def take(self) -> list[Any]:
        """The next results, at least one; none if no call is left."""
        if self._running:
            waited = [next(iter(self._running))] if self._ordered else self._running
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return self._due()

    async def close(self) -> None:
        """Cancels what runs."""
        running = list(self._running)
        self._running.clear()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _call(self, value: Any) -> Any:
        try:
            return await self._send(value)
        except PenstockError as error:
            if self._return_exceptions:
                return error
            raise

    def _due(self) -> list[Any]:
        found = []
        for task, position in list(self._running.items()):
            if not task.done():
                if self._ordered:
                    break
                continue
            del self._running[task]
            found.append(task.result() if self._ordered else (position, task.result()))
        return found
