"""LoopThread: the background thread of a portal, with an event loop and a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.core import os_threads
from penstock.core.engine.inbox import PortalBackend, RequestInbox
from penstock.core.engine.waiters import SyncWaiter


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
        loop = self._loop = _new_loop()
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


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the tasks of a stopped loop, so that no thread waits for them for ever."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
