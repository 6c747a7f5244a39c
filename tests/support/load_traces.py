"""Kept traces of changing load and the best possible answer to them, for tests and benchmarks of autoscaling."""

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

from penstock.core.batching.autoscale import AutoscaleLimits, Autoscaler, LoadReading
from penstock.perf.simulate.simulator import ScalingResult

CAPACITY = 64.0  # rows per second of one instance; rates below are in instances
RATES: dict[str, Callable[[float], float]] = {  # of the time in parts of the trace
    "step": lambda x: 3.2 if x < 1 / 3 or x >= 2 / 3 else 12.5,
    "daily wave": lambda x: 7.8 - 6.2 * math.cos(2 * math.pi * x),
    "ten-fold burst": lambda x: 23.0 if 0.5 <= x < 0.6 else 2.3,
    "on-off": lambda x: 9.3 if 5 * x % 1 < 0.5 else 0.3,
    "steps of one": lambda x: 0.7 if 10 * x % 1 < 0.5 else 1.7,
}
MODELS = 100
STEP_S = 0.5  # of a clairvoyant's plan


def trace(name: str, seconds: float, seed: int = 1) -> list[float]:
    """Arrivals of a Poisson process whose rate changes, in seconds."""
    rate = RATES[name]
    peak = max(rate(k / 1000) for k in range(1000))
    rng, t, found = random.Random(seed), 0.0, []
    while (t := t + rng.expovariate(peak * CAPACITY)) < seconds:
        if rng.random() * peak < rate(t / seconds):
            found.append(t)
    return found


def zipf(seconds: float, instances: float, seed: int = 1) -> list[list[float]]:
    """Arrivals for each of 100 models with Zipf's popularity, together of `instances` capacities."""
    rng, total = random.Random(seed), sum(1 / k for k in range(1, MODELS + 1))
    found = []
    for k in range(1, MODELS + 1):
        rate, t, arrivals = instances * CAPACITY / k / total, 0.0, []
        while (t := t + rng.expovariate(rate)) < seconds:
            arrivals.append(t)
        found.append(arrivals)
    return found


def _at(numbers: Sequence[tuple[float, int]], t: float) -> int:
    return next(number for since, number in reversed(numbers) if since <= t)


def too_many(found: ScalingResult, best: ScalingResult, quiet_s: float) -> int:
    """The most instances that a start made above the most of the plan in the quiet windows before and after it."""
    most = 0
    for (_, before), (t, number) in pairwise(found.numbers):
        if number > before:
            moves = [planned for since, planned in best.numbers if abs(since - t) < quiet_s]
            most = max(most, number - max([_at(best.numbers, max(0.0, t - quiet_s)), *moves]))
    return most


class Clairvoyant(Autoscaler):
    """A scaling policy that knows the arrivals: enough instances at every time, each started just in time."""

    def __init__(self, arrivals: Sequence[float], capacity: float, limits: AutoscaleLimits, start_s: float) -> None:
        """`capacity`: rows per second of one instance."""
        super().__init__(limits)
        self.start_s, slack = start_s, limits.slo_s or limits.wait_s
        count = math.ceil((arrivals[-1] if arrivals else 0.0) / STEP_S) + 1
        self.plan = [limits.fewest] * count
        for k in range(count):  # requests of a step may be answered until the SLO has passed
            rows = bisect_left(arrivals, (k + 1) * STEP_S) - bisect_left(arrivals, k * STEP_S)
            need = min(limits.most, math.ceil(rows / ((STEP_S + slack / 2) * capacity)))
            mean = bisect_left(arrivals, (k + 4) * STEP_S) - bisect_left(arrivals, (k - 3) * STEP_S)
            need = max(need, min(limits.most, math.ceil(mean / (7 * STEP_S * capacity))))
            self.plan[k] = max(need, limits.fewest)

    def decide(self, reading: LoadReading, now: float, day_s: float = 0.0) -> int:
        """The plan's number when an instance that starts now is up; those that are needed until then stay."""
        first, last = int(now / STEP_S), int((now + self.start_s) / STEP_S) + 1
        return max(self.plan[first : last + 1], default=reading.present)

    def started(self, seconds: float) -> None: ...


def least_worker_s(arrivals: Sequence[float], capacity: float, limits: AutoscaleLimits) -> float:
    """A lower bound of the seconds of all instances that answer `arrivals` within the SLO, of whatever policy.

    `limits.fewest` instances are always paid. What they cannot answer in time at `capacity` rows/s each, others must,
    at best at the same rate and without an idle moment.
    """
    slack = limits.slo_s or limits.wait_s
    base, steps = limits.fewest * capacity * STEP_S, math.ceil(slack / STEP_S) + 1
    extra, queue = 0.0, [0.0] * steps  # rows by the step of their deadline
    count = math.ceil((arrivals[-1] if arrivals else 0.0) / STEP_S) + 1
    for k in range(count):
        extra += queue.pop(0)
        queue.append(float(bisect_left(arrivals, (k + 1) * STEP_S) - bisect_left(arrivals, k * STEP_S)))
        room = base
        for place, rows in enumerate(queue):
            done = min(rows, room)
            queue[place], room = rows - done, room - done
    end = arrivals[-1] if arrivals else 0.0
    return limits.fewest * end + (extra + sum(queue)) / capacity
