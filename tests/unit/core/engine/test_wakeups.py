"""Threads that wake each other, in every order of their lines."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core import os_threads
from penstock.core.batching.entry import INF
from penstock.core.engine import direct
from penstock.core.engine import inbox as inbox_module
from penstock.core.engine.direct import DirectDriver, DirectThread, StageDriver
from penstock.core.engine.drivers import LoopDriver
from penstock.core.engine.inbox import RequestInbox
from penstock.errors import ModelNotReady, QueueFull
from penstock.types import Item, ItemResult
from support.interleavings import LATE, Lock, RLock, Run, explore


class Loop:
    """The loop of a run: `work` runs what is called soon until `over()`, and its timers when nothing else happens."""

    def __init__(self, run: Run, over: Callable[[], bool]) -> None:
        self._run, self._over = run, over
        self._ready: deque[Callable[[], object]] = deque()
        self._timers: deque[Callable[[], object]] = deque()
        self.closed = False

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._ready.append(callback)

    def is_closed(self) -> bool:
        return self.closed

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: object) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self._ready.append(partial(callback, *arguments))

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        self._timers.append(callback)

    def work(self) -> None:
        while not self._over():
            self._run.wait(lambda: self._ready or self._over() or (self._timers and LATE))
            due = self._ready or self._timers
            if due and not self._over():
                with suppress(ValueError):  # a loop logs it
                    due.popleft()()


class Backend:
    """Counts what reaches it, or refuses it."""

    def __init__(self, refuses: bool) -> None:
        self.came, self.refuses = 0, refuses

    def submit(self, *arguments: Any, **more: Any) -> Any:
        self.came += 1
        if self.refuses:
            raise QueueFull("full")


class Caller:
    def __init__(self) -> None:
        self.errors: list[Any] = []

    def accepted(self, ticket: Any) -> None: ...

    def __call__(self, result: ItemResult) -> None:
        self.errors.append(result.error)


@pytest.mark.parametrize("rooms", [(), (1,), (2, 0), (1, None)], ids=str)
def test_every_request_reaches_the_backend_of_a_portal(rooms: Sequence[int | None]) -> None:
    def make(run: Run) -> list[Callable[[], object]]:
        backend = Backend(refuses=True)  # a batcher that accepts one takes a turn
        loop: Any = Loop(run, lambda: backend.came == 2)
        inbox = RequestInbox(loop)
        inbox.backend = backend
        for room in rooms:  # a batcher's turns
            loop.call_soon(lambda room=room: inbox.allow("batcher", room))
        put = lambda: inbox.put("m", Item(1), Caller())  # noqa: E731
        return [loop.work, put, put]

    explore([inbox_module], make)


def test_every_request_is_answered_when_a_portal_closes() -> None:
    def make(run: Run) -> list[Callable[[], object]]:
        backend, caller = Backend(False), Caller()
        loop: Any = Loop(run, lambda: False)
        inbox = RequestInbox(loop)
        inbox.backend = backend

        def close() -> None:
            inbox.close()
            loop.closed = True
            run.wait(lambda: backend.came + len(caller.errors) == 2)
            assert {type(error) for error in caller.errors} <= {ModelNotReady}

        def put() -> None:
            inbox.post(lambda: None)  # another caller leaves
            inbox.put("m", Item(1), caller)

        return [close, put, put]

    explore([inbox_module], make)


def test_a_caller_that_raises_leaves_nobody_behind_it_waiting() -> None:
    def fails() -> None:
        raise ValueError("a callback")

    def make(run: Run) -> list[Callable[[], object]]:
        backend = Backend(refuses=False)
        loop: Any = Loop(run, lambda: backend.came == 1)
        inbox = RequestInbox(loop)
        inbox.backend = backend

        def put() -> None:
            inbox.post(fails)
            inbox.put("m", Item(1), Caller())

        return [loop.work, put]

    explore([inbox_module], make)


class Alarm:
    """The timer of a driver, on the loop of the run."""

    def __init__(self, loop: Any, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback

    def at(self, when: float) -> None:
        self._loop.call_later(0.0, self._callback)

    def close(self) -> None: ...


@pytest.mark.parametrize("ends", [False, True], ids=["runs", "ends"])
@pytest.mark.parametrize("inert", [0, 1])
def test_every_request_for_a_model_in_threads_is_seen(monkeypatch: pytest.MonkeyPatch, inert: int, ends: bool) -> None:
    """By its thread while it sleeps, by the loop while it runs."""
    monkeypatch.setattr(direct, "Timer", Alarm)

    def make(run: Run) -> list[Callable[[], object]]:
        monkeypatch.setattr(os_threads, "new_lock", lambda: Lock(run))
        monkeypatch.setattr(os_threads, "new_rlock", lambda: RLock(run))
        backend, began = Backend(refuses=True), 0
        loop: Any = Loop(run, lambda: backend.came == 2)
        inbox = RequestInbox(loop)
        inbox.backend = backend
        driver = DirectDriver("m", inbox, loop)
        slot: Any = SimpleNamespace(number=0)
        thread = DirectThread(slot, driver)

        def turn() -> None:
            nonlocal began
            driver.drain()
            if began < backend.came:
                began = backend.came
                thread.put((0, [], []))
            driver.turned(None if began else 1e9)

        def model() -> None:
            with driver.thread():
                driver.next(thread)
                run.wait(lambda: LATE if ends else backend.came == 2)
                while backend.came < 2:
                    driver.next(thread)

        idle = {"inert_arrivals": inert, "room": 4, "max_batch_size": 4, "running": 0}
        scheduler: Any = SimpleNamespace(**idle, ahead_at=lambda: INF, next_end=lambda: (INF, 0))
        driver.begin(turn, scheduler, False)
        driver.put("m", Item(1), Caller())
        return [loop.work, model, lambda: driver.put("m", Item(1), Caller())]

    explore([direct, inbox_module], make)


@pytest.mark.parametrize("ends", [False, True], ids=["runs", "ends"])
def test_what_one_stage_passes_on_is_seen_by_the_next(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """By its thread while it sleeps or has run, by the loop if it runs for ever."""
    monkeypatch.setattr(direct, "Timer", Alarm)

    def make(run: Run) -> list[Callable[[], object]]:
        monkeypatch.setattr(os_threads, "new_lock", lambda: Lock(run))
        monkeypatch.setattr(os_threads, "new_rlock", lambda: RLock(run))
        came = seen = 0
        loop: Any = Loop(run, lambda: seen == 2)
        inbox = RequestInbox(loop)
        inbox.backend = Backend(refuses=True)
        driver = StageDriver("m", inbox, loop)
        slot: Any = SimpleNamespace(number=0)
        thread = DirectThread(slot, driver)

        def turn() -> None:
            nonlocal seen
            if seen < came:
                seen = came
                thread.put((0, [], []))
            driver.turned(None if seen else 1e9)

        def model() -> None:
            with driver.thread():
                driver.next(thread)
                run.wait(lambda: LATE if ends else seen == 2)
                while seen < 2:
                    driver.next(thread)

        def pass_on() -> None:
            nonlocal came
            with inbox.guard:
                came += 1
                driver.soon()

        idle = {"inert_arrivals": 0, "room": 4, "max_batch_size": 4, "running": 0, "urgent": False}
        scheduler: Any = SimpleNamespace(**idle, ahead_at=lambda: INF, next_end=lambda: (INF, 0))
        driver.begin(turn, scheduler, False)
        pass_on()
        return [loop.work, model, pass_on]

    explore([direct, inbox_module], make)


async def test_a_stage_on_the_loop_does_not_say_how_many_requests_may_wait() -> None:
    inbox = RequestInbox(asyncio.get_running_loop())
    allowed: list[object] = []
    inbox.allow = lambda *said: allowed.append(said)  # type: ignore[method-assign]
    scheduler: Any = SimpleNamespace(inert_arrivals=8, room=8, running=1)
    for stage in (True, False):
        driver = LoopDriver(asyncio.get_running_loop(), stage=stage)
        driver.begin(lambda: None, scheduler, False)
        driver.turned(None)
        driver.rest()
        driver.close()
        assert bool(allowed) is not stage
        assert driver.guard is inbox.guard
