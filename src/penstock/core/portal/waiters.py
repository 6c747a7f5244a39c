"""How callers wait for a response: a thread on a lock, a greenlet on its hub, and the holder of a `Future`.

Each is a sink of `Backend.submit`. The sink, `accepted` and `leave` are called with the portal's
guard.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

from penstock.core import os_threads
from penstock.core.engine.inbox import Inbox, RequestInbox
from penstock.types import ItemResult

log = logging.getLogger("penstock.portal")

# choices: behind Flask with a no-op, groups bring 1.05 times the requests; 128 threads that only call lose 1 %
MOST_WOKEN = 16
LATE_S = 0.0005


class Revocable(Protocol):
    """A Ticket, or a task of the loop."""

    def cancel(self) -> object: ...


Convert = Callable[[ItemResult], Any]  # turns a response into the caller's result, or raises its error


class SyncWaiter:
    """What one thread waits on: a held lock that the response releases. The thread reuses it for its next call."""

    __slots__ = ("lock", "ticket", "value")

    def __init__(self) -> None:
        self.lock = os_threads.new_lock()
        self.lock.acquire()
        self.ticket: Revocable | None = None
        self.value: Any = None

    def accepted(self, ticket: Revocable) -> None:
        self.ticket = ticket

    def __call__(self, result: ItemResult) -> None:
        if result.final:
            self.settle(result)

    def settle(self, value: Any) -> None:
        """Wakes the thread with `value`."""
        self.value, self.ticket = value, None
        self.lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        """True when woken, False after `timeout_s`."""
        return bool(self.lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, _LONGEST_S)))

    def leave(self) -> None:
        """Cancels the request, because its caller no longer waits."""
        if self.ticket is not None:
            self.ticket.cancel()


class WaitingThreads:
    """The threads that wait for responses of one portal.

    Threads that a batch wakes all at once wait for the interpreter together, and each looks every 5 ms whether it is
    free. So one is woken, and it wakes the next one as soon as it runs. If it runs late, because threads that do other
    work compete for the interpreter, the next ones are woken in larger groups, of which one wakes the next group. The
    thread that handles signals is not among them: an exception of a handler would leave the others asleep.
    """

    def __init__(self, inbox: RequestInbox) -> None:
        self.waiting = 0
        self._inbox = inbox
        self._answered: deque[ThreadWaiter] = deque()
        self._group, self._woken_s = 1, 0.0

    def answered(self, waiter: ThreadWaiter) -> None:
        """Wakes the waiter: now if it is the only one, else after all responses of this pass and after the others."""
        self.waiting -= 1
        if self.waiting < 1 and not self._answered and not self._inbox.waking:
            waiter.lock.release()
            return
        if not self._answered:
            self._inbox.after(self._begin)
        self._answered.append(waiter)

    def _begin(self) -> None:
        if not self._inbox.waking:
            self._inbox.waking = True
            self.wake_next()

    def wake_next(self) -> None:
        """Wakes the first group of the answered threads."""
        if self._woken_s:  # by the one that was woken to call this
            late = time.monotonic() > self._woken_s + LATE_S
            self._group = min(2 * self._group, MOST_WOKEN) if late else max(1, self._group // 2)
        more = self._group
        while True:
            try:
                waiter = self._answered.popleft()
            except IndexError:
                self._inbox.waking, self._woken_s = False, 0.0
                if not self._answered:  # else the next one was answered meanwhile
                    self._inbox.woken()
                    return
                self._inbox.waking = True
            else:
                if waiter.left:
                    continue
                more -= 1
                if more < 1 or not self._answered:
                    waiter.wakes, self._woken_s = True, time.monotonic()
                    waiter.lock.release()
                    return
                waiter.lock.release()


class ThreadWaiter(SyncWaiter):
    """What one thread waits on, beside others. Once woken, it wakes the next one."""

    __slots__ = ("_waiting_threads", "left", "wakes")

    def __init__(self, waiting: WaitingThreads) -> None:
        super().__init__()
        self._waiting_threads = waiting
        self.left = False
        self.wakes = False  # it is its turn to wake the next one

    def accepted(self, ticket: Revocable) -> None:
        if self.left:
            ticket.cancel()
        else:
            self.ticket = ticket
            self._waiting_threads.waiting += 1

    def settle(self, value: Any) -> None:
        if self.ticket is None:  # refused, perhaps by the thread that closes the portal
            super().settle(value)
        else:
            self.value, self.ticket = value, None
            self._waiting_threads.answered(self)

    def wait(self, timeout_s: float | None) -> bool:
        woken = super().wait(timeout_s)
        if self.wakes:
            self.wakes = False
            self._waiting_threads.wake_next()
        return woken

    def leave(self) -> None:
        ticket, self.ticket, self.left = self.ticket, None, True
        if ticket is not None:
            self._waiting_threads.waiting -= 1
            ticket.cancel()
        if self.wakes:
            self.wakes = False
            self._waiting_threads.wake_next()


_LONGEST_S = 10**6  # some platforms refuse longer timeouts


class LoopWaiters:
    """Coroutines of one asyncio loop that other threads wake. One wake-up serves all that come until the loop runs.

    A signal handler may raise in the loop's thread, and the loop may run again: a wake-up that did not get to its first
    `try` is made up for by the next coroutine that waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ended: deque[asyncio.Future[None]] = deque()
        self._due = False

    def new(self) -> asyncio.Future[None]:
        """What one coroutine waits on."""
        if self._ended:
            self._run()
        return self._loop.create_future()

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """Ends what a coroutine waits on, from any thread."""
        self._ended.append(waiter)
        if not self._due:
            try:
                self._due = True
                self._loop.call_soon_threadsafe(self._run)
            except BaseException:
                self._due = False
                if not self._loop.is_closed():  # else nothing waits there any more
                    raise

    def _run(self) -> None:
        try:
            self._due = False  # before waiters are taken, so that a new one wakes the loop again
            while self._ended:
                if not self._ended[0].done():
                    self._ended[0].set_result(None)
                self._ended.popleft()
        finally:
            if self._ended:
                self._loop.call_soon(self._run)


