"""How many requests may be under way to one server. Pure: time is an argument.

A window counts what is sent and what came back, and decides its size from that alone.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

MOST: Final = 64  # requests: 4 GPUs x 2 x 8 chunks, and no more than the blocks of memory that a job has
# A round trip below this many of the best one means that a request waits for less than one other at the server.
SHORT: Final = 2.0
LONG: Final = 8.0  # from here on a wider window only makes the queue longer, also where small chunks share a batch
HOLD: Final = 8  # epochs without a probe after one that gained nothing


class Window(Protocol):
    """Of one server. `in_flight` is what was sent and has not ended; every `sent` is followed by one of the others."""

    size: int
    in_flight: int

    def room(self) -> int:
        """How many may be sent now."""
        ...

    def sent(self, now: float) -> None:
        """One left."""
        ...

    def answered(self, sent_s: float, now: float, rows: int) -> None:
        """One came back with captions; `rows` 0: its round trip says nothing of the server, such as a retry's."""
        ...

    def refused(self, sent_s: float, now: float) -> None:
        """The server had no room for it, or no time."""
        ...

    def lost(self) -> None:
        """One ended in another way."""
        ...


class FixedWindow:
    """Always `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_flight = 0

    def room(self) -> int:
        """See Window."""
        return self.size - self.in_flight

    def sent(self, now: float) -> None:
        """See Window."""
        self.in_flight += 1

    def answered(self, sent_s: float, now: float, rows: int) -> None:
        """See Window."""
        self.lost()

    def refused(self, sent_s: float, now: float) -> None:
        """See Window."""
        self.lost()

    def lost(self) -> None:
        """See Window."""
        self.in_flight -= 1


class Rounds(FixedWindow):
    """Up to `size` are sent, then none before all of them ended: nothing overlaps."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._started = 0

    def room(self) -> int:
        """See Window."""
        return self.size - self._started

    def sent(self, now: float) -> None:
        """See Window."""
        super().sent(now)
        self._started += 1

    def lost(self) -> None:
        """See Window."""
        super().lost()
        if self.in_flight == 0:
            self._started = 0


class AimdWindow:
    """Grows by one while that gains rows a second or the server's queue is short, halves when it is refused.

    An epoch is as many answers as two windows. It is judged only if the window was full in it: a window that the
    decoders do not fill teaches nothing. A step that gained nothing is taken back, one to a size that was refused is
    not taken: both are tried again some epochs later.
    """

    def __init__(self, start: int, most: int = MOST) -> None:
        self.most = max(1, most)
        self.size = max(1, min(start, self.most))
        self.in_flight = 0
        self._best_s = math.inf  # the shortest round trip of a request with as many rows as any
        self._most_rows = 0
        self._halved_s = -math.inf
        self._before: float | None = None  # rows a second before the last step
        self._hold = 0
        self._ceiling = math.inf  # the size that was refused last
        self._begin(-math.inf)

    def _begin(self, now: float) -> None:
        self._since_s = now
        self._answers = self._rows = 0
        self._waits_s = 0.0
        self._full = False

    def room(self) -> int:
        """See Window."""
        return max(0, self.size - self.in_flight)

    def sent(self, now: float) -> None:
        """See Window."""
        self.in_flight += 1
        if self._since_s == -math.inf:
            self._since_s = now
        self._full = self._full or self.in_flight >= self.size

    def answered(self, sent_s: float, now: float, rows: int) -> None:
        """See Window."""
        self.in_flight -= 1
        if rows > self._most_rows:
            self._most_rows, self._best_s = rows, math.inf
        if rows == self._most_rows:
            self._best_s = min(self._best_s, now - sent_s)
        self._answers += 1
        self._rows += rows
        self._waits_s += now - sent_s
        if self._answers >= 2 * self.size:
            self._judge(now)

    def refused(self, sent_s: float, now: float) -> None:
        """Halves once a round trip: what was sent before the last halving says nothing new."""
        self.in_flight -= 1
        if sent_s < self._halved_s:
            return
        self._ceiling, self._hold = self.size, HOLD
        self.size = max(1, self.size // 2)
        self._halved_s = now
        self._before = None
        self._begin(now)

    def lost(self) -> None:
        """See Window."""
        self.in_flight -= 1

    def _judge(self, now: float) -> None:
        """The epoch is over."""
        rate = self._rows / max(now - self._since_s, 1e-9)
        wait_s = self._waits_s / self._answers
        full, before = self._full, self._before
        self._begin(now)
        self._before = None
        if not full:
            return
        short = wait_s < SHORT * self._best_s
        # a quarter of what one more of `size` brings where there is no bound: less is noise
        if before is not None and not short and rate < before * (1 + 0.25 / self.size):
            self.size = max(1, self.size - 1)
            self._hold = HOLD
            return
        careful = self.size + 1 >= self._ceiling
        if self._hold > 0 and (careful or not (short or before is not None)):
            self._hold -= 1
        elif self.size < self.most and wait_s < LONG * self._best_s:
            self.size += 1
            self._before = rate
            if careful:
                self._ceiling = math.inf
