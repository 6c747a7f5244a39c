"""check_policy: plays random scripts on the real Scheduler with a policy, and checks invariants after every event.

The checker keeps its own simple record of every request: a bit mask of its rows for each state. It sees only what a
caller sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from msgspec import Struct

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import INF, Dispatch, Entry, Event, Expire, Fail, Outcome, Shed
from penstock.core.batching.lengths import CLASSES, LONGEST, kind_of
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed, Unbatched
from penstock.core.batching.queues import MAX_BYPASSES
from penstock.testing.scripts import TICK, ScriptPlayer, ScriptSetup, random_setup

INVARIANTS = {
    "I1": "rows of a batch <= the maximum, one bucket; every request ends exactly once; the queue's counts are correct;"
    " with lengths: tokens of a batch <= the maximum, but for a single row",
    "I2": "only slots that are up get batches, one each (with depth 2: one more, sent ahead)",
    "I3": "same bucket and class, no deadline: first in, first out; a misfit is passed over at most 8 times",
    "I4": "max_hold_s = 0: no request waits while a slot is idle, but after a killer one may wait for its own slot",
    "I5": "while a slot is idle, a request waits <= 2a/m, or 2t(max) if trials pay (fixed: its delay), a full one not",
    "I6": "n* <= 1 or one slot, and no completion in the last a/m or the longer hold: no hold",
    "I7": "a = 0, or the cost model not ready: no hold",
    "I8": "no late request is sent, and none is dropped that could be in time or has no deadline",
    "I9": "the request with the earliest virtual deadline is in the next batch unless its own deadline forbids it",
    "I10": "skipped entries are served later or dropped for I8 only: no request is left at the end",
    "I11": "wake_at is later than now, and set while a request is held; a second poll changes nothing",
    "I12": "a split request ends once, when none of its rows waits or runs",
    "I13": "only time differences matter, and ids do not: a shifted, renumbered script has the same decisions",
    "I14": "a script with all times doubled has the same decisions, doubled",
    "I15": "the cost model has a >= 0, b > 0 and increasing t for any samples",
}
"""All apply to every policy, except I4 (max_hold_s = 0, and none), I5 (adaptive, fixed), I6 and I7 (adaptive), and the
part of I8 about the cost model (adaptive; other policies drop at the deadline itself)."""


class Violation(AssertionError):
    """`name` is the broken invariant."""

    def __init__(self, name: str, found: str) -> None:
        super().__init__(f"{name} ({INVARIANTS[name]}): {found}")
        self.name = name


class PolicyRules(Struct, frozen=True):
    """Which of the optional invariants apply to a policy."""

    holds: bool  # it may hold a request while a slot is idle
    model: bool  # it holds and drops by the cost model, like adaptive
    delay_s: float = INF  # longest hold of the head
    cap_s: float = INF  # longest hold of a slot

    @classmethod
    def of(cls, policy: BatchPolicy) -> PolicyRules:
        if isinstance(policy, Adaptive):
            return cls(holds=policy.max_hold_s > 0, model=True, cap_s=policy.max_hold_s)
        if isinstance(policy, Fixed):
            return cls(holds=policy.max_hold_s > 0, model=False, delay_s=policy.max_hold_s)
        return cls(holds=not isinstance(policy, Unbatched), model=False)


class CheckedRequest(Struct):
    """The checker's record of a request; bit k of a mask is row k."""

    entry: Entry
    order: int
    rows: int
    vdeadline_s: float
    waits: int  # rows in their bucket
    rerun: int = 0  # rows that wait for a re-run as an exact batch
    runs: int = 0
    done: int = 0
    dead: int = 0  # rows that ran during a worker death
    requeued: bool = False
    over: bool = False  # no more rows will run
    passed: int = 0

    @property
    def end_s(self) -> float:
        return min(self.entry.deadline_s, self.entry.expires_s)

    def purge(self) -> None:
        self.over, self.waits, self.rerun = True, 0, 0


def mask(entry: Entry) -> int:
    return ((1 << entry.rows) - 1) << entry.start


