"""Random scripts of events for a Scheduler, and a player that applies a script.

A script names batches and requests by number modulo their count. Therefore any list of steps is a valid script, and a
script can be played shifted or stretched in time.
"""

from collections.abc import Callable
from random import Random
from typing import Literal

from msgspec import Struct

from penstock.core.batching.entry import INF, Dispatch, Entry, Event, Outcome
from penstock.core.batching.ladder import Ladder
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.scheduler import Scheduler
from penstock.errors import QueueFull

TICK = 2.0**-12
"""Times of a script are multiples of a tick, which makes their sums and doubles exact."""

Kind = Literal["offer", "cancel", "ok", "failed", "oom", "died", "lost", "up", "down", "wake", "late"]


Decision = tuple[float, *tuple[object, ...]]
"""The time in ticks since the start, "send" or the kind of event, and its data."""


class ScriptStep(Struct, frozen=True):
    """An event after `ticks`. `pick` names a request, batch or slot; the other fields belong to an offer."""

    kind: Kind
    ticks: int = 0
    pick: int = 0
    rows: int = 1
    deadline_ticks: int = 0  # 0: none
    priority: int = 0
    bucket: str = ""
    timeout_ticks: int = 0  # 0: none
    divisible: bool = False
    separate: bool = False
    length: int = 0


class ScriptSetup(Struct, frozen=True):
    """A script, the scheduler for it, and the service times (a + b*n ticks, n with padding to `sizes`) of the slots.

    With `lengths`, n are tokens, in eighths, of which batches have up to `max_tokens`."""

    max_batch_size: int = 8
    slots: int = 2
    depth: int = 1
    idempotent: bool = True
    priority: tuple[float, ...] = (0.0,)
    horizon_ticks: int = 4096
    max_queue: int = 64
    a: int = 20
    b: int = 1
    primed: bool = True
    steps: tuple[ScriptStep, ...] = ()
    sizes: tuple[int, ...] = ()
    lengths: bool = False
    max_tokens: int | None = None


def random_setup(rng: Random, steps: int = 60) -> ScriptSetup:
    """A setup with a script. Each draws its own rates, so that idle, crowded and failing traces all occur."""
    deadlines, sizes = rng.choice((0, 0, 0.5, 1)), rng.choice((1, 1, 4, 20))
    buckets = rng.choice(("", "", "ab", "abcd"))
    trouble, pace = rng.choice((0, 0.05, 0.3)), rng.choice((0, 1, 4, 30))
    timeout = rng.choice((0, 2000, 20000))
    classes = rng.choice((1, 1, 3))
    divisible, separate = rng.choice((0, 0.5, 1)), rng.choice((0, 0, 0.5))

    def step() -> ScriptStep:
        pick, ticks = rng.randrange(1000), rng.randint(0, 2 * pace) if rng.random() < 0.7 else 0
        if rng.random() < trouble:
            kind: Kind = rng.choice(("cancel", "failed", "oom", "died", "lost", "up", "down", "late"))
            return ScriptStep(kind, ticks, pick)
        if rng.random() < 0.6:
            return ScriptStep(
                "offer",
                ticks,
                rows=rng.randint(1, sizes),
                deadline_ticks=rng.randint(1, 400) if rng.random() < deadlines else 0,
                priority=rng.randrange(classes),
                bucket=rng.choice(buckets) if buckets else "",
                timeout_ticks=timeout,
                divisible=rng.random() < divisible,
                separate=rng.random() < separate,
            )
        return ScriptStep(rng.choice(("ok", "ok", "ok", "wake", "up")), ticks, pick)

    return ScriptSetup(
        max_batch_size=rng.choice((1, 2, 4, 8, 16)),
        slots=rng.randint(1, 4),
        depth=rng.choice((1, 2)),
        idempotent=rng.random() < 0.7,
        priority=(0.0, 0.25, 1.0)[:classes],
        max_queue=rng.choice((16, 64, 256)),
        a=rng.choice((0, 2, 20, 200)),
        b=rng.choice((1, 1, 8)),
        primed=rng.random() < 0.8,
        steps=tuple(step() for _ in range(steps)),
    )


