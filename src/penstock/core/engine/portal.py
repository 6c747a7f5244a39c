"""Portal: the sync face. One background event loop with a backend; any number of threads call it.

A call is one request of n items and one wake-up. Callers push onto a deque and ring the loop only when it is not rung
already (many threads, one wake-up), then sleep on a lock that each thread keeps for all its calls: a
`concurrent.futures.Future` costs a condition variable a call.
"""

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

from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core import os_threads
from penstock.core.contracts import Observer
from penstock.core.engine.engine import Engine
from penstock.core.engine.inbox import Caller, PortalBackend
from penstock.core.engine.loop_thread import LoopThread
from penstock.core.engine.waiters import Convert, Future, SyncWaiter, all_items, every_item, the_item
from penstock.errors import DeadlineExceeded, ModelNotReady
from penstock.types import Item, ItemResult

T = TypeVar("T")


class Portal:
    """Models for the threads of any program: `load` once, then `predict` or `submit` from any thread.

    `make` gives what is to answer in place of an Engine: called on the loop, and once more in a child after a fork.
    `lazy`: nothing is started before the first call. `word`: what it calls itself in errors.

    After a fork the child owns nothing of its parent: its first call warns and loads the same models anew. Use as a
    context manager, or call `close()`; a portal that is forgotten is closed when the interpreter ends.
    """

    def __init__(
        self,
        limits: LimitsConfig | None = None,
        observers: Sequence[Observer] = (),
        *,
        make: Callable[[], PortalBackend] | None = None,
        lazy: bool = False,
        word: str = "portal",
    ) -> None:
        self._word = word
        self._make = make or (lambda: Engine(limits, observers))
        self._loads: list[tuple[str, ModelConfig, Any, list[str]]] = []
        self._waiters = threading.local()
        self._lock = os_threads.new_lock()
        self._loop_thread: LoopThread | None = None  # None: to be started by the next call
        self._pid = os.getpid()
        self._forked = False
        self._closed = False
        if not lazy:
            self._loop_thread = LoopThread(self._make)
        _PORTALS.add(self)

    def __enter__(self) -> Portal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- models

    def load(self, name: str, config: ModelConfig, *, target: Any = None) -> None:
        """Loads a model and returns when it can answer. Raises LoadFailed, TargetNotFound, ConfigError.

        Only where an Engine answers: TypeError for a portal of another `make`.
        """
        life = self._alive()
        if not isinstance(life.backend, Engine):
            raise TypeError(f"a portal of {type(life.backend).__name__} loads no models")
        sys_path = [p for p in sys.path if p]
        self._run(life, life.backend.load(name, config, target=target, sys_path=sys_path))
        self._loads.append((name, config, target, sys_path))

    def statistics(self, model: str) -> dict[str, object]:
        """What the scheduler of a model has learned and done. Raises ModelNotFound."""
        life = self._alive()

        async def ask() -> dict[str, object]:
            return life.backend.statistics(model)

        return self._run(life, ask())

    def call(self, ask: Callable[[Any], Coroutine[Any, Any, T]], *, timeout_s: float | None = None) -> T:
        """What the coroutine `ask(backend)` returns, run on the loop. Raises what it raises, DeadlineExceeded."""
        life = self._alive()
        return self._run(life, ask(life.backend), timeout_s)

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
        """The results of `items`, in order; blocks this thread only. The items share batches with those of other calls.

        Raises the error of the first item that failed, unless `return_exceptions`; QueueFull and ModelNotReady at once;
        DeadlineExceeded after `timeout_s`: what still waits then is not run.
        """
        if not items:
            return []
        life = self._alive()
        life.not_on_loop()
        waiter = self._waiter()
        life.inbox.put(model, _many(items), waiter, budget_s, priority)
        result: ItemResult = self._wait(life, waiter, timeout_s)
        return every_item(result) if return_exceptions else all_items(result)

    def submit(self, model: str, item: Any, *, budget_s: float | None = None, priority: int = 0) -> Future:
        """A future of the result of one item."""
        return self._put(model, Item(item), the_item, budget_s, priority)

    def submit_many(
        self,
        model: str,
        items: Sequence[Any],
        *,
        budget_s: float | None = None,
        priority: int = 0,
        convert: Convert = all_items,
    ) -> Future:
        """A future of what `convert` makes of the answer: the results of `items`, in order."""
        return self._put(model, _many(items), convert, budget_s, priority)

    def hand(self, model: str, item: Item, caller: Caller, *, budget_s: float | None = None, priority: int = 0) -> None:
        """Queues one item whose `caller` hears of it on the portal's own thread."""
        self._alive().inbox.put(model, item, caller, budget_s, priority)

    def post(self, callback: Callable[[], None]) -> None:
        """Has something called on the portal's own thread; not at all if it is closed, or not started."""
        if self._loop_thread is not None and self._pid == os.getpid():
            self._loop_thread.post_if_open(callback)

    def _put(self, model: str, item: Item, convert: Convert, budget_s: float | None, priority: int) -> Future:
        life = self._alive()
        future = _future_class()(life.post, convert)
        life.inbox.put(model, item, future, budget_s, priority)
        return future

    def _waiter(self) -> SyncWaiter:
        if os_threads.patched():
            from penstock.core.engine.gevent_waiter import GeventWaiter

            return GeventWaiter()
        waiter: SyncWaiter | None = getattr(self._waiters, "waiter", None)
        if waiter is None:
            waiter = self._waiters.waiter = SyncWaiter()
        return waiter

    def _wait(self, life: LoopThread, waiter: SyncWaiter, timeout_s: float | None) -> Any:
        """What the waiter was woken with. Raises DeadlineExceeded."""
        answered = False
        try:
            answered = waiter.wait(timeout_s)
        finally:
            if not answered:  # or interrupted: a late answer must not wake this thread's next call
                self._waiters.waiter = None
                life.post_if_open(waiter.leave)
        if not answered:
            raise DeadlineExceeded(f"there was no answer within {timeout_s:g} s")
        value, waiter.value = waiter.value, None
        return value

    def _run(self, life: LoopThread, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """What the coroutine returns. Raises ModelNotReady when the portal is closed, before or meanwhile."""
        try:
            life.not_on_loop()
            waiter = self._waiter()
            with self._lock:  # `close` cancels what was begun before it
                if self._closed:
                    raise ModelNotReady(f"the {self._word} is closed")
                life.post(life.start, coroutine, waiter)
        except BaseException:
            coroutine.close()
            raise
        task: asyncio.Task[T] = self._wait(life, waiter, timeout_s)
        if task.cancelled():
            raise ModelNotReady(f"the {self._word} was closed meanwhile")
        return task.result()

    # ---- life

    def close(self, drain_s: float = 30.0) -> None:
        """Answers what was accepted, ends the workers and the loop. Idempotent."""
        self._close(drain_s, None)

    def _close(self, drain_s: float, waiter: SyncWaiter | None) -> None:
        life = self._loop_thread
        if life is not None:
            life.not_on_loop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if life is None or self._pid != os.getpid():
            return
        life.close(drain_s, waiter or self._waiter())

    def _alive(self) -> LoopThread:
        """What runs in this process; it is started when nothing does. Raises ModelNotReady."""
        if self._pid != os.getpid():  # forked by what runs no hooks of Python
            self.after_fork()
        if self._closed:
            raise ModelNotReady(f"the {self._word} is closed")
        life = self._loop_thread
        if life is None:
            with self._lock:
                if self._loop_thread is None:
                    self._loop_thread = self._begin()
                life = self._loop_thread
        return life

    def _begin(self) -> LoopThread:
        """A new loop and new workers, with what was loaded before a fork. Raises what loading raises: none is left."""
        if self._forked:
            warnings.warn(
                f"penstock: process {os.getpid()} was forked from one with loaded models; it starts workers of its own",
                RuntimeWarning,
                stacklevel=4,
            )
        life = LoopThread(self._make)
        try:
            for name, config, target, sys_path in self._loads:
                assert isinstance(life.backend, Engine)
                waiter = SyncWaiter()  # not of a hub: the lock that is held would stop its other greenlets
                life.post(life.start, life.backend.load(name, config, target=target, sys_path=sys_path), waiter)
                waiter.wait(None)
                waiter.value.result()
        except BaseException:
            life.close(0.0, SyncWaiter())
            raise
        return life

    def after_fork(self) -> None:
        """In a child, by the fork hook or its first call: forgets the loop of the parent, touches nothing shared."""
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


def _many(items: Sequence[Any]) -> Item:
    return Item(list(items), rows=len(items), many=True)


def _future_class() -> type[Future]:
    if os_threads.patched():
        from penstock.core.engine.gevent_waiter import GeventFuture

        return GeventFuture
    return Future


def _after_fork() -> None:
    for portal in list(_PORTALS):
        portal.after_fork()


def _at_exit() -> None:
    for portal in list(_PORTALS):
        life = portal._loop_thread
        # uWSGI may end on any thread: on the portal's own nothing is waited for, and workers end with their sockets
        if portal._pid == os.getpid() and not (life is not None and life.on_loop()):
            portal._close(1.0, SyncWaiter())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
