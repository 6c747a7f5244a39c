"""Runs two or more threads of real code in every order that a bounded number of preemptions allows.

Each line of the traced module is a step, and one thread runs at a time. A schedule lists the steps at which another
thread takes over; without an entry, a thread runs until it blocks. Most faults of concurrency show with two preemptions
(Musuvathi and Qadeer, "Iterative Context Bounding for Systematic Testing of Multithreaded Programs", PLDI 2007).
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any


class _Over(BaseException):
    """Ends the threads once none of them can go on."""


class Interleaving:
    """One run. `primitives` replace those of the traced module; `wait` and `step` serve the scenario's own code."""

    def __init__(self, module: ModuleType, schedule: Sequence[int]) -> None:
        self._file = module.__file__
        self._schedule = frozenset(schedule)
        self.steps = 0
        self.waiting: dict[str, str] = {}  # thread -> what it waits for, at the end
        self.failed: BaseException | None = None
        self._conditions: dict[str, tuple[Callable[[], bool], str]] = {}
        self._turns: dict[str, threading.Semaphore] = {}
        self._over = False
        self._current = ""

    def run(self, **threads: Callable[[], None]) -> Interleaving:
        """Runs the threads until each has ended or waits for ever. Raises what one of them raised."""
        self._turns = {name: threading.Semaphore(0) for name in threads}
        started = [threading.Thread(target=self._main, args=(n, f), daemon=True) for n, f in threads.items()]
        for thread in started:
            thread.start()
        self._current = next(iter(threads))
        self._turns[self._current].release()
        for thread in started:
            thread.join()
        if self.failed is not None:
            raise self.failed
        return self

    def _main(self, name: str, function: Callable[[], None]) -> None:
        self._turns[name].acquire()
        sys.settrace(self._trace)
        try:
            function()
        except _Over:
            pass
        except BaseException as e:
            self.failed, self._over = self.failed or e, True
        finally:
            sys.settrace(None)
            del self._turns[name]
            self._next()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line":
            self.step()
        return self._trace

    def step(self) -> None:
        """A point at which another thread may take over."""
        if self._over:
            raise _Over
        self.steps += 1
        if self.steps in self._schedule:
            self.wait(lambda: True, "")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Lets the other threads run, and returns once `condition` holds."""
        me = self._current
        if what and condition():
            return
        self._conditions[me] = condition, what
        turn = self._turns[me]
        self._next(after=me)
        turn.acquire()
        del self._conditions[me]
        if self._over:
            raise _Over

    def _next(self, after: str = "") -> None:
        others = sorted(self._turns, key=lambda name: name == after)
        ready = next((n for n in others if n not in self._conditions or self._conditions[n][0]()), None)
        if ready is None or self._over:
            if not self._over:
                self.waiting = {name: what for name, (_, what) in self._conditions.items()}
            self._over = True
            ready = next(iter(self._turns), None)
        if ready is not None:
            self._current = ready
            self._turns[ready].release()

    # ---- primitives, for the names that the traced module imports

    def primitives(self) -> dict[str, Callable[[], Any]]:
        return {"Lock": lambda: _Lock(self), "Event": lambda: _Event(self), "SimpleQueue": lambda: _Queue(self)}


class _Lock:
    def __init__(self, run: Interleaving) -> None:
        self._run, self._held = run, False

    def acquire(self, blocking: bool = True) -> bool:
        self._run.step()
        if blocking:
            self._run.wait(lambda: not self._held, "lock")
        elif self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        assert self._held
        self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Event:
    def __init__(self, run: Interleaving) -> None:
        self._run, self._set = run, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self) -> None:
        self._run.wait(lambda: self._set, "event")


class _Queue:
    def __init__(self, run: Interleaving) -> None:
        self._run = run
        self._items: deque[Any] = deque()

    def empty(self) -> bool:
        self._run.step()
        return not self._items

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._run.wait(lambda: bool(self._items), "queue")
        return self._items.popleft()


def schedules(play: Callable[[Sequence[int]], int], preemptions: int) -> Iterator[Sequence[int]]:
    """Plays every schedule with at most `preemptions` entries, and yields each; `play` returns its number of steps."""

    def deeper(schedule: list[int], left: int) -> Iterator[Sequence[int]]:
        steps = play(schedule)
        yield schedule
        if left:
            for step in range((schedule or [0])[-1] + 1, steps + 1):
                yield from deeper([*schedule, step], left - 1)

    return deeper([], preemptions)