class ScriptPlayer:
    """Plays a setup's script on a new Scheduler. `trace` holds all decisions, with times relative to the start.

    A subclass may use another `scheduler_class`. Its hooks see every call (`on_offer`, `on_cancel`, `on_complete`) and
    the poll after it (`on_poll`).
    """

    scheduler_class: type[Scheduler] = Scheduler

    def __init__(
        self,
        setup: ScriptSetup,
        make_policy: Callable[[], BatchPolicy],
        *,
        shift_s: float = 0.0,
        scale: float = 1.0,
        number: Callable[[int], int] = int,
    ) -> None:
        self.setup, self.tick_s, self.start_s, self.number = setup, TICK * scale, shift_s, number
        self.now = shift_s
        self.scheduler = self.scheduler_class(
            make_policy(),
            max_batch_size=setup.max_batch_size,
            max_queue=setup.max_queue,
            max_queue_bytes=2**40,
            depth=setup.depth,
            idempotent=setup.idempotent,
            priority=tuple(p * scale for p in setup.priority),
            horizon_s=setup.horizon_ticks * self.tick_s,
            sizes=setup.sizes,
            lengths=setup.lengths,
            max_tokens=setup.max_tokens,
        )
        self.ladder = Ladder(setup.sizes) if setup.sizes else None
        if setup.primed:
            sizes = [2**k for k in range(5, 10)] if setup.lengths else setup.sizes or [2**k for k in range(5)]
            self.scheduler.prime([(n, self.takes_s(n, j)) for n in sizes for j in range(max(3, 8 // len(sizes) + 1))])
        self.ids: list[int] = []
        self.down: list[int] = []
        self.on_slot: dict[int, list[Dispatch]] = {}
        self.trace: list[Decision] = []
        for slot in range(setup.slots):
            self.scheduler.slot_up(slot, self.now)
            self.on_slot[slot] = []

    def work(self, batch: Dispatch) -> int:
        """What the run time of a batch depends on: its rows, or its tokens."""
        rows = batch.rows if self.ladder is None else self.ladder.up(batch.rows)
        return rows * max(e.length for e in batch.entries) if self.setup.lengths else rows

    def takes_s(self, work: int, pick: int = 0) -> float:
        """Run time of a batch. The factor keeps predicted ends off the script's grid, where the rounding of a shifted
        clock would decide ties."""
        b = self.setup.b / 8 if self.setup.lengths else self.setup.b
        return (self.setup.a + b * work) * self.tick_s * (0.9 + 0.0137 * (pick % 17))

    def play(self) -> None:
        """Plays the whole script, then starts every slot and completes all batches."""
        for step in self.setup.steps:
            if step.kind != "late":  # a late timer: time passes without a poll
                self.advance(self.now + step.ticks * self.tick_s)
            else:
                self.now += step.ticks * self.tick_s
            self.apply(step)
            self.poll()
        self.finish()

    def finish(self) -> None:
        for slot in list(self.down):
            self.up(slot)
        for _ in range(50 * len(self.ids) + 50):
            self.poll()
            batches = [d for ds in self.on_slot.values() for d in ds[:1]]
            if batches:
                self.advance(self.now + self.takes_s(self.work(batches[0])))
                self.complete(batches[0], Outcome("ok", 0.0))
            elif self.scheduler.wake_at is not None:
                self.advance(self.scheduler.wake_at)
            else:
                return

    def advance(self, until_s: float) -> None:
        """Advances the time, and polls whenever the timer fires."""
        for _ in range(10_000):
            wake = self.scheduler.wake_at
            if wake is None or wake > until_s:
                self.now = max(self.now, until_s)
                return
            self.now = max(self.now, wake)
            self.poll()
        raise AssertionError("the timer does not stop firing")

    def apply(self, step: ScriptStep) -> None:
        busy = [n for n, batches in self.on_slot.items() if batches]
        if step.kind == "offer":
            self.offer(step)
        elif step.kind == "cancel" and self.ids:
            self.cancel(self.ids[step.pick % len(self.ids)])
        elif step.kind == "wake" and self.scheduler.wake_at is not None:
            self.advance(self.scheduler.wake_at)
        elif step.kind == "up" and self.down:
            self.up(self.down[step.pick % len(self.down)])
        elif step.kind == "down" and len(self.on_slot) > len(self.down):
            up = [n for n in self.on_slot if n not in self.down]
            self.die(up[step.pick % len(up)], "lost")
        elif step.kind in ("died", "lost") and busy:
            self.die(busy[step.pick % len(busy)], step.kind)
        elif step.kind in ("ok", "failed", "oom") and busy:
            batch = self.on_slot[busy[step.pick % len(busy)]][0]
            self.advance(self.now + (self.takes_s(self.work(batch), step.pick) if step.kind == "ok" else 0.0))
            self.complete(batch, self.outcome(step, batch))

    def outcome(self, step: ScriptStep, batch: Dispatch) -> Outcome:
        work = self.work(batch)
        run_s = self.takes_s(work) / 2
        if step.kind == "failed":
            return Outcome("ok", run_s, frozenset(e.id for e in batch.entries[:: 1 + step.pick % 3]))
        if step.kind == "oom" and batch.rows > 1:
            failed = work if self.setup.lengths else batch.rows
            return Outcome("ok", run_s, oom=(failed, max(1, failed // 2)))
        return Outcome("ok", run_s, prepare_s=run_s / 4)

    def offer(self, step: ScriptStep) -> None:
        id = self.number(len(self.ids) + 1)
        most = self.setup.max_queue * 7 // 8  # the rest of the queue is reserved for the most urgent class
        # keeps deadlines distinct, see `takes_s`
        deadline_s = self.now + (step.deadline_ticks + 0.000731 * len(self.ids)) * self.tick_s
        entry = Entry(
            id=id,
            rows=min(step.rows, most),
            nbytes=10 * step.rows,
            arrival_s=self.now,
            deadline_s=deadline_s if step.deadline_ticks else INF,
            expires_s=self.now + step.timeout_ticks * self.tick_s if step.timeout_ticks else INF,
            priority=step.priority,
            bucket=step.bucket,
            divisible=step.divisible,
            separate=step.separate,
            length=step.length,
        )
        try:
            self.scheduler.offer(entry, self.now)
        except QueueFull:
            self.trace.append(((self.now - self.start_s) / self.tick_s, "full"))
            return
        self.ids.append(id)
        self.on_offer(entry)

    def cancel(self, id: int) -> None:
        self.on_cancel(id, self.scheduler.cancel(id, self.now))

    def complete(self, batch: Dispatch, outcome: Outcome) -> None:
        self.on_slot[batch.slot].remove(batch)
        ended = self.scheduler.complete(batch.batch_id, outcome, self.now)
        self.on_complete(batch, outcome, ended)

    def die(self, slot: int, first: Literal["died", "lost"]) -> None:
        for k, batch in enumerate(list(self.on_slot[slot])):
            self.complete(batch, Outcome(first if k == 0 else "lost"))
        self.scheduler.slot_down(slot, self.now)
        self.down.append(slot)

    def up(self, slot: int) -> None:
        self.down.remove(slot)
        self.scheduler.slot_up(slot, self.now)

    def poll(self) -> None:
        events = self.scheduler.poll(self.now)
        t = (self.now - self.start_s) / self.tick_s
        for event in events:
            if isinstance(event, Dispatch):
                self.on_slot[event.slot].append(event)
                parts = tuple((self.ids.index(e.id), e.start, e.rows) for e in event.entries)
                self.trace.append((t, "send", event.slot, parts, event.reason, event.ahead))
            else:
                self.trace.append((t, type(event).__name__, self.ids.index(event.id), event.reason))
        self.on_poll(events)

    def on_offer(self, entry: Entry) -> None: ...

    def on_cancel(self, id: int, gone: bool) -> None: ...

    def on_complete(self, batch: Dispatch, outcome: Outcome, ended: list[int]) -> None: ...

    def on_poll(self, events: list[Event]) -> None: ...
