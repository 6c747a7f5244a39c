"""Portal: the synchronous interface. One background event loop with a backend, called by any number of threads."""

# A portal owns one thread with one event loop, on which its backend runs; the backend is an Engine unless `make` says
# otherwise. Any thread or greenlet may call the portal.
# A call is one request of n items and one wake-up. Its thread puts the request into the inbox: of the loop, or of a
# model that runs in threads and takes its requests itself (`engine/direct.py`). It wakes the other end only if no
# wake-up is pending: a wake-up is a system call that releases the interpreter.
# Then it waits on a lock that it reuses for its next call; a `concurrent.futures.Future` costs a condition variable.
# The loop never waits for a caller: a caller that leaves posts a call that cancels its request.
# In a program patched by gevent, greenlets wait through their hub, and the portal's own thread stays a real one.
# A forked child has only the thread that forked. It forgets the parent's loop and workers without touching them, and
# starts its own at its first call, with the models that were loaded before.
# uWSGI imports the application and forks later, without Python's fork hooks: a portal made before starts lazily.
# The portal closes when its owner says so, or when the interpreter exits.

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from penstock import tracing
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core import os_threads
from penstock.core.contracts import Observer
from penstock.core.engine.engine import Engine
from penstock.core.engine.inbox import Caller, Inbox
from penstock.core.portal.loop_thread import PortalBackend, PortalThread, new_waiter, no_answer
from penstock.core.portal.waiters import Convert, Future, SyncWaiter, ThreadWaiter, all_items, every_item, the_item
from penstock.errors import ModelNotReady
from penstock.types import Item, ItemResult

T = TypeVar("T")


