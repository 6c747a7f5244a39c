"""Kept traces of changing load, for tests and benchmarks of autoscaling: the same arrivals every time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from penstock.perf.simulate.autoscaled import ScalingResult

CAPACITY = 64.0  # rows per second of one instance; rates below are in instances
RATES: dict[str, Callable[[float], float]] = {  # of the time in parts of the trace
    "step": lambda x: 3.2 if x < 1 / 3 or x >= 2 / 3 else 12.5,
    "daily wave": lambda x: 7.8 - 6.2 * math.cos(2 * math.pi * x),
    "ten-fold burst": lambda x: 23.0 if 0.5 <= x < 0.6 else 2.3,
    "on-off": lambda x: 9.3 if 5 * x % 1 < 0.5 else 0.3,
}
MODELS = 100


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
