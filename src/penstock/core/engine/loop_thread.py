"""LoopThread: the background thread of a portal, with an event loop, a backend, and an inbox for requests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from penstock.core import os_threads
from penstock.core.contracts import Submitter
from penstock.core.engine.inbox import RequestInbox
from penstock.core.engine.waiters import SyncWaiter


class PortalBackend(Submitter, Protocol):
    """What answers the requests of a portal: an Engine or a substitute. Created and called on its loop."""

    def statistics(self, model: str) -> dict[str, object]:
        """Statistics of a model. Raises ModelNotFound."""

    async def close(self, drain_s: float) -> None:
        """Answers accepted requests for up to `drain_s`, refuses the rest, and stops everything it started."""

    def forget(self) -> None:
        """In a forked child, on any thread: closes the child's copies of descriptors, and touches nothing else."""


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
        self.inbox = RequestInbox(loop)

        async def made() -> PortalBackend:
            backend = self.inbox.backend = make()
            await asyncio.sleep(0)  # runs its first step: a fork must not find its imports half done
            return backend

        try:
            self.backend = loop.run_until_complete(made())
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
        """On the loop: runs the coroutine as a task, and passes the finished task to the waiter. What was requested
        before comes first."""
        self.inbox.drain()
        task = self._loop.create_task(coroutine)
        task.add_done_callback(waiter.settle)
        waiter.accepted(task)

    def post_if_open(self, callback: Callable[[], None]) -> None:
        try:
            self.inbox.post(callback)
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
