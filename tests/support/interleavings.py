"""Runs a few threads in every order of their lines, to find a wake-up that gets lost.

One thread runs at a time, and changes are possible before each line of the `watched` modules. `explore` tries all
orders with at most `changes` unforced ones: almost all races need one or two. What blocks must be a `Flag`, `Lock` or
`Queue` of the run. When all threads that are left wait, a wake-up was lost, and `Stuck` is raised.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE_S = 60.0
CHANGES = 2 if os.environ.get("CHAOS") == "full" else 1
LATE = "late"  # of a thread that goes on when no other one can, as after some time


class Stuck(AssertionError):
    """Nobody can go on."""


class _Ended(BaseException):
    """The run is over; its threads end."""


class Run:
    """One order. `order[i]` is the thread that runs at step i; after these the current one goes on as long as it can.

    The thread that runs chooses the next one, at each of its steps.
    """

    def __init__(self, watched: Sequence[Any], order: Sequence[int]) -> None:
        self._files = {module.__file__ for module in watched}
        self._order = order
        self._can: dict[int, Callable[[], object]] = {}  # of the threads that have not ended
        self._turns: list[threading.Semaphore] = []
        self._me = threading.local()
        self._over = threading.Event()
        self.steps: list[tuple[list[int], int]] = []  # (who could run, who did)
        self.errors: list[BaseException] = []

    def play(self, threads: Sequence[Callable[[], object]]) -> None:
        """Runs the threads to their ends. Raises Stuck, and what they raise."""
        self._can = {number: lambda: True for number in range(len(threads))}
        self._turns = [threading.Semaphore(0) for _ in threads]
        started = [threading.Thread(target=self._main, args=both, daemon=True) for both in enumerate(threads)]
        for thread in started:
            thread.start()
        self._pass_on(0)
        over = self._over.wait(PATIENCE_S)
        self._end()
        for thread in started:
            thread.join(PATIENCE_S)
        if self.errors:
            raise self.errors[0]
        assert over, "a thread blocks outside of the run"

    def wait(self, can: Callable[[], object]) -> None:
        """The current thread goes on when `can()` is true, and when it is its turn; see LATE. Others never wait."""
        me = getattr(self._me, "number", None)
        if me is not None:
            self._can[me] = can
            self._pass_on(me)
            if self._over.is_set():
                raise _Ended

    def _pass_on(self, me: int) -> None:
        """Chooses who runs next; if that is another thread, waits for the next turn of this one."""
        found = {number: can() for number, can in self._can.items()}
        able = [n for n, now in found.items() if now and now is not LATE] or [n for n in found if found[n]]
        if not able:
            if found:
                self.errors.append(Stuck(f"threads {list(found)} wait for ever"))
            self._end()
            return
        step = len(self.steps)
        current = self._order[step] if step < len(self._order) else me if me in able else able[0]
        self.steps.append((able, current))
        mine = getattr(self._me, "number", None)
        if current != mine:
            self._turns[current].release()
            if mine in self._can:
                self._turns[me].acquire()

    def _end(self) -> None:
        self._over.set()
        for turn in self._turns:
            turn.release()

    def _main(self, number: int, work: Callable[[], object]) -> None:
        self._me.number = number
        self._turns[number].acquire()
        try:
            if not self._over.is_set():
                sys.settrace(self._trace)
                work()
        except _Ended:
            return
        except BaseException as e:
            self.errors.append(e)
            self._end()
        finally:
            sys.settrace(None)
        del self._can[number]
        if not self._over.is_set():
            self._pass_on(number)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.wait(lambda: True)
        return self._trace


class Flag:
    """A `threading.Event` of a run. The time of `wait(timeout)` may always be over."""

    def __init__(self, run: Run) -> None:
        self._run, self._set = run, False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        self._run.wait((lambda: self._set) if timeout is None else (lambda: True))
        return self._set


class Lock:
    """A `threading.Lock` of a run. A timeout passes when nobody else can go on."""

    def __init__(self, run: Run) -> None:
        self._run, self._held = run, False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._run.wait(lambda: not (blocking and self._held) or (timeout >= 0 and LATE))
        taken, self._held = not self._held, True
        return taken

    def release(self) -> None:
        assert self._held
        self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A `threading.RLock` of a run."""

    _owner, _depth = 0, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner != threading.get_ident():
            if not super().acquire(blocking, timeout):
                return False
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            super().release()


class Queue:
    """A `queue.SimpleQueue` of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._items: deque[Any] = deque()

    def empty(self) -> bool:
        self._run.wait(lambda: True)
        return not self._items

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._run.wait(lambda: self._items)
        return self._items.popleft()


def explore(
    watched: Sequence[Any], make: Callable[[Run], Sequence[Callable[[], object]]], changes: int = CHANGES
) -> None:
    """Plays all orders. `make` returns the threads of a run, with new objects."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        order = waiting.pop()
        run = Run(watched, order)
        run.play(make(run))
        made = 0
        for step, (able, ran) in enumerate(run.steps):
            last = run.steps[step - 1][1] if step else ran
            for other in able if step >= len(order) else ():
                if other != ran and made + (last in able and other != last) <= changes:
                    waiting.append((*(who for _, who in run.steps[:step]), other))
            made += last in able and ran != last
