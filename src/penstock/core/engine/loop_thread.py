"""LoopThread: the background thread of a portal, with an event loop, a backend, and an inbox for requests."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, Protocol

from penstock.core import os_threads
from penstock.core.contracts import Submitter, Ticket
from penstock.core.engine.waiters import SyncWaiter, failed
from penstock.errors import ModelNotReady, PenstockError
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.engine")

A_PASS = 256  # requests submitted in one pass of the loop


class PortalBackend(Submitter, Protocol):
    """What answers the requests of a portal: an Engine or a substitute. Created and called on its loop."""

    def statistics(self, model: str) -> dict[str, object]:
        """Statistics of a model. Raises ModelNotFound."""

    async def close(self, drain_s: float) -> None:
        """Answers accepted requests for up to `drain_s`, refuses the rest, and stops everything it started."""

    def forget(self) -> None:
        """In a forked child, on any thread: closes the child's copies of descriptors, and touches nothing else."""


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
                caller(ItemResult(error=e.with_traceback(None)))  # its frames hold the item
            except Exception as e:
                log.exception("submit_failed model=%s: its caller gets an error", model)
                caller(failed(e))
        if self._requests and not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self._drain)


class LoopThread:
    """One background thread with its event loop, its inbox and its backend, from start to close."""

    def __init__(self, make: Callable[[], PortalBackend]) -> None:
        self.backend: PortalBackend
        self._started, self._ended = os_threads.new_lock(), os_threads.new_lock()
        self._error: BaseException | None = None
        self._started.acquire()
        self._ended.acquire()
        os_threads.start_thread(self._main, make, name="penstock-portal")
        self._started.acquire()
        if self._error is not None:
            raise self._error.with_traceback(None)  # the other thread's frames do not help

    def _main(self, make: Callable[[], PortalBackend]) -> None:
        self._thread = os_threads.thread_id()
        loop = self._loop = os_threads.new_event_loop()
        asyncio.set_event_loop(loop)
        self.post = loop.call_soon_threadsafe

        async def made() -> PortalBackend:
            backend = make()
            await asyncio.sleep(0)  # runs its first step: a fork must not find its imports half done
            return backend

        try:
            self.backend = loop.run_until_complete(made())
            self.inbox = RequestInbox(loop, self.backend)
        except BaseException as e:
            self._error = e
        self._started.release()
        try:
            if self._error is None:
                loop.run_forever()
            _cancel_tasks(loop)
            loop.close()
        finally:  # `close` waits for this
            self._ended.release()

    def start(self, coroutine: Coroutine[Any, Any, Any], waiter: SyncWaiter) -> None:
        """On the loop: runs the coroutine as a task, and passes the finished task to the waiter."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(waiter.settle)
        waiter.accepted(task)

    def post_if_open(self, callback: Callable[[], None]) -> None:
        try:
            self.post(callback)
        except RuntimeError:  # the loop is closed: nothing is left to cancel
            pass

    def on_loop(self) -> bool:
        return os_threads.thread_id() == self._thread

    def not_on_loop(self) -> None:
        """Raises RuntimeError on the loop's thread, for example in the done-callback of a future: it would block
        itself."""
        if self.on_loop():
            raise RuntimeError(
                "a blocking call was made on the thread that delivers the answers, where it would wait for itself"
            )

    def close(self, drain_s: float, waiter: SyncWaiter) -> None:
        """Closes the backend, then the loop. Returns when the thread has ended."""
        self.post(self.start, self.backend.close(drain_s), waiter)
        waiter.wait(None)
        self.inbox.close()
        self.post(self._loop.stop)
        self._ended.acquire()
        waiter.value.result()


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the tasks of a stopped loop, so that no thread waits for them for ever."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
