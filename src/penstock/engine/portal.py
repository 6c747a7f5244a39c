"""Portal: the sync face. One background event loop with an Engine; any number of threads call it.

A call is one request of n items and one wake-up. Callers push onto a deque and ring the loop only when it is not rung
already (many threads, one wake-up), then sleep on a lock that each thread keeps for all its calls: a
`concurrent.futures.Future` costs a condition variable a call.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.engine.engine import Engine
from penstock.engine.inbox import Inbox, ToFuture, Waiter
from penstock.errors import ModelNotReady
from penstock.observe.base import Observer
from penstock.types import Item

log = logging.getLogger("penstock.engine")
T = TypeVar("T")


class Portal:
    """Models for the threads of any program: `load` once, then `predict` or `submit` from any thread.

    After a fork the child owns nothing of its parent: its first call warns and loads the same models anew. Use as a
    context manager, or call `close()`; a portal that is forgotten is closed when the interpreter ends.
    """

    def __init__(self, limits: LimitsConfig | None = None, observers: Sequence[Observer] = ()) -> None:
        self._limits = limits
        self._observers = observers
        self._loads: list[tuple[str, ModelConfig, Any, list[str]]] = []
        self._waiters = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._forked = False
        self._start()
        _PORTALS.add(self)

    def __enter__(self) -> Portal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- models

    def load(self, name: str, config: ModelConfig, *, target: Any = None) -> None:
        """Loads a model and returns when it can answer. Raises LoadFailed, TargetNotFound, ConfigError."""
        self._alive()
        sys_path = [p for p in sys.path if p]
        self._run(self._engine.load(name, config, target=target, sys_path=sys_path))
        self._loads.append((name, config, target, sys_path))

    def statistics(self, model: str) -> dict[str, object]:
        """What the scheduler of a model has learned and done. Raises ModelNotFound."""
        self._alive()

        async def ask() -> dict[str, object]:
            return self._engine.statistics(model)

        return self._run(ask())

    # ---- requests

    def predict(
        self,
        model: str,
        items: Sequence[Any],
        *,
        budget_s: float | None = None,
        priority: int = 0,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """The results of `items`, in order; blocks this thread only. The items share batches with those of other calls.

        Raises the error of the first item that failed, unless `return_exceptions`; QueueFull and ModelNotReady at once.
        """
        if not items:
            return []
        self._alive()
        self._not_on_loop()
        waiter = self._waiter()
        item = Item(list(items), rows=len(items), many=True)
        self._inbox.put(model, item, waiter, budget_s, priority)
        try:
            waiter.lock.acquire()
        except BaseException:  # interrupted: a late answer must not wake this thread's next call
            del self._waiters.waiter
            raise
        result, waiter.result = waiter.result, None
        assert result is not None
        if result.error is not None:
            raise result.error
        values: list[Any] = result.body
        if not return_exceptions:
            for value in values:
                if isinstance(value, Exception):
                    raise value
        return values

    def submit(
        self, model: str, item: Any, *, budget_s: float | None = None, priority: int = 0
    ) -> concurrent.futures.Future[Any]:
        """A future of the result of one item."""
        self._alive()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._inbox.put(model, Item(item), ToFuture(future, self._loop), budget_s, priority)
        return future

    def _waiter(self) -> Waiter:
        waiter: Waiter | None = getattr(self._waiters, "waiter", None)
        if waiter is None:
            waiter = self._waiters.waiter = Waiter()
        return waiter

    # ---- life

    def close(self, drain_s: float = 30.0) -> None:
        """Answers what was accepted, ends the workers and the loop. Idempotent."""
        self._not_on_loop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._forked:
            return
        asyncio.run_coroutine_threadsafe(self._engine.close(drain_s), self._loop).result()
        self._inbox.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _alive(self) -> None:
        if self._closed:
            raise ModelNotReady("the portal is closed")
        if self._forked:
            with self._lock:
                if self._forked:
                    self._restart()

    def _start(self) -> None:
        started = threading.Event()

        def run() -> None:
            self._loop = _new_loop()
            asyncio.set_event_loop(self._loop)

            async def make() -> None:
                self._engine = Engine(self._limits, self._observers)
                self._inbox = Inbox(self._loop, self._engine)

            self._loop.run_until_complete(make())
            started.set()
            self._loop.run_forever()
            _cancel_tasks(self._loop)
            self._loop.close()

        self._thread = threading.Thread(target=run, name="penstock-portal", daemon=True)
        self._thread.start()
        started.wait()

    def _restart(self) -> None:
        """In a child after a fork: a new loop and new workers, from what was loaded before."""
        warnings.warn(
            f"penstock: process {os.getpid()} was forked from one with loaded models; it starts workers of its own",
            RuntimeWarning,
            stacklevel=4,
        )
        self._start()
        for name, config, target, sys_path in self._loads:
            load = self._engine.load(name, config, target=target, sys_path=sys_path)
            asyncio.run_coroutine_threadsafe(load, self._loop).result()
        self._forked = False

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns. Raises ModelNotReady when the portal is closed, before or meanwhile."""
        try:
            self._not_on_loop()
            with self._lock:  # `close` cancels what was begun before it
                if self._closed:
                    raise ModelNotReady("the portal is closed")
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ModelNotReady("the portal was closed meanwhile") from None

    def _not_on_loop(self) -> None:
        """A call that blocks must not be made by what the loop calls, such as the done-callback of a future."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the portal was called on its own thread, where it would wait for itself")

    def after_fork(self) -> None:
        """Called in a child by the fork hook: forgets the parent's loop, without touching what the two share."""
        _PARENTS.append((self._loop, self._engine, self._inbox, self._thread))  # their destructors must not run here
        self._engine.forget()
        self._lock = threading.Lock()
        self._waiters = threading.local()
        self._forked = True


_PORTALS: weakref.WeakSet[Portal] = weakref.WeakSet()
_PARENTS: list[Any] = []


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Ends what still runs on a loop that was stopped, so that no thread waits for it for ever."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _after_fork() -> None:
    for portal in list(_PORTALS):
        portal.after_fork()


def _at_exit() -> None:
    for portal in list(_PORTALS):
        if not portal._forked:
            portal.close(drain_s=1.0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
