"""What a scheduler holds depends on what waits and runs, not on what has passed."""

import contextlib
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from penstock.core.batching.entry import INF, Dispatch, Entry, Outcome
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed, Unbatched
from penstock.core.batching.scheduler import Scheduler
from penstock.core.batching.sequences import SequenceLimits
from penstock.errors import QueueFull
from penstock.types import SequenceRequest

REQUESTS = 4000
MOST = 1800  # expiries and lost sequences are removed in lumps of about a thousand

POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "adaptive": Adaptive,
    "fixed": lambda: Fixed(0.01),
    "none": Unbatched,
}


def held(root: Any) -> int:
    """The number of elements of all containers that an object refers to."""
    seen: set[int] = set()
    count, left = 0, [root]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (str, bytes, int, float, type, type(None))) or callable(x):
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            count += len(x)
            left += [*x.keys(), *x.values()]
        elif isinstance(x, (list, tuple, set, frozenset, deque)):
            count += len(x) if type(x) is not tuple else 0  # a tuple is part of a container
            left += x
        else:
            slots = [n for c in type(x).__mro__ for n in getattr(c, "__slots__", ())]
            names = [*getattr(x, "__dict__", ()), *slots, *getattr(x, "__struct_fields__", ())]
            left += [getattr(x, n, None) for n in names]
    return count


class Load:
    """Plays the same few steps again and again: requests that are answered, expire, are cancelled, or die."""

    def __init__(self, policy: BatchPolicy, slots: int, sequences: bool) -> None:
        limits = SequenceLimits(8, 50.0, 4) if sequences else None
        self.scheduler = Scheduler(
            policy, max_batch_size=8, max_queue=1000, max_queue_bytes=10**9, sequences=limits, depth=1 if limits else 2
        )
        self.now, self.asked, self.slots = 0.0, 0, slots
        self.running: list[Dispatch] = []
        for slot in range(slots):
            self.scheduler.slot_up(slot, self.now)

    def offer(self, kind: str, bucket: int, rows: int) -> None:
        self.asked += 1
        end_s = self.now + (0.05 if kind == "expires" else 30.0)
        entry = Entry(self.asked, rows=rows, arrival_s=self.now, bucket=f"b{bucket}", expires_s=end_s, divisible=True)
        entry.deadline_s = end_s if kind == "deadline" else INF
        if self.scheduler.sequences is not None:
            entry.rows, entry.sequence = 1, SequenceRequest(str(self.asked), True, kind != "open")
        with contextlib.suppress(QueueFull):  # of sequences
            self.scheduler.offer(entry, self.now)
        self.poll()
        if kind == "cancelled":
            self.scheduler.cancel(entry.id, self.now)

    def poll(self) -> None:
        self.running += [e for e in self.scheduler.poll(self.now) if isinstance(e, Dispatch)]

    def finish(self, kind: Any) -> None:
        batches, self.running = self.running, []
        for batch in batches:
            self.scheduler.complete(batch.batch_id, Outcome(kind, run_s=0.004), self.now)
        for slot in range(self.slots) if kind != "ok" else ():
            self.scheduler.slot_down(slot, self.now)
            self.scheduler.slot_up(slot, self.now)
        self.poll()

    def play(self, steps: list[tuple[Any, ...]]) -> None:
        while self.asked < REQUESTS:
            for wait_s, kinds, outcome in steps:
                self.now += wait_s
                for kind in kinds:
                    self.offer(*kind)
                self.now += 0.005
                self.finish(outcome)
        for k in range(80):
            if k == 40:  # ids of lost sequences are kept until a request comes after their idle time
                self.offer("plain", 0, 1)
            self.now += 10.0
            self.finish("ok")


def steps_of(random: Random) -> list[tuple[Any, ...]]:
    kinds = random.sample(["plain", "plain", "expires", "deadline", "cancelled", "open"], 3)
    outcomes = ["ok"] * 8 + ["died", "lost"]
    return [
        (
            random.choice((0.0, 0.001, 0.2)),
            [
                (random.choice(kinds), random.randrange(random.choice((1, 4))), random.choice((1, 1, 1, 3, 20)))
                for _ in range(random.choice((1, 1, 2, 5)))
            ],
            random.choice(outcomes),
        )
        for _ in range(random.randint(1, 6))
    ]


LONE = [(0.001, [("plain", 0, 1)], "ok")]
LATE = [(0.1, [("expires", 0, 1)] * 3, "ok"), (0.0, [("expires", 0, 1)] * 3, "lost")]


@pytest.mark.parametrize("sequences", [False, True], ids=["independent", "sequences"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_scheduler_holds_no_more_than_what_waits_and_runs(name: str, sequences: bool) -> None:
    scripts = [LONE, LATE, *(steps_of(Random(f"{name}/{k}")) for k in range(4))]
    for number, steps in enumerate(scripts):
        load = Load(POLICIES[name](), 1 + number % 3, sequences)
        load.play(steps)
        left = held(load.scheduler)
        assert load.scheduler.queued == load.scheduler.running == 0
        assert left < MOST, f"script {number} {steps}: {left} elements are left after {load.asked} requests"
