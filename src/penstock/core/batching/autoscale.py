"""Autoscaler: how many instances a model needs, from its arrivals, queue and learned cost. Pure; time is an argument.

The need is the number of full batches per second that keeps the wait in the queue below its target:

* the predicted rate of arrivals at the time when an instance that starts now is up,
* the margin of a queue with random arrivals: with a capacity of `c` rows/s, `r` arrivals and a dispersion `d` of
  their counts, a wait exceeds `w` with probability exp(-2 (c - r) w / d) (Kingman's bound in heavy traffic),
* the rows that will by then wait too long.

More instances start at once. Fewer remain only after a quiet window without any need for more, so within a window the
number changes its direction at most once.

No prediction sees a step of the load before it comes, and a slow start then makes requests late. Against that stand
`spare` instances above the need, `headroom` above the rate, and a schedule of steps that come every day.
"""

import math
from collections import deque

from msgspec import Struct

# Choices, checked by benchmarks/autoscale.py: late requests, and cost against an oracle that knows the load.
MISSES = 0.002  # the share of requests for which the margin lets the wait exceed its target
_MARGIN = -math.log(MISSES) / 2
_SURE_SIGMAS = 4.0  # standard deviations by which a short window must exceed the mean to count
_TICKS = 240  # readings in a quiet window
_MAX_DRAIN = 2.0  # times the lasting need: many starts at once delay each other, which must not cause further ones
_MIN_ROWS = 8  # of a window that predicts a rate
_MAX_DISPERSION = 8.0
MIN_TICK_S = 0.05
START_S = 1.0  # assumed time of a start before one was measured
_MIN_WAIT = 0.25  # of the SLO: a target remains even if a batch takes nearly as long as the SLO
DAY_S = 86400.0


class AutoscaleLimits(Struct, frozen=True, kw_only=True):
    """`fewest` to `most` instances keep the wait below `wait_s`, or wait and run below `slo_s` if that is given. The
    number falls after `quiet_s`; to zero with `zero`. `spare` instances are kept above the need, which is planned for
    a load larger by the share `headroom`. `schedule`: (seconds since midnight, least instances from then on)."""

    fewest: int
    most: int
    quiet_s: float
    slo_s: float | None = None
    wait_s: float = 1.0
    zero: bool = False
    spare: int = 0
    headroom: float = 0.0
    schedule: tuple[tuple[float, int], ...] = ()

    def least(self, day_s: float, ahead_s: float) -> int:
        """What the schedule asks for between a time of day and `ahead_s` seconds later; 0 without one."""
        now = max((t for t, _ in self.schedule if t <= day_s), default=self.schedule[-1][0] if self.schedule else 0.0)
        return max((n for t, n in self.schedule if t == now or 0 < (t - day_s) % DAY_S <= ahead_s), default=0)

    def next_s(self, day_s: float, ahead_s: float) -> float:
        """Seconds until `least` may change; infinite without a schedule."""
        return min(((t - early - day_s) % DAY_S for t, _ in self.schedule for early in (0, ahead_s)), default=math.inf)

    @property
    def tick_s(self) -> float:
        """Seconds between two readings while there is work."""
        return max(MIN_TICK_S, self.quiet_s / _TICKS)


class LoadReading(Struct, frozen=True):
    """The state of a model. `arrived_rows` counts since its start, with refused ones; a full batch of `full_rows` rows
    takes `full_s` seconds (0: not learned). `present` counts instances that are up or starting.

    Instances that run requests concurrently take up to `full_rows` at a time, and their `full_s` is 0: the autoscaler
    learns how long a row stays.
    """

    arrived_rows: int
    queued_rows: int
    running_rows: int
    present: int
    up: int
    full_rows: int
    full_s: float
    concurrent: bool = False


