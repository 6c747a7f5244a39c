"""Fixed, a size and a delay as in service_streamer, TorchServe and Triton; and Unbatched, one request per batch."""

from __future__ import annotations

from penstock.config.schema import BatchingConfig
from penstock.core.batching.policies.base import BatchPolicy, Choice, Take, View, WaitUntil

DEFAULT_DELAY_S = 0.1


class Fixed(BatchPolicy):
    """Sends a batch when it is full, when its head is `max_hold_s` old, or when the head's deadline requires it. With 0
    it is greedy: it sends everything that waits at once."""

    def __init__(self, max_hold_s: float = DEFAULT_DELAY_S) -> None:
        self.max_hold_s = max_hold_s

    @classmethod
    def of(cls, config: BatchingConfig) -> Fixed:
        """The policy that `[models.NAME.batching]` describes.

        With max_hold_s "auto" the delay is 0.1 s, and at most half of the latency target: a longer one would only
        produce late responses.
        """
        if config.max_hold_s == "auto":
            return cls(min(DEFAULT_DELAY_S, (config.slo_s or config.timeout_s) / 2))
        return cls(config.max_hold_s)

    def select(self, view: View, now: float) -> Choice:
        if not view.idle:
            return None
        if view.bucket.rows >= view.max_rows:
            return Take(view.max_rows, full=True, reason="full")
        head, cost = view.bucket.entries[0], view.cost
        last = min(head.deadline_s, head.expires_s) - (cost.high(view.bucket.rows) if cost.ready else 0.0)
        due = min(head.arrival_s + self.max_hold_s, last)
        if now >= due:
            return Take(view.max_rows, reason="delay")
        return WaitUntil(due, view.max_rows if due < last else 0)

    def explain(self) -> dict[str, object]:
        return {"policy": "fixed", "max_hold_s": self.max_hold_s}


class Unbatched(BatchPolicy):
    """Sends one request per batch as soon as a slot is idle."""

    @classmethod
    def of(cls, config: BatchingConfig) -> Unbatched:
        """No key of `[models.NAME.batching]` matters."""
        return cls()

    def select(self, view: View, now: float) -> Choice:
        return Take(1, full=True, reason="unbatched") if view.idle else None

    def explain(self) -> dict[str, object]:
        return {"policy": "none"}
