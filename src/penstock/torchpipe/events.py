"""TorchPipe's Event: signals the end of items that no caller waits for. It has the names of both TorchPipe branches."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.core import os_threads
from penstock.core.portal.loop_thread import new_waiter
from penstock.core.portal.waiters import SyncWaiter

log = logging.getLogger("penstock.torchpipe")

_answering: set[int] = set()  # threads that currently deliver results


@contextmanager
def answering() -> Iterator[None]:
    """Marks this thread as one that delivers results, and therefore must not wait for one."""
    _answering.add(os_threads.thread_id())
    try:
        yield
    finally:
        _answering.discard(os_threads.thread_id())


class Event:
    """Set when `num` items are done: those whose dicts contain it as `event`, in one call or in several.

    Callbacks run once, on the thread that delivers the results, before any waiting thread wakes. The last callback runs
    first. Callbacks may begin other items with an event, but must not wait for any. An event serves `num` items once.
    """

    def __init__(self, num: int = 1) -> None:
        if num < 1:
            raise ValueError(f"an event is for {num} items, expected 1 or more")
        self._num = num
        self._begun = 0
        self._left = num
        self._over = False  # the callbacks have run
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._on_error: Callable[[str], object] | None = None
        self._waiters: list[SyncWaiter] = []
        self._lock = os_threads.new_lock()
        self._created_s = time.monotonic()

    # ---- called by pipe

    def begin(self) -> None:
        """Counts one more item. Raises ValueError after `num` items."""
        with self._lock:
            if self._begun >= self._num:
                raise ValueError(f"the event was already used for {self._num} items, its maximum")
            self._begun += 1

    def settle(self, error: BaseException | None = None) -> None:
        """Counts one finished item. The last one runs the callbacks and wakes waiting threads."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
            callbacks, self._callbacks = self._callbacks[::-1], []
            on_error, text = self._on_error, str(self._error)
        for callback in callbacks:
            _call(callback)
        if self._error is not None and on_error is not None:
            _call(lambda: on_error(text))
        with self._lock:
            self._over = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.settle(None)

    # ---- called by programs

    def wait(self, timeout_ms: float | None = None) -> bool:
        """True when all items are done, False after `timeout_ms`. Raises the first error of an item."""
        self._sleep(None if timeout_ms is None else timeout_ms / 1000)
        self.try_throw()
        return self._over

    Wait = wait

    def _sleep(self, timeout_s: float | None) -> None:
        with self._lock:
            if self._over:
                return
            if os_threads.thread_id() in _answering:
                raise RuntimeError("a callback must not wait for an event: its thread delivers the results")
            waiter = new_waiter()
            self._waiters.append(waiter)
        if not waiter.wait(timeout_s):
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                    waiter.leave()

    def is_set(self) -> bool:
        """Whether all items are done."""
        return self._over

    def valid(self) -> bool:
        """Whether another item may begin with it."""
        return self._begun < self._num

    def time_passed(self) -> float:
        """Milliseconds since its creation."""
        return (time.monotonic() - self._created_s) * 1000

    def get_exception(self) -> BaseException | None:
        """The first error of an item, if any."""
        return self._error

    def try_throw(self) -> None:
        """Raises the first error of an item, if any."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def set_callback(self, callback: Callable[[], object]) -> None:
        """Adds a callback for the end of all items, failed or not. Calls it at once if they are done."""
        with self._lock:
            if self._left:
                self._callbacks.append(callback)
                return
        callback()

    def set_final_callback(self, callback: Callable[[], object]) -> None:
        """As `set_callback`. Raises RuntimeError if there already is a callback."""
        if self._callbacks:
            raise RuntimeError("the event already has a callback; set_callback adds another")
        self.set_callback(callback)

    def set_exception_callback(self, callback: Callable[[str], object]) -> None:
        """Sets the callback that receives the text of the first error when all items are done."""
        with self._lock:
            if self._left:
                self._on_error = callback
                return
        if self._error is not None:
            callback(str(self._error))


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        log.exception("callback_failed: waiting threads still wake")
