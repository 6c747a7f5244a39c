"""A Scheduler with a hand on its clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.batching.entry import Dispatch, Entry, Event, Outcome
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.scheduler import Scheduler


class Bench:
    """`offer` and `poll` at the time `now`. `sent` are the batches of the last poll, `told` its other events."""

    def __init__(self, policy: BatchPolicy | None = None, *, slots: int = 1, **kwargs: Any) -> None:
        kwargs = {"max_batch_size": 4, "max_queue": 100, "max_queue_bytes": 1000} | kwargs
        self.scheduler = Scheduler(policy or Fixed(0.0), **kwargs)
        self.now = 100.0
        self.sent: list[Dispatch] = []
        self.told: list[Event] = []
        for slot in range(slots):
            self.scheduler.slot_up(slot, self.now)

    def offer(self, *ids: int, **fields: Any) -> None:
        for id in ids:
            self.scheduler.offer(Entry(id=id, arrival_s=self.now, **fields), self.now)

    def poll(self, after_s: float = 0.0) -> list[list[int]]:
        """The ids of each batch that is sent after so many seconds."""
        self.now += after_s
        events = self.scheduler.poll(self.now)
        self.sent = [e for e in events if isinstance(e, Dispatch)]
        self.told = [e for e in events if not isinstance(e, Dispatch)]
        return [[e.id for e in d.entries] for d in self.sent]

    def complete(self, batch: int, kind: Any = "ok", after_s: float = 0.0, **fields: Any) -> list[int]:
        self.now += after_s
        return self.scheduler.complete(batch, Outcome(kind, **fields), self.now)

    def prime(self, a: float, b: float) -> None:
        self.scheduler.prime([(n, a + b * n) for n in (1, 2, 4, 8) for _ in range(3)])


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench
