"""How the requests of other threads reach the event loop of a portal, and who answers them there."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from penstock.core.contracts import Ticket
from penstock.core.engine.waiters import failed
from penstock.errors import ModelNotReady, PenstockError
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.engine")

A_PASS = 256  # requests that one pass of the loop hands over


class PortalBackend(Protocol):
    """What answers the requests of a portal: an Engine, or what stands for one. Made and called on its loop."""

    def submit(
        self,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Queues one item; see `frontends.base.Backend.submit`."""
        ...

    def statistics(self, model: str) -> dict[str, object]:
        """What is known of a model. Raises ModelNotFound."""
        ...

    async def close(self, drain_s: float) -> None:
        """Answers what was accepted, at most for `drain_s`, refuses the rest, and ends what it has started."""
        ...

    def forget(self) -> None:
        """In a forked child, on any thread: closes this process's copies of descriptors, and touches nothing else."""
        ...


class Caller(Protocol):
    """Who waits for an answer: a sink that is told of its ticket, see `waiters.py`."""

    def accepted(self, ticket: Ticket) -> None: ...

    def __call__(self, result: ItemResult) -> None: ...


_Request = tuple[str, Item, Caller, float | None, int]  # model, item, caller, budget_s, priority


class RequestInbox:
    """Requests of other threads on their way to the loop; rings it once for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop, backend: PortalBackend) -> None:
        self._loop = loop
        self._backend = backend
        self._requests: deque[_Request] = deque()
        self._rung = False
        self._closed = False

    def put(self, model: str, item: Item, caller: Caller, budget_s: float | None, priority: int) -> None:
        self._requests.append((model, item, caller, budget_s, priority))
        if self._closed:  # looked at after the append: either we see it, or `close` sees the request
            self.close()
        elif not self._rung:
            self._rung = True
            self._loop.call_soon_threadsafe(self._drain)

    def close(self) -> None:
        """From any thread, while the loop still runs: what has not reached the backend is refused."""
        self._closed = True
        for _, _, caller, _, _ in self._taken():
            caller(ItemResult(error=ModelNotReady("the portal is closed")))

    def _taken(self) -> Iterator[_Request]:
        """Requests, each handed to one thread only."""
        while True:
            try:
                yield self._requests.popleft()
            except IndexError:
                return

    def _drain(self) -> None:
        self._rung = False  # before the deque is emptied: a request that comes now rings again
        submit = self._backend.submit
        # of a flood, some in each pass of the loop: what was handed over is sent in between
        for model, item, caller, budget_s, priority in islice(self._taken(), A_PASS):
            try:
                caller.accepted(submit(model, None, item, caller, budget_s=budget_s, priority=priority))
            except PenstockError as e:
                caller(ItemResult(error=e))
            except Exception as e:
                log.exception("submit_failed model=%s: its caller gets an error", model)
                caller(failed(e))
        if self._requests and not self._rung:
            self._rung = True
            self._loop.call_soon(self._drain)