_LOOPS: weakref.WeakValueDictionary[int, LoopWaiters] = weakref.WeakValueDictionary()


def _waiters_of(loop: asyncio.AbstractEventLoop) -> LoopWaiters:
    found = _LOOPS.get(id(loop))
    if found is None:
        found = _LOOPS[id(loop)] = LoopWaiters(loop)
    return found


_NOBODY = object()  # in place of the condition of a future that ended before anyone asked for one
_FINISHED = concurrent.futures._base.FINISHED
_CANCELLED = concurrent.futures._base.CANCELLED_AND_NOTIFIED


class Future(concurrent.futures.Future[Any]):
    """A `concurrent.futures.Future` that can also be awaited, on any running asyncio loop.

    `cancel` removes a queued request. A running request is not interrupted; its response is dropped.

    What others may wait on, a condition and two lists, is made when it is first used: most futures are looked at when
    they are done. Either somebody makes the condition first, and then the state changes under it, as in the base class;
    or the end takes its place first, and whoever asks for a condition later finds the future done.
    The response is converted by the first thread that asks for it.
    """

    _state = concurrent.futures._base.PENDING
    _response: ItemResult | None = None  # not converted yet
    _value: Any = None
    _error: Exception | None = None

    def __init__(self, inbox: Inbox | None, convert: Convert) -> None:  # the base class would make what few need
        """`inbox`: of its request. None: it gets its response at once."""
        self._inbox = inbox
        self._convert = convert
        self._ticket: Revocable | None = None
        self._open = True  # whoever deletes it ends the future; an access to `__dict__` would cost more

    def _made(self, name: str, make: Callable[[], Any]) -> Any:
        """The attribute, made by the first thread that asks for it."""
        found = self.__dict__.get(name)
        return self.__dict__.setdefault(name, make()) if found is None else found

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        found = self._made("made_condition", threading.Condition)
        if found is _NOBODY:
            self._state = _FINISHED  # the thread that ends it may not have come to that yet
            found = self._made("late_condition", threading.Condition)
        return found

    _waiters: Any = property(lambda self: self._made("made_waiters", list))
    _done_callbacks: Any = property(lambda self: self._made("made_callbacks", list))
    _result: Any = property(lambda self: self._converted()._value)
    _exception: Any = property(lambda self: self._converted()._error)

    def _converted(self) -> Future:
        response = self._response
        if response is not None:
            try:
                self._value = self._convert(response)
            except Exception as e:
                self._error = e.with_traceback(None)  # its frames hold this future: a cycle
            self._response = None
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        if self._inbox is not None:
            self._inbox.refuse_own_thread()
        waiters = _waiters_of(asyncio.get_running_loop())
        ended = waiters.new()
        self.add_done_callback(lambda _: waiters.wake(ended))
        try:
            yield from ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result()

    def done(self) -> bool:
        return self._state in (_FINISHED, _CANCELLED)

    def cancelled(self) -> bool:
        return self._state == _CANCELLED

    def result(self, timeout: float | None = None) -> Any:
        if self._state == _FINISHED and self._converted()._error is None:
            return self._value
        self._refuse_to_block()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse_to_block()
        return super().exception(timeout)

    def _refuse_to_block(self) -> None:
        if self._inbox is not None and not self.done():
            self._inbox.refuse_to_block()

    def cancel(self) -> bool:
        """True if there will be no response; False if it already arrived."""
        try:
            del self._open
        except AttributeError:
            return self.cancelled()
        assert self._inbox is not None
        self._inbox.post(self.leave)  # first: a callback may raise SystemExit
        self._end(_CANCELLED)
        return True

    def accepted(self, ticket: Revocable) -> None:
        self._ticket = ticket

    def leave(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.cancel()

    def __call__(self, result: ItemResult) -> None:
        if not result.final:
            return
        self._ticket = None
        try:
            del self._open
        except AttributeError:
            return
        self._response = result
        if self.__dict__.setdefault("made_condition", _NOBODY) is _NOBODY:
            self._state = _FINISHED
            return
        try:
            self._end(_FINISHED)
        except BaseException:  # of a callback, such as SystemExit: it must not end the thread that answers others
            log.exception("callback_failed future=%r", self)

    def _end(self, state: str) -> None:
        with self._condition:
            self._state = state
            for waiter in self._waiters:
                if state == _CANCELLED:
                    waiter.add_cancelled(self)
                elif self._exception is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            self._condition.notify_all()
        self._invoke_callbacks()

    def _invoke_callbacks(self) -> None:
        """Calls every callback: behind one that raises SystemExit, others may wake coroutines."""
        exits: BaseException | None = None
        for callback in self._done_callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("callback_failed future=%r", self)
            except BaseException as e:
                exits = e
        if exits is not None:
            raise exits


def the_item(result: ItemResult) -> Any:
    """The value of one item. Raises its error."""
    if result.error is not None:
        raise result.error
    return result.body


def every_item(result: ItemResult) -> list[Any]:
    """The values of many items, with exceptions in place of failed ones. Raises an error of the whole request."""
    values: list[Any] = the_item(result)
    return values


def all_items(result: ItemResult) -> list[Any]:
    """The values of many items. Raises the error of the first failed one."""
    values = every_item(result)
    for value in values:
        if isinstance(value, Exception):
            raise value
    return values
