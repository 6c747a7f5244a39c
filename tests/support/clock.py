"""VirtualClock: a clock that tests advance."""

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """A replacement of `time.monotonic` with timers, which fire in order when the time advances."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    def __call__(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> None:
        """Calls back at a time; at the next advance for a time in the past."""
        self._order += 1
        heappush(self._timers, (when, self._order, callback))

    def advance(self, seconds: float) -> None:
        """Advances the time. Each due timer sees its own time, and may set others."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: advance({seconds})")
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, callback = heappop(self._timers)
            self.now = max(self.now, when)
            callback()
        self.now = end
