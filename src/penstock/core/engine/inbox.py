"""Inboxes: requests of other threads on their way to the engine of a portal."""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf as INF  # not the scheduler's: a client must not load it
from typing import Protocol

from penstock.core import os_threads
from penstock.core.contracts import Submitter, Ticket
from penstock.errors import ModelNotReady, PenstockError
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.engine")

# choices
REQUESTS_PER_PASS = 256  # submitted in one pass
BLOCKING = "a blocking call was made on the thread that delivers the answers, where it would wait for itself"
LOOK_S = 0.02  # a request waits at most this long for the loop to run for another reason


class Caller(Protocol):
    """A caller: a sink that also receives its ticket, see `core/portal/waiters.py`."""

    def accepted(self, ticket: Ticket) -> None: ...

    def __call__(self, result: ItemResult) -> None: ...


_Request = tuple[str, Item, Caller]  # model, item, caller
_Callback = Callable[[], object]


class Inbox:
    """Requests in the order in which threads put them. Whoever drains it holds the `guard` of the portal."""

    backend: Submitter
    submit_row: Callable[[Item, Sink], Ticket] | None = None  # the shortest way for a request of one row

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._requests: deque[_Request | _Callback] = deque()
        self._look_at = INF  # when the loop looks at the requests at the latest
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of requests that have arrived and were not submitted."""
        return len(self._requests)

    def put(self, model: str, item: Item, caller: Caller) -> None:
        """Queues a request, from any thread."""
        raise NotImplementedError

    def post(self, callback: _Callback) -> None:
        """Calls `callback` after what was put before it, from any thread; does nothing if the portal is closed: it has
        ended all requests."""
        self._requests.append(callback)
        if self._closed:
            self._pass_on()
        elif not self._ring():
            self._look(0.0)

    def close(self) -> None:
        """What arrives from now on is passed on."""
        self._closed = True
        self._pass_on()

    def drain(self) -> None:
        """Submits what has arrived, at most REQUESTS_PER_PASS."""
        if not self._requests:
            return
        submit, submit_row, take = self.backend.submit, self.submit_row, self._requests.popleft
        for _ in range(REQUESTS_PER_PASS):
            try:
                request = take()
            except IndexError:
                return
            if not isinstance(request, tuple):
                request()
                continue
            model, item, caller = request
            try:
                if item.rows == 1 and submit_row is not None:
                    caller.accepted(submit_row(item, caller))
                else:
                    caller.accepted(submit(model, None, item, caller))
            except PenstockError as e:
                caller(ItemResult(error=e.with_traceback(None)))  # its frames hold the item
            except Exception as e:
                log.exception("submit_failed model=%s: its caller gets an error", model)
                text = f"the request cannot be queued: {type(e).__name__}: {e}"
                caller(ItemResult(error=PenstockError(text)))

    def woken(self) -> None:
        """See `RequestInbox.woken`."""

    def refuse_own_thread(self) -> None:
        """Raises RuntimeError in a thread of the model that answers these requests."""

    def refuse_to_block(self) -> None:
        """Raises RuntimeError in a thread that would wait for itself, for example in the done-callback of a future."""
        raise NotImplementedError

    def _ring(self) -> bool:
        """Wakes a thread that looks at the requests; False if none waits for them."""
        return False

    def _look(self, when: float) -> None:
        """Makes the loop look at the requests at or before `when`, from any thread. A signal handler may raise here."""
        if when < self._look_at:
            try:
                self._look_at = when
                self._loop.call_soon_threadsafe(self._look_on_loop, when)
            except BaseException:
                self._look_at = INF
                if not self._loop.is_closed():
                    raise
                self._pass_on()

    def _look_on_loop(self, when: float) -> None:
        """On the loop: looks now or at `when`. First, `_look_at` is INF again, so that a new request looks again."""
        raise NotImplementedError

    def _pass_on(self) -> None:
        """Sees to what arrives after the end."""
        raise NotImplementedError

    def _taken(self) -> Iterator[_Request | _Callback]:
        """Yields each request to one thread only."""
        while True:
            try:
                yield self._requests.popleft()
            except IndexError:
                return


class RequestInbox(Inbox):
    """Requests of other threads on their way to the loop. One wake-up serves many requests.

    A wake-up is a system call that releases the interpreter. The caller must then wait to get it back: where many
    threads contend for it, this is the largest part of a call. So while every batcher of the loop knows that the next
    few arrivals change nothing, they wait here without a wake-up, until a batcher's next turn.

    `guard` is held by every thread that runs code of the portal's engine. `routes` are the inboxes of models that run
    without the loop. `word` names the portal in errors.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, word: str = "portal") -> None:
        super().__init__(loop)
        self._word = word
        self.guard = os_threads.new_rlock()
        self.routes: dict[str, Inbox] = {}
        self._bounded = False  # `_bound_wait` is due
        self._allowed: dict[object, int] = {}  # by batcher
        self._quiet_requests = 0  # requests that need no wake-up: the smallest number that a batcher allows
        self.waking = False  # threads that were answered have yet to run, see `WaitingThreads`
        self._after: list[_Callback] | None = None
        self._loops_thread, self._answering = os_threads.thread_id(), 0  # the threads that answer
        _INBOXES[id(loop)] = self

    # ---- called by any thread

    def of(self, model: str) -> Inbox:
        """The inbox for requests of a model."""
        return self.routes.get(model, self)

    def put(self, model: str, item: Item, caller: Caller) -> None:
        if self._quiet_requests:
            item.arrived_s = time.monotonic()
        self._requests.append((model, item, caller))
        if self._closed:  # checked after the append: either we see it, or `close` sees the request
            self._pass_on()
        elif self._look_at and (  # after the append: `allow` looks at the requests after a change
            len(self._requests) > self._quiet_requests or item.rows > 1 or item.budget_s is not None or item.priority
        ):
            self._look(0.0)

    def woken(self) -> None:
        """All answered threads have run."""
        for inbox in tuple(self.routes.values()):
            inbox.woken()

    def _pass_on(self) -> None:
        """Refuses the requests that have not reached the backend."""
        for request in self._taken():
            if isinstance(request, tuple):
                request[2](ItemResult(error=ModelNotReady(f"the {self._word} is closed")))
            else:
                with suppress(RuntimeError):  # the loop is closed; a request behind this one still needs its response
                    self._loop.call_soon_threadsafe(request)

    # ---- called with the guard

    def after(self, callback: _Callback) -> None:
        """Calls `callback` when what is being answered in this pass has been answered."""
        if self._after is None:
            self._loop.call_soon(self._guarded, callback)
        else:
            self._after.append(callback)

    def answer(self, *steps: Callable[[], None]) -> None:
        """Calls the steps, which answer requests of a model without the loop, each with what `after` got meanwhile."""
        with self.guard:
            calls: list[_Callback] = []
            self._after = calls
            self._answering = os_threads.thread_id()
            try:
                for step in steps:
                    try:
                        step()
                    finally:
                        for call in calls:  # they may add others
                            call()
                        calls.clear()
            finally:
                self._after, self._answering = None, 0

    def _guarded(self, callback: _Callback) -> None:
        with self.guard:
            callback()

    def answers_here(self) -> bool:
        """Whether this thread delivers answers."""
        return os_threads.thread_id() in (self._loops_thread, self._answering)

    def refuse_to_block(self) -> None:
        if self.answers_here():
            raise RuntimeError(BLOCKING)

    # ---- called on the loop

    def _look_on_loop(self, when: float) -> None:
        self.drain()

    def drain(self) -> None:
        self._look_at = INF  # before the deque is emptied, so that a new request looks again
        # a flood is spread over several passes, so that submitted requests are sent in between
        try:
            with self.guard:
                super().drain()
        finally:  # also if a caller raises: the others behind it have rung before
            if self._requests:
                self._look(0.0)

    def drain_all(self) -> None:
        """Submits what has arrived here and at the models that run without the loop."""
        with self.guard:
            for inbox in (self, *self.routes.values()):
                while inbox.waiting:
                    inbox.drain()

    def allow(self, batcher: object, requests: int | None) -> None:
        """`batcher` drains the inbox at its next turn, and until then need not see the next `requests` requests of one
        row, of the first class and without a deadline. None: it has ended."""
        if requests is None:
            self._allowed.pop(batcher, None)
        else:
            self._allowed[batcher] = requests
        self._quiet_requests = min(self._allowed.values(), default=0)
        if len(self._requests) > self._quiet_requests:  # put meanwhile, under the former number
            self._look(0.0)
        # also after that: if the backend refuses these requests, no turn follows
        if self._quiet_requests and not self._bounded:
            self._bounded = True
            self._loop.call_later(LOOK_S, self._bound_wait)

    def _bound_wait(self) -> None:
        """A refusal must come soon, even if the running batch takes minutes."""
        self._bounded = self._quiet_requests > 0
        if self._bounded:
            self._loop.call_later(LOOK_S, self._bound_wait)
        if self._requests:
            self.drain()


_INBOXES: weakref.WeakValueDictionary[int, RequestInbox] = weakref.WeakValueDictionary()


def inbox_of(loop: asyncio.AbstractEventLoop) -> RequestInbox | None:
    """The inbox of the portal that runs `loop`; None if no portal does."""
    return _INBOXES.get(id(loop))
