"""LoopThread: a background thread with an event loop, and the one of a portal with its backend and inbox."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from penstock.core import os_threads
from penstock.core.contracts import Submitter
from penstock.core.engine.inbox import BLOCKING, RequestInbox
from penstock.core.portal.waiters import Future, SyncWaiter, WaitingThreads
from penstock.errors import DeadlineExceeded

T = TypeVar("T")


class PortalBackend(Submitter, Protocol):
    """What answers the requests of a portal: an Engine or a substitute. Created and called on its loop."""

    def statistics(self, model: str) -> dict[str, object]:
        """Statistics of a model. Raises ModelNotFound."""

    async def close(self, drain_s: float) -> None:
        """Answers accepted requests for up to `drain_s`, refuses the rest, and stops everything it started."""

    def forget(self) -> None:
        """In a forked child, on any thread: closes the child's copies of descriptors, and touches nothing else."""


class LoopThread:
    """One background thread with its event loop, from start to `stop`."""

    def __init__(self, name: str) -> None:
        self._started, self._ended = os_threads.new_lock(), os_threads.new_lock()
        self._posting, self._ending = os_threads.new_rlock(), False
        self._error: BaseException | None = None
        self._started.acquire()
        self._ended.acquire()
        os_threads.start_thread(self._main, name=name)
        self._started.acquire()
        if self._error is not None:
            raise self._error.with_traceback(None)  # the other thread's frames do not help

    def _main(self) -> None:
        self._thread = os_threads.thread_id()
        loop = self._loop = os_threads.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self.prepare())
        except BaseException as e:
            self._error = e
        self._started.release()
        try:
            if self._error is None:
                loop.run_forever()
            _cancel_tasks(loop)
            loop.close()
        finally:  # `stop` waits for this
            self._ended.release()

    async def prepare(self) -> None:
        """Runs first, on the loop; its error is raised by the constructor."""

    def post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Calls `callback` on the loop. Raises RuntimeError after `end`: the call would be lost."""
        with self._posting:
            if self._ending:
                raise RuntimeError("the loop of this thread has ended")
            self._loop.call_soon_threadsafe(callback, *arguments)

    def start(self, coroutine: Coroutine[Any, Any, Any], waiter: SyncWaiter) -> None:
        """On the loop: runs the coroutine as a task, and passes the finished task to the waiter."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(waiter.settle)
        waiter.accepted(task)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The result of the coroutine, which is cancelled if this thread is interrupted. Raises DeadlineExceeded after
        `timeout_s`, RuntimeError on the loop's thread and after `stop`, and CancelledError if `stop` cancels it."""
        try:
            self.not_on_loop()
            waiter = new_waiter()
            self.post(self.start, coroutine, waiter)
        except BaseException:
            coroutine.close()
            raise
        answered = False
        try:
            answered = waiter.wait(timeout_s)
        finally:
            if not answered:
                self.post(waiter.leave)
        if not answered:
            raise no_answer(timeout_s)
        task: asyncio.Task[T] = waiter.value
        return task.result()

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs the coroutine without waiting for it. Raises RuntimeError after `stop`."""
        self.post(self._loop.create_task, coroutine)

    def on_loop(self) -> bool:
        return os_threads.thread_id() == self._thread

    def not_on_loop(self) -> None:
        """Raises RuntimeError on the loop's thread, for example in the done-callback of a future: it would block
        itself."""
        if self.on_loop():
            raise RuntimeError(BLOCKING)

    def end(self) -> None:
        """Ends the loop after what was posted, and cancels what runs then."""
        with self._posting:
            self.post(self._loop.stop)
            self._ending = True

    def stop(self) -> None:
        """Like `end`; returns when the thread has ended."""
        self.end()
        self._ended.acquire()


class PortalThread(LoopThread):
    """The thread of a portal, with a backend and an inbox for requests."""

    def __init__(self, make: Callable[[], PortalBackend], word: str) -> None:
        """`make` and `word`: see `Portal`."""
        self.backend: PortalBackend
        self._make, self._word = make, word
        super().__init__("penstock-portal")

    async def prepare(self) -> None:
        self.inbox = RequestInbox(self._loop, self._word)
        self.waiting_threads = WaitingThreads(self.inbox)
        self.new_future = _future_class()
        self.backend = self.inbox.backend = self._make()
        await asyncio.sleep(0)  # runs its first step: a fork must not find its imports half done

    def start(self, coroutine: Coroutine[Any, Any, Any], waiter: SyncWaiter) -> None:
        """Like `LoopThread.start`, after the requests that have arrived."""
        self.inbox.drain_all()
        super().start(coroutine, waiter)

    def not_on_loop(self) -> None:
        """Raises RuntimeError on every thread that delivers answers."""
        self.inbox.refuse_to_block()

    def close(self, drain_s: float, waiter: SyncWaiter) -> None:
        """Closes the backend, then the loop. Returns when the thread has ended."""
        self.post(self.start, self._close(drain_s), waiter)
        waiter.wait(None)
        self._ended.acquire()
        waiter.value.result()

    async def _close(self, drain_s: float) -> None:
        try:
            await self.backend.close(drain_s)
        finally:  # in the same step, so that no request reaches a backend that has ended
            self.inbox.close()
            self.end()


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the tasks of a stopped loop, so that no thread waits for them for ever."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    tasks.add(loop.create_task(asyncio.sleep(0)))  # tasks that are done: what waits for them is still to be called
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _future_class() -> type[Future]:
    if os_threads.patched():
        from penstock.core.portal.gevent_waiter import GeventFuture

        return GeventFuture
    return Future


def no_answer(timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"there was no answer within {timeout_s:g} s")


def new_waiter() -> SyncWaiter:
    """A waiter for one call: of a greenlet in a program patched by gevent, else of a thread."""
    if os_threads.patched():
        from penstock.core.portal.gevent_waiter import GeventWaiter

        return GeventWaiter()
    return SyncWaiter()
