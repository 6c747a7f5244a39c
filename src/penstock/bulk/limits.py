"""Limits of a provider in units a minute, such as requests or tokens. Pure: time is an argument."""

import math
from typing import Final

BURST_S: Final = 1.0  # of a minute's units, at the beginning and after a pause


class RateLimit:
    """A token bucket that may be in debt: what a request costs is known only after it.

    In any time, the units spent are at most the rate times this time, the burst, and the cost of the last request.
    """

    def __init__(self, per_minute: float) -> None:
        self._rate = per_minute / 60
        self._level = self._rate * BURST_S
        self._filled_s = -math.inf

    def wait_s(self, now: float) -> float:
        """The time until something may be spent; 0 if it may be now."""
        if self._filled_s > -math.inf:
            filled = self._level + self._rate * max(0.0, now - self._filled_s)
            self._level = min(self._rate * BURST_S, filled)
        self._filled_s = max(now, self._filled_s)
        return 0.0 if self._level > 0 else -self._level / self._rate + 1e-3

    def spend(self, units: float) -> None:
        """Takes units; negative ones are given back."""
        self._level -= units
