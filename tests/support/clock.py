"""VirtualClock: time that passes only when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """Seconds, as `time.monotonic` gives them; called, it returns the time. Timers fire in order as time is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    def __call__(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> None:
        """Calls back when the time comes; a time that is over comes with the next move."""
        self._order += 1
        heappush(self._timers, (when, self._order, callback))

    def advance(self, seconds: float) -> None:
        """Moves the time on; timers that are due see their own time, and may set others."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: advance({seconds})")
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, callback = heappop(self._timers)
            self.now = max(self.now, when)
            callback()
        self.now = end