class Portal:
    """Models for the threads of any program: `load` once, then `predict` or `submit` from any thread.

    `make` creates a backend other than an Engine; it is called on the loop, and again in a child after a fork. `lazy`:
    start at the first call; a portal that is made before uWSGI forks always does. `word`: the portal's name in errors.
    `own_workers`: its backend starts workers of its own.

    A forked child owns nothing of its parent: its first call warns and loads the same models anew. Use as a context
    manager, or call `close()`; otherwise the portal closes when the interpreter exits.
    """

    def __init__(
        self,
        limits: LimitsConfig | None = None,
        observers: Sequence[Observer] = (),
        *,
        make: Callable[[], PortalBackend] | None = None,
        lazy: bool = False,
        word: str = "portal",
        own_workers: bool = True,
    ) -> None:
        self._word = word
        self._own_workers = own_workers
        self._make = make or (lambda: Engine(limits, observers))
        self._loads: list[tuple[str, ModelConfig, Any, list[str]]] = []
        self._waiters = threading.local()
        self._lock = os_threads.new_lock()
        self._loop_thread: PortalThread | None = None  # None: the next call starts one
        self._pid = os.getpid()
        self._forked = False
        self._closed = False
        if not lazy and not _uwsgi_will_fork():
            self._loop_thread = PortalThread(self._make, self._word)
        _PORTALS.add(self)

    def __enter__(self) -> Portal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- models

    def load(self, name: str, config: ModelConfig, *, target: Any = None) -> None:
        """Loads a model and returns when it can answer. Raises LoadFailed, TargetNotFound, ConfigError.

        Raises TypeError if `make` creates a backend other than an Engine.
        """
        thread = self._alive()
        if not isinstance(thread.backend, Engine):
            raise TypeError(f"a portal of {type(thread.backend).__name__} loads no models")
        sys_path = [p for p in sys.path if p]
        self._run(thread, thread.backend.load(name, config, target=target, sys_path=sys_path))
        self._loads.append((name, config, target, sys_path))

    def statistics(self, model: str) -> dict[str, object]:
        """Statistics of a model's scheduler. Raises ModelNotFound."""
        thread = self._alive()

        async def ask() -> dict[str, object]:
            return thread.backend.statistics(model)

        return self._run(thread, ask())

    def call(self, ask: Callable[[Any], Coroutine[Any, Any, T]], *, timeout_s: float | None = None) -> T:
        """Runs the coroutine `ask(backend)` on the loop and returns its result. Raises its errors, DeadlineExceeded."""
        thread = self._alive()
        return self._run(thread, ask(thread.backend), timeout_s)

    # ---- requests

    def predict(
        self,
        model: str,
        items: Sequence[Any],
        *,
        budget_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """The results of `items`, in order; blocks this thread only. The items share batches with other calls.

        Raises the error of the first failed item unless `return_exceptions`, QueueFull and ModelNotReady at once, and
        DeadlineExceeded after `timeout_s`; items that still wait then are not run.
        """
        if not items:
            return []
        thread = self._alive()
        inbox = thread.inbox.of(model)
        inbox.refuse_to_block()
        waiter = self._waiter(thread)
        item = Item(list(items), rows=len(items), many=True, budget_s=budget_s, priority=priority)
        item.source = tracing.caller()
        result = self._wait(inbox, waiter, timeout_s, model, item)
        return every_item(result) if return_exceptions else all_items(result)

    def submit(self, model: str, item: Any, *, budget_s: float | None = None, priority: int = 0) -> Future:
        """A future for the result of one item."""
        one = Item(item, budget_s=budget_s, priority=priority, source=tracing.caller())
        return self.submit_item_as(model, one, the_item)

    def submit_item(self, model: str, item: Item, caller: Caller) -> None:
        """Queues one item; `caller` is called on the thread that answers."""
        self._alive().inbox.of(model).put(model, item, caller)

    def post(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the portal's own thread; does nothing if the portal is closed or not started."""
        if self._loop_thread is not None and self._pid == os.getpid():
            self._loop_thread.inbox.post(callback)

    def after(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after the answers of this pass; at once on a thread that delivers none."""
        inbox = self._alive().inbox
        if inbox.answers_here():
            inbox.after(callback)
        else:
            callback()

    def submit_item_as(self, model: str, item: Item, convert: Convert) -> Future:
        """A future of the response to `item`, converted by `convert`."""
        thread = self._loop_thread
        if thread is None or self._closed or self._pid != os.getpid():
            thread = self._alive()
        inbox = thread.inbox.routes.get(model) or thread.inbox
        future = thread.new_future(inbox, convert)
        inbox.put(model, item, future)
        return future

    def _waiter(self, thread: PortalThread) -> SyncWaiter:
        """The waiter of this thread, or a new one for this greenlet."""
        if os_threads.patched():
            return new_waiter()
        waiter: SyncWaiter | None = getattr(self._waiters, "waiter", None)
        if waiter is None:
            if threading.current_thread() is threading.main_thread():
                return SyncWaiter()  # not for another call: a signal handler may raise before this one has left it
            waiter = self._waiters.waiter = ThreadWaiter(thread.waiting_threads)
        return waiter

    def _wait(self, inbox: Inbox, waiter: SyncWaiter, timeout_s: float | None, model: str, item: Item) -> ItemResult:
        """The response to the item. Raises DeadlineExceeded."""
        answered = False
        try:
            inbox.put(model, item, waiter)
            answered = waiter.wait(timeout_s)
        finally:
            if not answered:  # or interrupted: a late response must not wake the thread's next call
                self._waiters.waiter = None
                inbox.post(waiter.leave)
        if not answered:
            raise no_answer(timeout_s)
        result: ItemResult
        result, waiter.value = waiter.value, None
        return result

    def _run(self, thread: PortalThread, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The result of the coroutine. Raises ModelNotReady if the portal is or gets closed."""
        try:
            return thread.run(coroutine, timeout_s)
        except asyncio.CancelledError:
            raise ModelNotReady(f"the {self._word} was closed meanwhile") from None
        except RuntimeError:
            if self._closed:
                raise ModelNotReady(f"the {self._word} is closed") from None
            raise

    # ---- start and end

    def close(self, drain_s: float = 30.0) -> None:
        """Answers accepted requests, then ends the workers and the loop. Idempotent."""
        self._close(drain_s, None)

    def _close(self, drain_s: float, waiter: SyncWaiter | None) -> None:
        thread = self._loop_thread
        if thread is not None:
            thread.not_on_loop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if thread is None or self._pid != os.getpid():
            return
        thread.close(drain_s, waiter or new_waiter())

    def _alive(self) -> PortalThread:
        """The loop thread of this process, started if necessary. Raises ModelNotReady."""
        if self._pid != os.getpid():  # forked without Python's fork hooks
            self.after_fork()
        if self._closed:
            raise ModelNotReady(f"the {self._word} is closed")
        thread = self._loop_thread
        if thread is None:
            with self._lock:
                if self._loop_thread is None:
                    self._loop_thread = self._begin()
                thread = self._loop_thread
        return thread

    def _begin(self) -> PortalThread:
        """A new loop with new workers for the models loaded before a fork. Raises load errors, leaving nothing
        behind."""
        if self._forked and self._own_workers:
            warnings.warn(
                f"penstock: process {os.getpid()} was forked from one with loaded models; it starts its own workers",
                RuntimeWarning,
                stacklevel=4,
            )
        thread = PortalThread(self._make, self._word)
        try:
            for name, config, target, sys_path in self._loads:
                assert isinstance(thread.backend, Engine)
                waiter = SyncWaiter()  # not a GeventWaiter: the held lock would stop other greenlets
                thread.post(thread.start, thread.backend.load(name, config, target=target, sys_path=sys_path), waiter)
                waiter.wait(None)
                waiter.value.result()
        except BaseException:
            thread.close(0.0, SyncWaiter())
            raise
        return thread

    def after_fork(self) -> None:
        """In a forked child, from the fork hook or its first call: drops the parent's loop, touches nothing shared."""
        with _FORKING:
            if self._pid == os.getpid():
                return
            self._lock = os_threads.new_lock()
            self._waiters = threading.local()
            if self._loop_thread is not None:
                _PARENTS.append(self._loop_thread)  # its destructors must not run here
                self._loop_thread.backend.forget()
                self._loop_thread = None
                self._forked = True
            self._pid = os.getpid()


_PORTALS: weakref.WeakSet[Portal] = weakref.WeakSet()
_PARENTS: list[Any] = []
_FORKING = os_threads.new_lock()


def _uwsgi_will_fork() -> bool:
    """Whether uWSGI imports the application and forks later: without Python's lock, so that the new processes would
    hang if another thread held it."""
    uwsgi = sys.modules.get("uwsgi")
    return uwsgi is not None and uwsgi.worker_id() == 0


def _after_fork() -> None:
    for portal in list(_PORTALS):
        portal.after_fork()


def _at_exit() -> None:
    for portal in list(_PORTALS):
        thread = portal._loop_thread
        # uWSGI may exit on any thread; on the portal's own thread do not wait: workers end with their sockets
        if portal._pid == os.getpid() and not (thread is not None and thread.on_loop()):
            portal._close(1.0, SyncWaiter())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
