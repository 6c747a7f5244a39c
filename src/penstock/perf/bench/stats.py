"""Statistics of few, noisy repeats: confidence intervals and differences. Pure; no seed, no clock.

The unit is the repeat, never the request: the requests of one run are not independent.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

TRIM: Final = 0.2  # of the repeats are dropped at each end, so that one disturbed repeat does not decide
LEAST: Final = 3  # repeats per side
_ROUNDS: Final = 4000


class Difference(Struct, frozen=True):
    """The change from the first side to the second, within [low, high], and its p-value."""

    change: float
    low: float
    high: float
    chance: float


def difference(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Difference | None:
    """The difference of the trimmed means by Yuen's test (Biometrika 61, 1974): Welch's without the outermost fifths.

    None with fewer than 3 values on a side. Without any spread every difference is certain.
    """
    if min(len(first), len(second)) < LEAST:
        return None
    (mean_1, error_1, free_1), (mean_2, error_2, free_2) = _trimmed(first), _trimmed(second)
    change, error = mean_2 - mean_1, error_1 + error_2
    if error <= 0:
        return Difference(change, change, change, 0.0 if change else 1.0)
    free = error**2 / (error_1**2 / free_1 + error_2**2 / free_2)
    width = student_at(1 - confidence, free) * math.sqrt(error)
    return Difference(change, change - width, change + width, student_tails(change / math.sqrt(error), free))


def ratio(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Difference | None:
    """Like `difference`, as a share of the first side: 0.1 is 10 % more. Values are at least 0."""
    logs = [[math.log(max(value, 1e-12)) for value in side] for side in (first, second)]
    found = difference(*logs, confidence=confidence)
    return found and Difference(_share(found.change), _share(found.low), _share(found.high), found.chance)


def _share(log: float) -> float:
    return math.expm1(min(log, 700.0))


def _trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """The trimmed mean, its squared standard error from the winsorised variance, and its degrees of freedom."""
    ordered = sorted(values)
    cut = int(TRIM * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    left = len(kept)
    error = (len(ordered) - 1) * statistics.variance(winsorised) / (left * (left - 1))
    return statistics.fmean(kept), error, left - 1


def bootstrap(
    sides: Sequence[Sequence[float]], statistic: Callable[..., np.ndarray], *, seed: int
) -> tuple[float, float]:
    """The 95 % interval of a statistic by the expanded percentile bootstrap (Hesterberg 2015, section 3.3).

    `statistic` receives an array [rounds, n] per side and returns [rounds]. The expansion widens the interval for few
    values; with a single value on a side it is infinite.
    """
    least = min(len(side) for side in sides)
    if least < 2:
        return -math.inf, math.inf
    random = np.random.default_rng(seed)
    drawn = [np.asarray(side, float)[random.integers(0, len(side), (_ROUNDS, len(side)))] for side in sides]
    reach = math.sqrt(least / (least - 1)) * student_at(0.05, least - 1)
    tail = statistics.NormalDist().cdf(-reach)
    low, high = np.quantile(statistic(*drawn), [tail, 1 - tail])
    return float(low), float(high)


def student_tails(t: float, free: float) -> float:
    """The two-sided p-value of Student's t with `free` degrees of freedom."""
    return _beta(free / (free + t * t), free / 2, 0.5) if t else 1.0


def student_at(chance: float, free: float) -> float:
    """The inverse of `student_tails`."""
    low, high = 0.0, 2.0
    while student_tails(high, free) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tails(middle, free) > chance else (low, middle)
    return high


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    fraction = 1.0
    for m in range(20 + int(4 * math.sqrt(a + b)), 0, -1):  # backwards; about sqrt(a + b) terms suffice
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        fraction = 1 + odd / (1 + even / fraction)
    return front / fraction
