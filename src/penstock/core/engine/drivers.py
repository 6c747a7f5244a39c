"""Drivers: when a Batcher takes its turns, and on which thread. This one takes them on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from penstock.core import os_threads
from penstock.core.batching.scheduler import Scheduler
from penstock.core.engine.inbox import inbox_of
from penstock.core.engine.load import CallersLoad
from penstock.core.engine.timer import Timer

Turn = Callable[[], None]


class Driver(Protocol):
    """What runs the turns of one batcher. All of its methods are called with its `guard` held."""

    guard: AbstractContextManager[object]  # held by a thread that runs code of the batcher
    from_threads: bool  # requests come from other threads, through an inbox

    @property
    def ahead(self) -> bool:
        """Whether this turn may send a batch behind a running one."""

    def crowded(self) -> bool:
        """Whether the callers, threads of this process, keep a processor busy; asked in each turn."""

    def begin(self, turn: Turn, scheduler: Scheduler, strict: bool) -> None:
        """Comes first. `turn` is the batcher's. `strict`: its scheduler must see every request at once."""

    def soon(self) -> None:
        """Causes a turn after what happens now."""

    def drain(self) -> None:
        """Submits the requests of other threads that have arrived."""

    def turned(self, wake_at: float | None) -> None:
        """Ends a turn. Causes another one at or before `wake_at`, on the clock of `time.monotonic`."""

    def rest(self) -> None:
        """Nothing waits or runs any more."""

    def close(self) -> None:
        """The batcher takes no more turns."""


class LaterCalls:
    """What the code of an engine calls later, with its guard. It runs on a loop, and on threads of its models."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.inbox = inbox_of(loop)
        self.guard = os_threads.new_rlock() if self.inbox is None else self.inbox.guard

    def soon(self, callback: Callable[[], object]) -> None:
        """Calls it after what happens now."""
        if self.inbox is None:
            self.loop.call_soon(callback)
        else:
            self.inbox.after(callback)

    def at(self, when: float, callback: Callable[[], object]) -> LaterCall:
        """Calls it on the loop at `when`, on the clock of `time.monotonic`."""
        return LaterCall(self, when, callback)


class LaterCall:
    """A call at a time, until it is cancelled."""

    def __init__(self, calls: LaterCalls, when: float, callback: Callable[[], object]) -> None:
        self._calls, self._when = calls, when
        self._callback: Callable[[], object] | None = callback
        self._handle: asyncio.TimerHandle | None = None
        if self._here():
            self._arm()
        else:
            calls.loop.call_soon_threadsafe(self._arm)

    def _here(self) -> bool:
        return asyncio._get_running_loop() is self._calls.loop

    def _arm(self) -> None:
        if self._callback is not None:
            self._handle = self._calls.loop.call_at(self._when, self._fire)

    def _fire(self) -> None:
        with self._calls.guard:
            callback, self._callback = self._callback, None
            if callback is not None:
                callback()

    def cancel(self) -> None:
        """Does not call it. Called with the guard."""
        self._callback = None
        if self._handle is not None and self._here():
            self._handle.cancel()


class LoopDriver:
    """Turns in the passes of an event loop, with a timer. `stage`: its requests come from other stages, and it does not
    say how many requests may wait in the inbox of the loop."""

    ahead = True

    def __init__(self, loop: asyncio.AbstractEventLoop, *, stage: bool = False) -> None:
        self._loop = loop
        inbox = inbox_of(loop)
        self._inbox = None if stage else inbox
        self.from_threads = self._inbox is not None
        self.guard = os_threads.new_rlock() if inbox is None else inbox.guard

    def begin(self, turn: Turn, scheduler: Scheduler, strict: bool) -> None:
        self._turn = turn
        self._scheduler, self._strict = scheduler, strict
        self._timer = Timer(self._loop, turn)
        self._clock, self._load = os_threads.processor_clock(), CallersLoad()

    def crowded(self) -> bool:
        return self.from_threads and self._load.look([self._clock])

    def soon(self) -> None:
        here = asyncio._get_running_loop() is self._loop  # else a thread of a model that this one has replaced
        (self._loop.call_soon if here else self._loop.call_soon_threadsafe)(self._turn)

    def drain(self) -> None:
        if self._inbox is not None:
            self._inbox.drain()

    def turned(self, wake_at: float | None) -> None:
        if wake_at is not None:
            self._timer.at(wake_at)
        self._load.running = self._scheduler.running > 0
        if self._inbox is not None:
            quiet = 0 if self._strict else min(self._scheduler.inert_arrivals, self._scheduler.room)
            self._inbox.allow(self, quiet)

    def rest(self) -> None:
        if self._inbox is not None:
            self._inbox.allow(self, 0)

    def close(self) -> None:
        self._timer.close()
        if self._inbox is not None:
            self._inbox.allow(self, None)
