"""How greenlets wait for a response: through their hub, so that the other greenlets of their thread keep running.

Only for programs patched by gevent. The thread that answers never touches a greenlet's objects; it posts calls to the
loop of the hub.
"""

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent
import gevent.event

from penstock.core.engine.inbox import Inbox
from penstock.core.portal.waiters import Convert, Future, SyncWaiter
from penstock.types import ItemResult


class GeventHub:
    """Calls from the portal's thread to one gevent hub. While a call is expected, the hub's loop does not end."""

    def __init__(self, hub: Any) -> None:
        self.pid = os.getpid()
        self._watcher = hub.loop.async_()
        self._calls: deque[Callable[[], object]] = deque()
        self._expected = 0

    def expect(self) -> None:
        """In the hub's thread: announces one call."""
        self._expected += 1
        if self._expected == 1:
            self._watcher.start(lambda: gevent.spawn(self._run))  # future callbacks may block, the hub must not

    def post(self, call: Callable[[], object]) -> None:
        """From any thread: makes an announced call."""
        self._calls.append(call)
        self._watcher.send()

    def stop(self) -> None:
        """Expects no more calls."""
        self._watcher.stop()

    def _run(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            self._expected -= 1
            if not self._expected:
                self._watcher.stop()
            call()


def this_hub() -> GeventHub:
    """The hub of this thread; a new one after a fork."""
    hub: Any = gevent.get_hub()
    mine: GeventHub | None = getattr(hub, "penstock", None)
    if mine is None or mine.pid != os.getpid():
        if mine is not None:
            mine.stop()  # its calls arrive in the parent
        mine = hub.penstock = GeventHub(hub)
    return mine


class GeventWaiter(SyncWaiter):
    """What one greenlet waits on, for one call."""

    __slots__ = ("_event", "_hub", "_over")

    def __init__(self) -> None:
        self._hub = this_hub()
        self._event = gevent.event.Event()
        self._over = False  # with the portal's guard: settled or abandoned
        self.ticket = None
        self.value = None
        self._hub.expect()

    def settle(self, value: Any) -> None:
        if not self._over:
            self._over = True
            self.value, self.ticket = value, None
            self._hub.post(self._event.set)

    def wait(self, timeout_s: float | None) -> bool:
        return bool(self._event.wait(timeout_s))

    def leave(self) -> None:
        super().leave()
        self.settle(None)  # the hub expects a call even though nothing waits


class GeventFuture(Future):
    """A Future whose callbacks run in a greenlet of the hub that created it."""

    def __init__(self, inbox: Inbox | None, convert: Convert) -> None:
        super().__init__(inbox, convert)
        self._hub = this_hub()
        self._told = False
        self._hub.expect()

    def leave(self) -> None:
        super().leave()
        self._tell(lambda: None)  # the hub expects a call even though nothing waits

    def __call__(self, result: ItemResult) -> None:
        if result.final:
            self._tell(lambda: super(GeventFuture, self).__call__(result))

    def _tell(self, call: Callable[[], object]) -> None:
        if not self._told:
            self._told = True
            self._hub.post(call)
