"""Which failed requests are sent again, and when. Pure: the time and the random number are arguments."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from penstock.backoff import doubled_s
from penstock.client.endpoint import ConnectionLost, Unreachable
from penstock.errors import ModelNotReady, PenstockError, QueueFull, RunTimeout, WorkerDied

NOT_RUN: Final = (Unreachable, QueueFull, ModelNotReady)  # the server refused the request, or never received it
PERHAPS_RUN: Final = (ConnectionLost, WorkerDied)


class RetryPolicy(Struct, frozen=True):
    """At most `retries` further attempts, with pauses that double from `backoff_s` up to `longest_pause_s`.

    A server's Retry-After is honoured up to `longest_pause_s`.
    """

    retries: int = 2
    backoff_s: float = 0.1
    longest_pause_s: float = 10.0

    def pause_s(
        self, error: PenstockError, failures: int, left_s: float, *, repeatable: bool, chance: float
    ) -> float | None:
        """Seconds before the next attempt; None: the error is final.

        `failures` counts the failed attempts, from 1. `left_s` is the time that the caller still has. `repeatable`:
        running the request twice is harmless. `chance` is a random number from 0 to 1.
        """
        if failures > self.retries or not is_safe(error, repeatable):
            return None
        jitter_s = chance * doubled_s(self.backoff_s, failures, self.longest_pause_s)
        pause_s = min(error.retry_after_s or 0.0, self.longest_pause_s) + jitter_s
        return pause_s if pause_s < left_s else None


def is_safe(error: PenstockError, repeatable: bool) -> bool:
    """Whether another attempt may help and harms nothing. A run that timed out would time out again."""
    if isinstance(error, PERHAPS_RUN):
        return repeatable and not isinstance(error, RunTimeout)
    return isinstance(error, NOT_RUN)
