"""How many requests may be in flight to one server. Pure: time is an argument."""

from __future__ import annotations

import math
from typing import Final

MAX_WINDOW: Final = 64  # requests: 4 GPUs x 2 x 8 chunks, and no more than the blocks of memory that a job has
# Below this multiple of the shortest round trip, a request waits for less than one other at the server.
SHORT: Final = 2.0
LONG: Final = 8.0  # above it a wider window only lengthens the queue, even where small chunks share a batch
HOLD: Final = 8  # epochs without another step up after one that gained nothing


class Window:
    """A fixed window. Each `sent` is followed by exactly one of `answered`, `refused` and `lost`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_flight = 0

    def room(self) -> int:
        """How many requests may be sent now."""
        return max(0, self.size - self.in_flight)

    def sent(self, now: float) -> None:
        self.in_flight += 1

    def answered(self, sent_s: float, now: float, rows: int) -> None:
        """A request returned captions. `rows` is 0 when its round trip is not representative, such as a retry's."""
        self.lost()

    def refused(self, sent_s: float, now: float) -> None:
        """The server had no capacity for the request, or was too late."""
        self.lost()

    def lost(self) -> None:
        """A request ended in another way."""
        self.in_flight -= 1


class RoundWindow(Window):
    """Up to `size` requests at a time; the next round starts when all of them have ended."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._started = 0

    def room(self) -> int:
        return self.size - self._started

    def sent(self, now: float) -> None:
        super().sent(now)
        self._started += 1

    def lost(self) -> None:
        super().lost()
        if self.in_flight == 0:
            self._started = 0


class AimdWindow(Window):
    """Grows by one while that raises throughput or the server's queue is short; halves on a refusal.

    An epoch lasts as many responses as two windows, and counts only if the window was full in it: a window that the
    decoders cannot fill reveals nothing about the server. A step that gains nothing is undone, and a size that was
    refused is avoided; both are tried again some epochs later.
    """

    def __init__(self, start: int, limit: int = MAX_WINDOW) -> None:
        self.limit = max(1, limit)
        super().__init__(max(1, min(start, self.limit)))
        self._best_s = math.inf  # the shortest round trip of a request with the most rows so far
        self._most_rows = 0
        self._halved_s = -math.inf
        self._previous_rate: float | None = None  # rows/s before the last step up
        self._hold = 0
        self._refused_size = math.inf
        self._start_epoch(-math.inf)

    def _start_epoch(self, now: float) -> None:
        self._since_s = now
        self._answers = self._rows = 0
        self._total_s = 0.0
        self._full = False

    def sent(self, now: float) -> None:
        super().sent(now)
        if self._since_s == -math.inf:
            self._since_s = now
        self._full = self._full or self.in_flight >= self.size

    def answered(self, sent_s: float, now: float, rows: int) -> None:
        self.in_flight -= 1
        if rows > self._most_rows:
            self._most_rows, self._best_s = rows, math.inf
        if rows == self._most_rows:
            self._best_s = min(self._best_s, now - sent_s)
        self._answers += 1
        self._rows += rows
        self._total_s += now - sent_s
        if self._answers >= 2 * self.size:
            self._end_epoch(now)

    def refused(self, sent_s: float, now: float) -> None:
        """Halves once a round trip: refusals of requests sent before the last halving carry no new information."""
        self.in_flight -= 1
        if sent_s < self._halved_s:
            return
        self._refused_size, self._hold = self.size, HOLD
        self.size = max(1, self.size // 2)
        self._halved_s = now
        self._previous_rate = None
        self._start_epoch(now)

    def _end_epoch(self, now: float) -> None:
        rate = self._rows / max(now - self._since_s, 1e-9)
        round_trip_s = self._total_s / self._answers
        full, previous = self._full, self._previous_rate
        self._start_epoch(now)
        self._previous_rate = None
        if not full:
            return
        short = round_trip_s < SHORT * self._best_s
        # a quarter of the gain from one more request where nothing limits the rate; a smaller gain is noise
        if previous is not None and not short and rate < previous * (1 + 0.25 / self.size):
            self.size = max(1, self.size - 1)
            self._hold = HOLD
            return
        risky = self.size + 1 >= self._refused_size
        if self._hold > 0 and (risky or not (short or previous is not None)):
            self._hold -= 1
        elif self.size < self.limit and round_trip_s < LONG * self._best_s:
            self.size += 1
            self._previous_rate = rate
            if risky:
                self._refused_size = math.inf
