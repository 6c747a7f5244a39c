"""How requests from other threads reach the event loop of a portal, and what answers them there."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from penstock.core.contracts import Submitter, Ticket
from penstock.core.engine.waiters import failed
from penstock.errors import ModelNotReady, PenstockError
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.engine")

A_PASS = 256  # requests submitted in one pass of the loop


class PortalBackend(Submitter, Protocol):
    """What answers the requests of a portal: an Engine or a substitute. Created and called on its loop."""

    def statistics(self, model: str) -> dict[str, object]:
        """Statistics of a model. Raises ModelNotFound."""
        ...

    async def close(self, drain_s: float) -> None:
        """Answers accepted requests for up to `drain_s`, refuses the rest, and stops everything it started."""
        ...

    def forget(self) -> None:
        """In a forked child, on any thread: closes the child's copies of descriptors, and touches nothing else."""
        ...


class Caller(Protocol):
    """A caller: a sink that also receives its ticket, see `waiters.py`."""

    def accepted(self, ticket: Ticket) -> None: ...

    def __call__(self, result: ItemResult) -> None: ...


_Request = tuple[str, Item, Caller, float | None, int]  # model, item, caller, budget_s, priority


class RequestInbox:
    """Requests of other threads on their way to the loop; one wake-up serves many requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, backend: PortalBackend) -> None:
        self._loop = loop
        self._backend = backend
        self._requests: deque[_Request] = deque()
        self._wake_scheduled = False
        self._closed = False

    def put(self, model: str, item: Item, caller: Caller, budget_s: float | None, priority: int) -> None:
        self._requests.append((model, item, caller, budget_s, priority))
        if self._closed:  # checked after the append: either we see it, or `close` sees the request
            self.close()
        elif not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._drain)

    def close(self) -> None:
        """From any thread, while the loop runs: refuses the requests that have not reached the backend."""
        self._closed = True
        for _, _, caller, _, _ in self._taken():
            caller(ItemResult(error=ModelNotReady("the portal is closed")))

    def _taken(self) -> Iterator[_Request]:
        """Yields each request to one thread only."""
        while True:
            try:
                yield self._requests.popleft()
            except IndexError:
                return

    def _drain(self) -> None:
        self._wake_scheduled = False  # before the deque is emptied, so that a new request rings again
        submit = self._backend.submit
        # a flood is spread over several passes, so that submitted requests are sent in between
        for model, item, caller, budget_s, priority in islice(self._taken(), A_PASS):
            try:
                caller.accepted(submit(model, None, item, caller, budget_s=budget_s, priority=priority))
            except PenstockError as e:
                caller(ItemResult(error=e))
            except Exception as e:
                log.exception("submit_failed model=%s: its caller gets an error", model)
                caller(failed(e))
        if self._requests and not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self._drain)
