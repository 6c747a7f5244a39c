"""How callers wait for an answer: a thread on a lock, a greenlet on its hub, and whoever holds a `Future`.

Each is a sink of `Backend.submit`. `accepted` and `leave` are called on the portal's loop, as the sink itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator
from typing import Any, Protocol

from penstock.core import os_threads
from penstock.errors import PenstockError
from penstock.types import ItemResult


class Revocable(Protocol):
    """A Ticket, or a task of the loop."""

    def cancel(self) -> object: ...


Post = Callable[..., object]  # `loop.call_soon_threadsafe` of the portal's loop
Convert = Callable[[ItemResult], Any]  # what a caller gets of an answer; raises what the caller is to get


class SyncWaiter:
    """What one thread sleeps on: a lock that is held, and released by the answer. Used again for its next call."""

    __slots__ = ("_lock", "ticket", "value")

    def __init__(self) -> None:
        self._lock = os_threads.new_lock()
        self._lock.acquire()
        self.ticket: Revocable | None = None
        self.value: Any = None

    def accepted(self, ticket: Revocable) -> None:
        self.ticket = ticket

    def __call__(self, result: ItemResult) -> None:
        if result.final:
            self.settle(result)

    def settle(self, value: Any) -> None:
        """Wakes the thread, which finds `value`."""
        self.value, self.ticket = value, None
        self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        """True when it was woken, False after `timeout_s`."""
        return bool(self._lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, _LONGEST_S)))

    def leave(self) -> None:
        """Nobody sleeps here any more: the request is taken back."""
        if self.ticket is not None:
            self.ticket.cancel()


_LONGEST_S = 10**6  # more is not taken by every platform


class Future(concurrent.futures.Future[Any]):
    """A `concurrent.futures.Future` that can be awaited too, on any running asyncio loop.

    `cancel` takes the request out of the queue; one that runs already is not interrupted, its answer is dropped.
    """

    def __init__(self, post: Post, convert: Convert) -> None:
        super().__init__()
        self._post = post
        self._convert = convert
        self._ticket: Revocable | None = None
        self._over = False  # on the loop: answered, or taken back

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def cancel(self) -> bool:
        """True when there will be no answer; False when it is there already."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        try:
            self._post(self.leave)
        except RuntimeError:  # the loop is closed, and all its requests with it
            pass
        return True

    def accepted(self, ticket: Revocable) -> None:
        self._ticket = ticket

    def leave(self) -> None:
        if not self._over:
            self._over = True
            if self._ticket is not None:
                self._ticket.cancel()
            self._settle(None)

    def __call__(self, result: ItemResult) -> None:
        if result.final and not self._over:
            self._over, self._ticket = True, None
            self._settle(result)

    def _settle(self, result: ItemResult | None) -> None:
        """Tells all who wait; None when it was cancelled."""
        if not self.set_running_or_notify_cancel() or result is None:
            return
        try:
            value = self._convert(result)
        except Exception as e:
            self.set_exception(e.with_traceback(None))  # its frames hold this future: a cycle
        else:
            self.set_result(value)


def the_item(result: ItemResult) -> Any:
    """The value of one item. Raises its error."""
    if result.error is not None:
        raise result.error
    return result.body


def every_item(result: ItemResult) -> list[Any]:
    """The values of many items, exceptions in the place of those that failed. Raises what failed all of them."""
    values: list[Any] = the_item(result)
    return values


def all_items(result: ItemResult) -> list[Any]:
    """The values of many items. Raises the error of the first that failed."""
    values = every_item(result)
    for value in values:
        if isinstance(value, Exception):
            raise value
    return values


def failed(error: Exception) -> ItemResult:
    """The answer of a request that could not be queued."""
    if not isinstance(error, PenstockError):
        error = PenstockError(f"the request cannot be queued: {type(error).__name__}: {error}")
    return ItemResult(error=error)
