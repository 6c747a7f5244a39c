"""Unbatched: one request per batch."""

from __future__ import annotations

from penstock.config.schema import BatchingConfig
from penstock.core.batching.policies.base import BatchPolicy, Choice, Take, View


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
