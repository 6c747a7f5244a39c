"""RequestInbox: requests of other threads on their way to the event loop of a portal."""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Protocol

from penstock.core.contracts import Submitter, Ticket
from penstock.errors import ModelNotReady, PenstockError
from penstock.types import Item, ItemResult

log = logging.getLogger("penstock.engine")

# choices
REQUESTS_PER_PASS = 256  # submitted in one pass of the loop
LOOK_S = 0.02  # a request waits at most this long for the loop to run for another reason


class Caller(Protocol):
    """A caller: a sink that also receives its ticket, see `core/portal/waiters.py`."""

    def accepted(self, ticket: Ticket) -> None: ...

    def __call__(self, result: ItemResult) -> None: ...


_Request = tuple[str, Item, Caller]  # model, item, caller
_Callback = Callable[[], object]


class RequestInbox:
    """Requests of other threads on their way to the loop. One wake-up serves many requests.

    A wake-up is a system call that releases the interpreter. The caller must then wait to get it back: where many
    threads contend for it, this is the largest part of a call. So while every batcher of the loop knows that the next
    few arrivals change nothing, they wait here without a wake-up, until a batcher's next turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.backend: Submitter
        self._loop = loop
        self._requests: deque[_Request | _Callback] = deque()
        self._wake_scheduled = self._look_scheduled = False
        self._closed = False
        self._allowed: dict[object, int] = {}  # by batcher
        self._quiet_requests = 0  # requests that need no wake-up: the smallest number that a batcher allows
        _INBOXES[id(loop)] = self

    # ---- called by any thread

    def put(self, model: str, item: Item, caller: Caller) -> None:
        if self._quiet_requests:
            item.arrived_s = time.monotonic()
        self._requests.append((model, item, caller))
        if self._closed:  # checked after the append: either we see it, or `close` sees the request
            self.close()
        elif not self._wake_scheduled and (  # after the append: `allow` looks at the requests after a change
            len(self._requests) > self._quiet_requests or item.rows > 1 or item.budget_s is not None or item.priority
        ):
            self._ring()

    def post(self, callback: _Callback) -> None:
        """Calls `callback` on the loop, between what was put before it and what is put after it; does nothing if the
        loop is closed: it has ended all requests."""
        self._requests.append(callback)
        if self._closed:
            self.close()
        elif not self._wake_scheduled:
            self._ring()

    def _ring(self) -> None:
        self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self.drain)
        except RuntimeError:  # the loop was closed meanwhile
            self.close()

    def close(self) -> None:
        """Refuses the requests that have not reached the backend."""
        self._closed = True
        for request in self._taken():
            if isinstance(request, tuple):
                request[2](ItemResult(error=ModelNotReady("the portal is closed")))
            else:
                with suppress(RuntimeError):  # the loop is closed; a request behind this one still needs its response
                    self._loop.call_soon_threadsafe(request)

    def _taken(self) -> Iterator[_Request | _Callback]:
        """Yields each request to one thread only."""
        while True:
            try:
                yield self._requests.popleft()
            except IndexError:
                return

    # ---- called on the loop

    def drain(self) -> None:
        """Submits what has arrived."""
        self._wake_scheduled = False  # before the deque is emptied, so that a new request rings again
        submit = self.backend.submit
        # a flood is spread over several passes, so that submitted requests are sent in between
        try:
            for request in islice(self._taken(), REQUESTS_PER_PASS):
                if not isinstance(request, tuple):
                    request()
                    continue
                model, item, caller = request
                try:
                    caller.accepted(submit(model, None, item, caller))
                except PenstockError as e:
                    caller(ItemResult(error=e.with_traceback(None)))  # its frames hold the item
                except Exception as e:
                    log.exception("submit_failed model=%s: its caller gets an error", model)
                    text = f"the request cannot be queued: {type(e).__name__}: {e}"
                    caller(ItemResult(error=PenstockError(text)))
        finally:  # also if a caller raises: the others behind it have rung before
            if self._requests:
                self._wake()

    def _wake(self) -> None:
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self.drain)

    def allow(self, batcher: object, requests: int | None) -> None:
        """`batcher` drains the inbox at its next turn, and until then need not see the next `requests` requests of one
        row, of the first class and without a deadline. None: it has ended."""
        if requests is None:
            self._allowed.pop(batcher, None)
        else:
            self._allowed[batcher] = requests
        self._quiet_requests = min(self._allowed.values(), default=0)
        if len(self._requests) > self._quiet_requests:  # put meanwhile, under the former number
            self._wake()
        # also after `_wake`: if the backend refuses these requests, no turn follows
        if self._quiet_requests and not self._look_scheduled:
            self._look_scheduled = True
            self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Bounds the wait: a refusal must come soon, even if the running batch takes minutes."""
        self._look_scheduled = self._quiet_requests > 0
        if self._look_scheduled:
            self._loop.call_later(LOOK_S, self._look)
        if self._requests:
            self.drain()


_INBOXES: weakref.WeakValueDictionary[int, RequestInbox] = weakref.WeakValueDictionary()


def inbox_of(loop: asyncio.AbstractEventLoop) -> RequestInbox | None:
    """The inbox of the portal that runs `loop`; None if no portal does."""
    return _INBOXES.get(id(loop))
