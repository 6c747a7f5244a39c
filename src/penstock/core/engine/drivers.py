"""Drivers: when a Batcher takes its turns, and on which thread. This one takes them on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from penstock.core import os_threads
from penstock.core.engine.inbox import inbox_of
from penstock.core.engine.timer import Timer

Turn = Callable[[], None]


class Driver(Protocol):
    """What runs the turns of one batcher. All of its methods are called with its `guard` held."""

    guard: AbstractContextManager[object]  # held by a thread that runs code of the batcher
    from_threads: bool  # requests come from other threads, through an inbox

    def begin(self, turn: Turn) -> None:
        """Comes first: `turn` is the batcher's."""

    def soon(self) -> None:
        """Causes a turn after what happens now."""

    def drain(self) -> None:
        """Submits the requests of other threads that have arrived."""

    def at(self, when: float) -> None:
        """Causes a turn at or before `when`, on the clock of `time.monotonic`."""

    def allow(self, inert: int, room: int) -> None:
        """Until the next turn, `inert` requests may arrive without an effect, and `room` without being refused. For
        requests of one row, of the first class and without a deadline; only with `from_threads`."""

    def rest(self) -> None:
        """Nothing waits or runs any more."""

    def close(self) -> None:
        """The batcher takes no more turns."""


class LoopDriver:
    """Turns in the passes of an event loop, with a timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inbox = inbox_of(loop)
        self.from_threads = self._inbox is not None
        self.guard = os_threads.new_rlock() if self._inbox is None else self._inbox.guard

    def begin(self, turn: Turn) -> None:
        self._turn = turn
        self._timer = Timer(self._loop, turn)

    def soon(self) -> None:
        self._loop.call_soon(self._turn)

    def drain(self) -> None:
        if self._inbox is not None:
            self._inbox.drain()

    def at(self, when: float) -> None:
        self._timer.at(when)

    def allow(self, inert: int, room: int) -> None:
        if self._inbox is not None:
            self._inbox.allow(self, min(inert, room))

    def rest(self) -> None:
        if self._inbox is not None:
            self._inbox.allow(self, 0)

    def close(self) -> None:
        self._timer.close()
        if self._inbox is not None:
            self._inbox.allow(self, None)