class Stay:
    """The mean time of a row on an instance that runs rows concurrently, by Little's law: rows present x seconds,
    divided by the rows that left. Older readings fade."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None  # (time, rows that left before, rows present)
        self._area = self._left = 0.0

    def seconds(self, reading: LoadReading, now: float, memory_s: float) -> float:
        """0 until enough rows have left."""
        left = reading.arrived_rows - reading.queued_rows - reading.running_rows
        if self._last is not None and now > self._last[0]:
            t, before, present = self._last
            fade = math.exp((t - now) / memory_s)
            self._area = self._area * fade + (now - t) * (present + reading.running_rows) / 2
            self._left = self._left * fade + max(0, left - before)
        self._last = now, left, reading.running_rows
        return self._area / self._left if self._left >= _MIN_ROWS else 0.0


class Autoscaler:
    """Decides the number of instances of one model version."""

    def __init__(self, limits: AutoscaleLimits) -> None:
        self.limits = limits
        self.start_s = START_S  # learned
        self._starts = 0
        self._counts: deque[tuple[float, int]] = deque()  # (time, rows arrived before it) of a quiet window
        self._needs: deque[tuple[float, int]] = deque()  # (time, need), falling: the maximum of the window is first
        self._starting: deque[tuple[float, int]] = deque()  # (time of the decision, instances) of the last `start_s`
        self._busy_s = -math.inf  # when there was work last
        self._stay = Stay()
        self._full_s = 0.0  # smoothed
        self.need = limits.fewest  # of the last reading
        self._scheduled = 0

    def started(self, seconds: float) -> None:
        """Learns the time of a start, from the decision until the instance is up."""
        self._starts += 1
        self.start_s += (seconds - self.start_s) / min(self._starts, 4)

    @property
    def floor(self) -> int:
        """The number that remains without any load."""
        limits = self.limits
        if limits.zero and not self._scheduled:
            return 0
        return max(limits.fewest, self._scheduled, min(limits.most, limits.spare))

    def decide(self, reading: LoadReading, now: float, day_s: float = 0.0) -> int:
        """The number of instances there should be; `day_s` is the time of day for a schedule. A clock that goes back
        starts the history again."""
        if self._counts and now < self._counts[-1][0]:
            self._counts.clear()
            self._needs.clear()
            self._starting.clear()
            self._busy_s = min(self._busy_s, now)
        if reading.queued_rows or reading.running_rows or (self._counts and reading.arrived_rows > self._counts[-1][1]):
            self._busy_s = now
        self._count(reading.arrived_rows, now)
        while self._starting and (self._starting[0][0] <= now - self.start_s or reading.present == reading.up):
            self._starting.popleft()
        self._scheduled = self.limits.least(day_s, self.start_s)
        self.need = need = self._bounded(self._need(reading, now), now)
        needs = self._needs
        while needs and needs[-1][1] <= need:
            needs.pop()
        needs.append((now, need))
        while needs[0][0] <= now - self.limits.quiet_s:
            needs.popleft()
        if need > reading.present:
            self._starting.append((now, need - reading.present))
            return need
        if now - self.limits.quiet_s < self._counts[0][0]:  # not yet observed for a window
            return reading.present
        return min(reading.present, needs[0][1])

    def _bounded(self, need: int, now: float) -> int:
        limits = self.limits
        if self.floor == 0 and now - self._busy_s >= limits.quiet_s:
            return 0
        return max(limits.fewest, self._scheduled, 1, min(limits.most, need + limits.spare))

    def _count(self, rows: int, now: float) -> None:
        counts, limits = self._counts, self.limits
        if not counts or now > counts[-1][0]:
            counts.append((now, rows))
        while len(counts) > 2 and counts[1][0] <= now - limits.quiet_s:
            counts.popleft()

    def _need(self, reading: LoadReading, now: float) -> int:
        """Instances that the next `start_s` seconds need, without limits."""
        limits, full_s = self.limits, reading.full_s
        if reading.concurrent:
            full_s = self._stay.seconds(reading, now, limits.quiet_s)
        elif self._full_s > 0 < full_s:  # one slow batch raises the learned cost for a moment
            since_s = now - self._counts[-2][0] if len(self._counts) > 1 else 0.0
            full_s = self._full_s + (full_s - self._full_s) * (1 - math.exp(-2 * since_s / self._window_s))
        self._full_s = full_s
        if full_s <= 0:  # nothing is learned: add one while rows wait behind a full batch on each instance
            known = max(1, reading.up - limits.spare) if reading.queued_rows or reading.running_rows else 0
            return known + (reading.queued_rows > reading.full_rows * reading.up)
        capacity = reading.full_rows / full_s  # rows/s of an instance
        wait_s = limits.wait_s
        if limits.slo_s is not None:
            wait_s = max(limits.slo_s - full_s, _MIN_WAIT * limits.slo_s)
        rate, dispersion = self._predicted()
        rate *= 1 + limits.headroom
        steady = (rate + _MARGIN * dispersion / wait_s) / capacity if rate else 0.0
        # when an instance that starts now is up; those that start already serve for as long as they have been starting
        served_s = reading.up * self.start_s + sum(n * (now - t) for t, n in self._starting)
        waiting = reading.queued_rows + rate * self.start_s - capacity * served_s
        need = steady
        if waiting > wait_s / 2 * capacity * max(reading.present, 1):
            drain_s = max(wait_s, self.start_s)
            drain = (rate * drain_s + waiting) / (capacity * (drain_s + wait_s / 2))
            late = waiting / (capacity * 2 * wait_s)  # one more suffices if the wait is shorter than twice its target
            need = max(need, min(drain, max(steady + 1, min(late, _MAX_DRAIN * steady))))
        return math.ceil(need - 0.02)

    @property
    def _window_s(self) -> float:
        """Look-back window for the prediction of the load, in seconds."""
        return max(4 * self.limits.tick_s, min(self.limits.quiet_s / 2, 2 * self.start_s + 3.0))

    def _predicted(self) -> tuple[float, float]:
        """(rows/s when an instance that starts now is up, dispersion).

        The rate now is the mean of the last seconds, or of a shorter window that is surely above it, else of one that
        is surely below it, less random deviations. A rise continues from the middle of that window.
        """
        end, total = self._counts[-1]
        dispersion, tick_s = self._dispersion(), self.limits.tick_s
        longest = self._window_s
        start, rows = self._at(end - longest)
        doubt = _SURE_SIGMAS / 2 * math.sqrt(total - rows) if end - start < 0.9 * longest else 0.0
        mean = max(0.0, total - rows - doubt) / max(end - start, tick_s)
        above, below, span = (mean, longest), (mean, longest), longest / 2
        while span >= 2 * tick_s:
            t, rows = self._at(end - span)
            seconds, rows = max(end - t, tick_s), total - rows
            noise = _SURE_SIGMAS * math.sqrt(max(rows, mean * seconds) * dispersion)
            if rows >= _MIN_ROWS and (rows - noise) / seconds > mean:
                above = max(above, ((rows - noise / 2) / seconds, span))
            below = min(below, ((rows + noise) / seconds, span))
            span /= 2
        rate, span = above if above[0] > mean else below
        half, deviation = longest / 2, dispersion**0.5
        # a step is in one half of the window, a rise in both
        rise = min(
            self._slope(end, longest, _SURE_SIGMAS * deviation),
            self._slope(end, half, deviation),
            self._slope(end - half, half, deviation),
        )
        return rate + rise * (self.start_s + span / 2), dispersion

    def _slope(self, until: float, span: float, deviations: float) -> float:
        """The rise of the rate per second between the halves of `span` seconds, less random `deviations`."""
        (end, total), (middle, half), (start, early) = (self._at(until - part * span) for part in (0, 0.5, 1))
        if not start < middle < end or end - start < 0.9 * span:
            return 0.0
        rise = (total - half) / (end - middle) - (half - early) / (middle - start)
        noise = deviations * math.sqrt(total - early) / (span / 2)
        return max(0.0, rise - noise) / (span / 2)

    def _at(self, t: float) -> tuple[float, int]:
        """The last reading at or before `t`, or the first."""
        counts = self._counts
        low, high = 0, len(counts) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if counts[middle][0] <= t:
                low = middle
            else:
                high = middle - 1
        return counts[low]

    def _dispersion(self) -> float:
        """Variance / mean of the rows between readings, relative to a moving mean; 1 for random (Poisson) arrivals."""
        counts = self._counts
        if len(counts) < 16:
            return 1.0
        total = squares = 0.0
        last = None
        for (t0, n0), (t1, n1) in zip(counts, list(counts)[1:], strict=False):
            rows = n1 - n0
            if last is not None and t1 > t0:
                squares += (rows - last) ** 2 / 2  # neighbours: a slow change of the rate is no dispersion
                total += rows
            last = rows
        return min(_MAX_DISPERSION, max(1.0, squares / total)) if total >= 64 else 1.0
