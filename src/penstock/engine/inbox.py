"""How the requests of other threads reach the event loop, and how their answers come back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.engine.call import Call
from penstock.engine.engine import Engine
from penstock.errors import ModelNotReady, PenstockError
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.engine")
_Request = tuple[str, Item, Callable[[ItemResult], None], float | None, int]  # model, item, sink, budget_s, priority


class Waiter:
    """What one thread sleeps on: a lock that is held, and released by the answer."""

    __slots__ = ("lock", "result")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.result: ItemResult | None = None

    def __call__(self, result: ItemResult) -> None:
        if result.final:
            self.result = result
            self.lock.release()


class ToFuture:
    """A sink that settles a `concurrent.futures.Future` with the one item's answer."""

    __slots__ = ("future", "loop")

    def __init__(self, future: concurrent.futures.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.future = future
        self.loop = loop

    def accepted(self, call: Call) -> None:
        """On the loop: from now on `future.cancel()` takes the request out of the queue."""

        def leave() -> None:
            if call.sink is not None:  # else it is answered, and the future knows
                call.cancel()
                self.future.set_running_or_notify_cancel()  # `concurrent.futures.wait` waits for this

        def done(future: concurrent.futures.Future[Any]) -> None:
            if future.cancelled():
                self.loop.call_soon_threadsafe(leave)

        self.future.add_done_callback(done)

    def __call__(self, result: ItemResult) -> None:
        if not result.final or not self.future.set_running_or_notify_cancel():
            return
        if result.error is not None:
            self.future.set_exception(result.error)
        else:
            self.future.set_result(result.body)


class Inbox:
    """Requests of other threads on their way to the loop; rings it once for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self._loop = loop
        self._engine = engine
        self._requests: deque[_Request] = deque()
        self._rung = False
        self._closed = False

    def put(
        self, model: str, item: Item, sink: Callable[[ItemResult], None], budget_s: float | None, priority: int
    ) -> None:
        self._requests.append((model, item, sink, budget_s, priority))
        if self._closed:  # looked at after the append: either we see it, or `close` sees the request
            self.close()
        elif not self._rung:
            self._rung = True
            self._loop.call_soon_threadsafe(self._drain)

    def close(self) -> None:
        """From any thread, while the loop still runs: what has not reached the engine is refused."""
        self._closed = True
        for _, _, sink, _, _ in self._taken():
            sink(ItemResult(error=ModelNotReady("the portal is closed")))

    def _taken(self) -> Iterator[_Request]:
        """Requests, each handed to one thread only."""
        while True:
            try:
                yield self._requests.popleft()
            except IndexError:
                return

    def _drain(self) -> None:
        self._rung = False  # before the deque is emptied: a request that comes now rings again
        for model, item, sink, budget_s, priority in self._taken():
            try:
                call = self._engine.submit(model, None, item, sink, budget_s=budget_s, priority=priority)
                if isinstance(sink, ToFuture):
                    sink.accepted(call)
            except PenstockError as e:
                sink(ItemResult(error=e))
            except Exception as e:
                log.exception("submit_failed model=%s: its caller gets an error", model)
                sink(ItemResult(error=PenstockError(f"the request cannot be queued: {type(e).__name__}: {e}")))