class PolicyChecker(ScriptPlayer):
    """Plays one script and raises Violation at the first broken invariant."""

    def __init__(self, setup: ScriptSetup, make_policy: Callable[[], BatchPolicy]) -> None:
        policy = make_policy()
        self.rules = PolicyRules.of(policy)
        self.requests: dict[int, CheckedRequest] = {}  # not ended yet
        self.recent: deque[tuple[float, int]] = deque(maxlen=32)
        self.ceiling = 2**30
        self.exact: set[int] = set()  # ids of re-runs
        self.hold_start_s = INF  # since when a request waits while a slot is idle
        self.answered_s, self.quiet_s = -INF, -INF  # the last completion; a/m later, while a closed loop may regroup
        self.lengths = setup.lengths
        self.largest = 0  # what the largest batch of any request so far costs
        super().__init__(setup, lambda: policy)

    def play(self) -> None:
        super().play()
        self.need("I10", not self.requests, f"{sorted(self.requests)} never ended")

    def need(self, name: str, holds: bool, found: object) -> None:
        if not holds:
            raise Violation(name, f"{found} at {self.now} in {self.setup}")

    @property
    def cost(self) -> Cost:
        return self.scheduler._cost

    @property
    def most(self) -> int:
        return self.scheduler.max_batch_size if self.lengths else min(self.scheduler.max_batch_size, self.ceiling)

    def most_of(self, entry: Entry) -> int:
        """The most rows of a batch of this length."""
        if not self.lengths:
            return self.most
        rows = max(1, min(self.most, self.tokens // self.of(entry)))
        return rows if self.ladder is None else self.ladder.down(rows) or 1

    def of(self, entry: Entry) -> int:
        """What a row costs at most: the tokens of its class; 1 without lengths."""
        return min(CLASSES.up(entry.length), self.setup.max_tokens or LONGEST) if self.lengths else 1

    @property
    def tokens(self) -> int:
        return min(self.setup.max_tokens or LONGEST, self.ceiling)

    @property
    def full(self) -> int:
        """What the largest batch of the waiting requests costs."""
        return max([self.cost_of(self.most, r.entry) for r in self.requests.values()], default=self.most)

    def cost_of(self, rows: int, entry: Entry) -> int:
        """What the batch of so many rows of this length costs, if there is room for them."""
        rows = min(rows, self.most_of(entry))
        return (rows if self.ladder is None else self.ladder.up(rows)) * self.of(entry)

    @property
    def live(self) -> int:
        """Slots that are up."""
        return len(self.on_slot) - len(self.down)

    def idle(self) -> bool:
        return any(not batches for n, batches in self.on_slot.items() if n not in self.down)

    def end(self, id: int, how: object) -> None:
        self.need("I1", id in self.requests, f"request {id} ended again, or was never offered: {how}")
        self.need("I12", not self.requests[id].runs, f"request {id} ended while a part of it runs: {how}")
        del self.requests[id]

    # ---- calls of the scheduler

    def on_offer(self, entry: Entry) -> None:
        classes = self.setup.priority
        extra = classes[min(entry.priority, len(classes) - 1)] * self.tick_s / TICK
        v = min(entry.deadline_s, entry.arrival_s + (self.setup.horizon_ticks * self.tick_s + extra))
        self.requests[entry.id] = CheckedRequest(entry, len(self.ids), entry.rows, v, mask(entry))
        self.recent.append((self.now, entry.rows))
        self.largest = max(self.largest, self.cost_of(self.most, entry))

    def on_cancel(self, id: int, gone: bool) -> None:
        r = self.requests.get(id)
        if gone:
            waits = r is not None and bool(r.waits | r.rerun)
            self.need("I1", waits, f"cancel({id}) of a request that does not wait returned True")
            self.end(id, "cancelled")
        elif r is not None:
            self.need("I1", bool(r.runs) or r.over, f"cancel({id}) of a waiting request returned False")
            if r.waits | r.rerun:
                r.purge()

    def on_complete(self, batch: Dispatch, outcome: Outcome, ended: list[int]) -> None:
        exact, died = batch.batch_id in self.exact, outcome.kind == "died"
        alone = sum(e.rows if e.separate else 1 for e in batch.entries) == 1
        for e in batch.entries:
            self.need("I1", e.id in self.requests, f"request {e.id} ended before its batch")
            r, rows = self.requests[e.id], mask(e)
            r.runs &= ~rows
            fails = died and not r.over and (not self.setup.idempotent or (alone and bool(r.dead & rows)))
            if outcome.kind == "ok" or (fails and e.separate):
                r.done |= rows
                if e.parent is None:
                    self.end(e.id, outcome)
                elif e.id in outcome.failed:
                    r.purge()
            elif fails:
                r.purge()
            elif not r.over:
                r.requeued = True
                if died:
                    r.dead |= rows
                if died or exact:
                    r.rerun |= rows
                else:
                    r.waits |= rows
        for id in ended:
            r = self.requests.get(id) or CheckedRequest(batch.entries[0], 0, 0, 0.0, 1)
            self.need("I12", r.over or r.done == (1 << r.rows) - 1, f"request {id} ended before all its rows")
            self.end(id, "joined")
        whole = [id for id, r in self.requests.items() if r.done == (1 << r.rows) - 1]
        self.need("I12", not whole, f"requests {whole} are answered, but have not ended")
        self.note_completion(outcome)

    def note_completion(self, outcome: Outcome) -> None:
        if outcome.oom is not None:
            bad, good = outcome.oom
            ceiling = max(1, good if good >= 0.8 * bad else (good + bad) // 2)
            if self.ladder is not None and not self.lengths:
                ceiling = self.ladder.down(ceiling) or self.ladder.sizes[0]
            self.ceiling = min(self.ceiling, ceiling)
        self.need("I15", self.cost.a >= 0 and self.cost.b > 0, f"a={self.cost.a} b={self.cost.b}")
        if outcome.kind == "ok":
            self.answered_s, self.quiet_s = self.now, self.now + self.cost.a / max(1, self.live)

    # ---- decisions

    def on_poll(self, events: list[Event]) -> None:
        before = [r for r in self.requests.values() if r.waits]
        for r in self.requests.values():
            if r.runs and r.waits | r.rerun and r.end_s <= self.now:
                r.purge()  # reported when its running part returns
        for event in events:
            if isinstance(event, Dispatch):
                self.sent(event)
            else:
                self.dropped(event, before)
        for id, r in self.requests.items():
            self.need("I12", bool(r.runs) or not r.over, f"request {id} is over and does not run, but has not ended")
            self.need("I8", not r.waits | r.rerun or r.end_s > self.now, f"request {id} waits after its end {r.end_s}")
        for slot, batches in self.on_slot.items():
            right = len(batches) <= self.setup.depth and all(b.ahead for b in batches[1:])
            self.need("I2", right and not (slot in self.down and batches), f"slot {slot} holds {batches}")
        self.check_counts()
        self.check_holds()
        wake = self.scheduler.wake_at
        self.need("I11", wake is None or wake > self.now, f"wake_at {wake}")
        again = self.scheduler.poll(self.now)
        self.need("I11", not again and self.scheduler.wake_at == wake, f"a second poll returned {again}, {wake}")

    def sent(self, batch: Dispatch) -> None:
        rows, names = sum(e.rows for e in batch.entries), {self.kind(e) for e in batch.entries}
        self.need("I1", 0 < rows == batch.rows <= self.most and len(names) == 1, f"{batch}: {rows} of {self.most} rows")
        tokens = rows * max(e.length for e in batch.entries)
        self.need("I1", rows == 1 or not self.lengths or tokens <= self.tokens, f"{batch}: {tokens} of {self.tokens}")
        exact = batch.reason == "rerun"
        if exact:
            self.exact.add(batch.batch_id)
        else:
            self.check_head(batch)
        planned = self.rules.model and self.cost.ready and not batch.ahead and not exact
        slow_s = self.cost.high(self.work(batch)) if planned else 0.0
        for e in batch.entries:
            r, bits = self.requests.get(e.id), mask(e)
            self.need("I1", r is not None and bits & (r.rerun if exact else r.waits) == bits, f"{e} does not wait")
            assert r is not None
            self.need("I8", min(r.entry.expires_s, r.entry.deadline_s) > self.now, f"{e} was sent after its end")
            self.need("I8", self.now + slow_s <= r.entry.deadline_s, f"{e} was sent, but will be late")
            r.waits &= ~bits
            r.rerun &= ~bits
            r.runs |= bits
        if not exact:
            self.check_order(batch)

    def kind(self, entry: Entry) -> str:
        return kind_of(entry.bucket) if self.lengths else entry.bucket

    def check_head(self, batch: Dispatch) -> None:
        """I9, before the rows of the batch are removed."""
        waits = [r for r in self.requests.values() if r.waits]
        head = min(waits, key=lambda r: (r.vdeadline_s, r.order), default=None)
        if head is None or self.unsure(head) or any(e.id == head.entry.id for e in batch.entries):
            return
        name = batch.entries[0].bucket
        other = head.entry.bucket != name and self.rules.holds
        same = sum(r.rows for r in self.requests.values() if r.waits and r.entry.bucket == name)
        full = other and same >= self.most_of(batch.entries[0])
        # the policy's choice, before requests that do not fit were left out
        slow_s = self.cost.high(self.full) if self.rules.model else 0.0
        tight = head.entry.deadline_s < self.now + slow_s or (batch.ahead and head.entry.deadline_s < INF)
        self.need("I9", full or tight, f"{batch} without the head {head}")

    def check_order(self, batch: Dispatch) -> None:
        """I3, after the rows of the batch were removed."""

        def plain(r: CheckedRequest) -> bool:
            return r.entry.deadline_s == INF and not r.requeued

        sent = [r for e in batch.entries if plain(r := self.requests[e.id])]
        for r in sent:
            r.passed = 0
        for r in self.requests.values():
            if r.waits and plain(r) and any(self.overtakes(s, r) for s in sent):
                r.passed += 1
                fits = r.rows == 1
                self.need("I3", r.passed <= MAX_BYPASSES and not fits, f"{r} was passed {r.passed} times by {batch}")

    @staticmethod
    def overtakes(later: CheckedRequest, r: CheckedRequest) -> bool:
        same = later.entry.bucket == r.entry.bucket and later.entry.priority == r.entry.priority
        return same and later.order > r.order

    def unsure(self, r: CheckedRequest) -> bool:
        """Whether the waiting rows of a partly running request may have been dropped, which is reported later."""
        return bool(r.runs) and r.entry.deadline_s < INF

    def dropped(self, event: Expire | Shed | Fail, before: list[CheckedRequest]) -> None:
        r = self.requests.get(event.id)
        self.need("I1", r is not None, f"{event} of an ended request")
        assert r is not None
        deadline, cost, reason = r.entry.deadline_s, self.cost, event.reason
        if reason == "worker_died":
            self.need("I1", r.over, f"{event} without a death")
        elif reason == "timeout":
            self.need("I8", self.now >= r.entry.expires_s, f"{event} of {r}")
        elif not (r.over or r.done):  # otherwise dropped earlier, while it ran in part
            self.need("I8", deadline < INF, f"{event} without a deadline")
            by_model = self.rules.model and cost.ready
            if reason == "expired":
                slow_s = cost.high(self.cost_of(r.rows, r.entry)) if by_model else 0.0
                self.need("I8", self.now + slow_s >= deadline, f"{event} of {r}, which could be in time")
            else:
                # with lengths all that waits shares the slots, at the rate of the most expensive class
                same = [x for x in before if self.lengths or x.entry.bucket == r.entry.bucket]
                full_s = cost.t(self.cost_of(self.most, r.entry))
                rate = max(cost.t(n := self.cost_of(self.most, x.entry)) / n for x in same)
                work_s = sum(x.rows * self.of(x.entry) for x in same) * rate
                work_s += sum(cost.t(self.work(b)) for batches in self.on_slot.values() for b in batches)
                ends = [x.entry.deadline_s for x in same if x.entry.deadline_s < INF]
                last_s = min(ends) if self.lengths else max(ends)
                free_s = (last_s - self.now - full_s) * self.live
                self.need("I8", by_model and work_s > free_s, f"{event} of {r}, but {work_s} fit into {free_s}")
        self.end(event.id, event)

    def check_counts(self) -> None:
        """I1: the scheduler's counts of its queue."""
        waits = [r for r in self.requests.values() if r.waits | r.rerun]
        sure = [r for r in waits if not self.unsure(r)]
        s = self.scheduler
        for found, value in (
            (s.queued, lambda r: 1),
            (s.queued_rows, lambda r: (r.waits | r.rerun).bit_count()),
            (s.queued_bytes, lambda r: r.entry.nbytes),
        ):
            low, high = sum(map(value, sure)), sum(map(value, waits))
            self.need("I1", low <= found <= high, f"queued counts {found}, expected {low} to {high}")
        running = sum(len(batches) for batches in self.on_slot.values())
        self.need("I1", s.running == running, f"running is {s.running}, expected {running}")

    def check_holds(self) -> None:
        """I4 to I7, I11: requests that wait while a slot is idle."""
        due = [r for r in self.requests.values() if r.waits or (r.rerun and not self.scheduler.killers(self.now))]
        waits = [r for r in due if not self.unsure(r)]
        if not (waits and self.idle()):
            self.hold_start_s = INF
            return
        self.hold_start_s = min(self.hold_start_s, self.now)
        wake, cost, m = self.scheduler.wake_at, self.cost, self.live
        self.need("I4", self.rules.holds, f"{len(waits)} requests wait while a slot is idle")
        self.need("I11", wake is not None, "a request is held, but wake_at is None")
        assert wake is not None
        for name in {r.entry.bucket for r in waits}:
            rows = sum(r.waits.bit_count() for r in waits if r.entry.bucket == name)
            full = next(self.most_of(r.entry) for r in waits if r.entry.bucket == name)
            self.need("I5", rows < full, f"a full batch of bucket '{name}' waits while a slot is idle")
        head = min(due, key=lambda r: (r.vdeadline_s, r.order))
        young = self.now < head.entry.arrival_s + self.rules.delay_s
        self.need("I5", young or self.unsure(head), f"the head is held too long: {head}")
        if self.rules.model:
            self.need("I7", cost.ready and cost.a > 0, f"a hold with a={cost.a}, ready={cost.ready}")
            found = self.scheduler.explain()
            longer = found["longer_hold_s"] if found["trial_s"] is None else found["trial_s"]
            longer_s = min(float(str(longer)), 2 * cost.t(max(self.full, self.largest)))
            # a/b rows may be padded to a size that takes longer than 2a
            short_s = max(2 * cost.a, cost.t(self.largest) if self.lengths and self.ladder else 0.0) / m
            end = (self.hold_start_s + min(max(short_s, longer_s), self.rules.cap_s)) * (1 + 1e-9)
            held = f"held since {self.hold_start_s} until {wake}, at most to {end}"
            self.need("I5", self.now < end and wake <= end, held)
            busy = self.now < max(self.quiet_s, self.answered_s + longer_s) or (m > 1 and self.even_batch() > 1)
            self.need("I6", busy, "a hold at light load")

    def even_batch(self) -> float:
        """n* of adaptive, from the recorded arrivals."""
        if len(self.recent) < 8:
            return 1.0
        span = self.now - self.recent[0][0]
        rate = (sum(k for _, k in self.recent) - self.recent[0][1]) / span if span else INF
        spare = self.live - rate * self.cost.b * max([self.of(r.entry) for r in self.requests.values()], default=1)
        return self.most if spare <= 0 else min(self.most, rate * self.cost.a / spare)


def check_invariance(
    setup: ScriptSetup, make_policy: Callable[[], BatchPolicy], doubled: Callable[[], BatchPolicy] | None = None
) -> None:
    """Checks I13 and I14 on one script. `doubled` returns the policy with its own times doubled, if it has any."""
    plain = ScriptPlayer(setup, make_policy)
    plain.play()
    for name, other in (
        ("I13", ScriptPlayer(setup, make_policy, shift_s=4096.0, number=lambda k: 100_003 - 7 * k)),
        ("I14", ScriptPlayer(setup, doubled or make_policy, scale=2.0)),
    ):
        other.play()
        pairs = zip(plain.trace, other.trace, strict=False)
        differ = next(((x, y) for x, y in pairs if x[1:] != y[1:] or abs(x[0] - y[0]) > 1e-6), None)
        if differ or len(plain.trace) != len(other.trace):
            raise Violation(name, f"{differ} in {setup}")


def check_policy(
    make_policy: Callable[[], BatchPolicy],
    *,
    traces: int = 200,
    seed: int = 0,
    steps: int = 60,
    doubled: Callable[[], BatchPolicy] | None = None,
) -> int:
    """Plays `traces` random scripts, each on a new policy, and returns the number of checked decisions.

    Raises Violation, which names the invariant and the setup that breaks it. `doubled`: see `check_invariance`.
    """
    decisions = 0
    for k in range(traces):
        setup = random_setup(Random(f"{seed}/{k}"), steps)
        checker = PolicyChecker(setup, make_policy)
        checker.play()
        decisions += len(checker.trace)
        if k % 10 == 0:
            check_invariance(setup, make_policy, doubled)
    return decisions
