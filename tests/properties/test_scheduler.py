"""Every policy keeps the invariants of `testing/policies.py` in random scripts, and broken policies are detected."""

from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import INF, Dispatch, Entry, EntryState, Event, Outcome
from penstock.core.batching.policies.adaptive import CROWD_S, Adaptive
from penstock.core.batching.policies.base import BatchPolicy, Choice, Drop, Take, View, WaitUntil
from penstock.core.batching.policies.fixed import Fixed, Unbatched
from penstock.core.batching.scheduler import Scheduler
from penstock.testing.policies import INVARIANTS, PolicyChecker, Violation, check_invariance, check_policy
from penstock.testing.scripts import ScriptPlayer, ScriptSetup, ScriptStep, random_setup

TRACES = 400  # of each of the six: 2,400 in all

POLICIES: dict[str, tuple[Callable[[], BatchPolicy], Callable[[], BatchPolicy] | None]] = {
    "adaptive": (Adaptive, None),
    "adaptive, never held": (lambda: Adaptive(0.0), None),
    "adaptive, hold capped": (lambda: Adaptive(0.002), lambda: Adaptive(0.004)),
    "fixed": (lambda: Fixed(0.01), lambda: Fixed(0.02)),
    "fixed, no delay": (lambda: Fixed(0.0), None),
    "none": (Unbatched, None),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_invariant_holds_over_random_scripts(name: str) -> None:
    make, doubled = POLICIES[name]
    assert check_policy(make, traces=TRACES, doubled=doubled) > 10 * TRACES


def test_scripts_reach_holds_skips_drops_deaths_splits_and_batches_sent_ahead() -> None:
    seen: set[str] = set()
    for k in range(150):
        checker = PolicyChecker(random_setup(Random(f"reach/{k}")), Adaptive)
        checker.play()
        seen |= {str(x) for t in checker.trace for x in t if isinstance(x, str)}
        seen |= {"ahead" for t in checker.trace if t[1] == "send" and t[-1]}
        holds = checker.scheduler.explain()["holds_by_kind"]
        assert isinstance(holds, dict)
        seen |= {kind for kind, n in holds.items() if n}
    expected = {"full", "all that waits", "spread", "deadline", "rerun", "ahead", "Expire", "Shed", "Fail", "timeout"}
    assert expected | {"stagger", "regroup", "expired", "overload", "worker_died"} <= seen


def test_every_invariant_holds_while_longer_holds_are_tried() -> None:
    found: list[tuple[object, object]] = []
    for k in range(40):
        setup = random_setup(Random(f"trials/{k}"), 600)
        checker = PolicyChecker(setup, Adaptive)
        checker.play()
        explained = checker.scheduler.explain()
        found.append((explained["trials"], explained["longer_hold_s"]))
        if explained["trials"] and k % 4 == 0:
            check_invariance(setup, Adaptive)
    assert sum(trials != 0 for trials, _ in found) >= 8
    assert any(hold_s != 0 for _, hold_s in found)


class Crowded(Scheduler):
    """Its callers keep a processor busy at times."""

    def poll(self, now: float) -> list[Event]:
        return super().poll(now, True, Random(round(now * 1e6)).random() < 0.7)


class CrowdChecker(PolicyChecker):
    """Checks all but the reasons for a hold, which must end when a tenth of a second is over."""

    scheduler_class = Crowded

    def need(self, name: str, holds: bool, found: object) -> None:
        if name not in ("I5", "I6", "I7"):
            super().need(name, holds, found)

    def on_poll(self, events: list[Event]) -> None:
        super().on_poll(events)
        if self.hold_start_s < self.now:
            longest_s = max(CROWD_S, 2 * self.cost.t(self.most))
            assert self.scheduler.wake_at is not None
            assert self.scheduler.wake_at <= (self.hold_start_s + longest_s) * (1 + 1e-9)


def test_every_request_is_served_in_its_order_and_time_while_batches_wait_for_busy_callers() -> None:
    holds = 0
    for k in range(TRACES):
        checker = CrowdChecker(random_setup(Random(f"crowd/{k}")), Adaptive)
        checker.play()
        kinds = checker.scheduler.explain()["holds_by_kind"]
        assert isinstance(kinds, dict)
        holds += kinds["crowd"]
    assert holds > TRACES


class QuietPlayer(ScriptPlayer):
    """Checks each offer against the `inert_arrivals` and the `room` before it."""

    quiet = quiet_offers = 0

    def offer(self, step: ScriptStep) -> None:
        self.poll()  # what time alone causes
        seen = step.rows > 1 or step.deadline_ticks or step.bucket or step.priority
        self.quiet = 0 if seen else min(self.scheduler.inert_arrivals, self.scheduler.room)
        refused = len(self.trace)
        super().offer(step)
        assert not self.quiet or len(self.trace) == refused

    def on_poll(self, events: list[Event]) -> None:
        if self.quiet:
            assert not events
            assert min(self.scheduler.inert_arrivals, self.scheduler.room) >= self.quiet - 1
            self.quiet, self.quiet_offers = 0, self.quiet_offers + 1


@pytest.mark.parametrize("name", POLICIES)
def test_arrivals_within_the_quiet_rows_cause_no_event(name: str) -> None:
    quiet = 0
    for k in range(300):
        player = QuietPlayer(random_setup(Random(f"quiet/{k}")), POLICIES[name][0])
        player.play()
        quiet += player.quiet_offers
    assert quiet > 300


@given(
    knee=st.just(0.0) | st.integers(0, 100).map(lambda n: n + 0.318),  # no whole multiple: rounding must not decide
    b=st.floats(1e-5, 0.01),
    seen=st.integers(1, 64),
    rows=st.integers(1, 64),
    slots=st.integers(1, 4),
    slack=st.none() | st.floats(1.5, 10.0),  # predictions have a margin of 15 %
)
@settings(max_examples=200, deadline=None)
def test_batches_are_not_smaller_because_their_sizes_never_varied(
    knee: float, b: float, seen: int, rows: int, slots: int, slack: float | None
) -> None:
    """The same bursts go to a scheduler that knows a + b*n and to one that saw one size only. `slack` is the time of
    each burst, as a multiple of what one batch of it takes."""
    a = knee * b

    def served(sizes: list[int]) -> tuple[int, int]:
        """(rows of the first batch of the last burst, rows that were dropped)."""
        scheduler = Scheduler(Adaptive(0.0), max_batch_size=64, max_queue=1000, max_queue_bytes=1000)
        scheduler.prime([(n, a + b * n) for n in sizes for _ in range(96 // len(sizes))])
        now, dropped = 0.0, 0
        for slot in range(slots):
            scheduler.slot_up(slot, now)
        for burst in range(5):
            until_s = {} if slack is None else {"deadline_s": now + slack * (a + b * rows)}
            for k in range(rows):
                scheduler.offer(Entry(id=burst * rows + k, arrival_s=now, **until_s), now)
            first = 0
            while scheduler.queued_rows or not first:
                events = scheduler.poll(now)
                sent = [event for event in events if isinstance(event, Dispatch)]
                dropped += len(events) - len(sent)
                if not sent:
                    break
                first = first or len(sent[0].entries)
                for batch in sent:
                    taken_s = a + b * len(batch.entries)
                    scheduler.complete(batch.batch_id, Outcome("ok", run_s=taken_s), now + taken_s)
                now += max(a + b * len(batch.entries) for batch in sent)
            now += 10 * (a + 64 * b)
        return first, dropped

    (known, lost), (constant, also_lost) = served([1, 4, 16, 64]), served([seen])
    assert constant >= known
    assert also_lost <= lost


long_requests = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(0, 2), st.none() | st.floats(0.1, 5.0)), min_size=1, max_size=30
)
"""For each request, in run times: how long after the one before it arrives, its class, and how long it may wait."""


@settings(max_examples=300, deadline=None)
@given(
    long_requests,
    st.floats(0.05, 100.0),
    st.floats(1250.0, 1e5),  # a run is long from 200 leads on, also the shortest one
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=8),
    st.booleans(),
)
def test_behind_long_runs_a_request_that_has_not_started_expires_and_can_be_overtaken(
    requests: list[tuple[float, int, float | None]], run_s: float, leads: float, lengths: list[float], known: bool
) -> None:
    """One slot that could hold more batches. A run takes `run_s` times one of `lengths`, and the lead is 1/`leads`."""
    scheduler = Scheduler(
        Fixed(0.0), max_batch_size=1, max_queue=100, max_queue_bytes=1, depth=8, priority=(0.0, 7.0, 9.0), horizon_s=1e6
    )
    scheduler.slot_up(0, 0.0)
    if known:
        scheduler.prime([(1, run_s)] * 12)
    now, waiting, running, ran, ended = 0.0, [], None, 0, 0
    arrivals = [Entry(0)]
    for id, (gap, priority, wait) in enumerate(requests, 1):
        at = arrivals[-1].arrival_s + gap * run_s
        expires_s = INF if wait is None else at + wait * run_s
        arrivals.append(Entry(id, arrival_s=at, priority=priority, expires_s=expires_s))
    left = len(arrivals)
    while ended < left:
        due = [arrivals[0].arrival_s] if arrivals else []
        due += [running[1]] if running else []
        due += [] if scheduler.wake_at is None else [scheduler.wake_at]
        now = max(now, min(due))
        while arrivals and arrivals[0].arrival_s <= now:
            waiting.append(arrivals.pop(0))
            scheduler.offer(waiting[-1], now)
        if running and running[1] <= now:
            scheduler.complete(running[0], Outcome(run_s=running[2]), now)
            running, ended = None, ended + 1
        for event in scheduler.poll(now):
            if not isinstance(event, Dispatch):
                expired = next(e for e in waiting if e.id == event.id)
                assert expired.expires_s <= now
                waiting.remove(expired)
                ended += 1
                continue
            (entry,) = event.entries
            assert running is None
            assert entry.expires_s > now
            assert entry is min(waiting, key=lambda e: (e.vdeadline_s, e.seq))
            waiting.remove(entry)
            takes_s = run_s * (lengths[ran % len(lengths)] if ran else 1.0)
            running, ran = (event.batch_id, now + takes_s + run_s / leads, takes_s), ran + 1


samples = st.tuples(
    st.integers(min_value=-2, max_value=10**6),
    st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(min_value=0, max_value=100)),
)


@settings(max_examples=300, deadline=None)
@example([(1, 0.0), (1, 0.0), (1, 8.98846567431158e307)])
@given(st.lists(samples, max_size=60))
def test_the_cost_model_is_increasing_whatever_the_samples(data: list[tuple[int, float]]) -> None:
    cost = Cost()
    for rows, seconds in data:
        cost.add(rows, seconds)
        assert cost.a >= 0 < cost.b, INVARIANTS["I15"]
        assert 1 <= cost.ratio <= 2
        assert cost.t(1) <= cost.t(2) <= cost.t(64)
        assert not cost.fitted or cost.t(1) < cost.t(2) < cost.t(64)  # else constant from the mean size on


# ---- requests that kill their worker

crowds = st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 8)), min_size=1, max_size=30)
"""For each request: rows, whether they are separate, and the row that kills (none if there is no such row)."""


@settings(max_examples=300, deadline=None)
@given(crowds, st.integers(1, 3), st.sampled_from((1, 1, 8)), st.integers(1, 16), st.integers(1, 3))
def test_a_killer_fails_alone_and_every_other_item_is_answered_once(
    crowd: list[tuple[int, bool, int]], slots: int, concurrency: int, max_batch_size: int, depth: int
) -> None:
    scheduler = Scheduler(
        Fixed(0.0), max_batch_size=max_batch_size, max_queue=10**6, max_queue_bytes=10**6, depth=depth
    )
    for slot in range(slots):
        scheduler.slot_up(slot, 0.0, concurrency)
    for id, (rows, separate, _) in enumerate(crowd):
        scheduler.offer(Entry(id, rows=rows, separate=separate), 0.0)
    killers = {(id, bad) for id, (rows, _, bad) in enumerate(crowd) if bad < rows}
    answers: list[tuple[int, int]] = []
    failed: list[int] = []
    on_slot: dict[int, list[Dispatch]] = {slot: [] for slot in range(slots)}
    deaths = 0
    for now in range(1000):
        for event in scheduler.poll(float(now)):
            if isinstance(event, Dispatch):
                on_slot[event.slot].append(event)
            else:
                failed.append(event.id)
        slot = next((slot for slot, batches in on_slot.items() if batches), None)
        if slot is None:
            break
        batch = on_slot[slot][0]
        inside = [(e.id, row) for e in batch.entries for row in range(e.start, e.start + e.rows)]
        if killers.isdisjoint(inside):
            scheduler.complete(on_slot[slot].pop(0).batch_id, Outcome(), float(now))
            answers += inside
            continue
        deaths += 1
        batches, on_slot[slot] = on_slot[slot], []
        for lost in batches:
            died = lost is batch or concurrency > 1
            scheduler.complete(lost.batch_id, Outcome("died" if died else "lost"), float(now))
            answers += [(e.id, e.start) for e in lost.entries if e.state == EntryState.DONE]
        scheduler.slot_down(slot, float(now))
        scheduler.slot_up(slot, float(now), concurrency)
    assert not scheduler.queued, "a request was forgotten"
    assert sorted(failed) == sorted({id for id, _ in killers if not crowd[id][1]})
    expected = {(id, row) for id, (rows, _, _) in enumerate(crowd) for row in range(rows) if id not in failed}
    assert expected <= set(answers)
    assert len(answers) == len(set(answers))
    assert deaths <= 3 * len(killers)


# ---- what is broken is caught


class HoldsForEver(Adaptive):
    def select(self, view: View, now: float) -> Choice:
        return WaitUntil(now + 1000.0) if view.idle else None


class WaitsForNothing(Fixed):
    def select(self, view: View, now: float) -> Choice:
        return None


class DropsTheYoung(Adaptive):
    def select(self, view: View, now: float) -> Choice:
        return Drop(view.bucket.entries[-1:], "expired") if len(view.bucket.entries) > 3 else super().select(view, now)


class SendsTheLate(Adaptive):
    def select(self, view: View, now: float) -> Choice:
        return Take(view.max_rows) if view.idle else None


class HoldsByTheClock(Adaptive):
    """Decides by absolute time."""

    def select(self, view: View, now: float) -> Choice:
        choice = super().select(view, now)
        return Take(1, choice.until_s) if type(choice) is Take and now > 4000 else choice


class HoldsAbsolutely(Fixed):
    """A policy whose delay is not doubled."""

    def __init__(self) -> None:
        super().__init__(0.01)


class TwoOnASlot(Scheduler):
    def poll(self, now: float) -> list[Event]:
        for slot in self._slots._slots.values():
            if len(slot.batches) == 1 and not slot.batches[0].ahead and slot.number not in self._slots.idle:
                self._slots.idle.append(slot.number)
        try:
            return super().poll(now)
        finally:
            self._slots.idle[:] = [n for n in self._slots.idle if not self._slots._slots[n].batches]


class LosesAnItem(Scheduler):
    def poll(self, now: float) -> list[Event]:
        events = super().poll(now)
        for event in events:
            if isinstance(event, Dispatch) and len(event.entries) > 2:
                event.entries.pop()
        return events


class LastInFirstOut(Scheduler):
    def offer(self, entry: Entry, now: float) -> None:
        arrival, entry.arrival_s = entry.arrival_s, -entry.arrival_s
        super().offer(entry, now)
        entry.arrival_s = arrival


class ForgetsTheTimer(Scheduler):
    def poll(self, now: float) -> list[Event]:
        events = super().poll(now)
        self.wake_at = None
        return events


class TellsTwice(Scheduler):
    def poll(self, now: float) -> list[Event]:
        events = super().poll(now)
        return events + [e for e in events if not isinstance(e, Dispatch)]


def caught(make: Callable[[], BatchPolicy], scheduler: type[Scheduler]) -> Iterator[str]:
    """The invariants that each random script finds broken."""

    class Broken(PolicyChecker):
        scheduler_class = scheduler

    for k in range(60):
        try:
            Broken(random_setup(Random(f"broken/{k}")), make).play()
        except Violation as e:
            yield e.name
        except (AssertionError, ValueError, KeyError):  # the scheduler noticed it itself
            yield "scheduler"


@pytest.mark.parametrize(
    ("make", "scheduler", "name"),
    [
        (HoldsForEver, Scheduler, "I5"),
        (HoldsForEver, Scheduler, "I7"),
        (WaitsForNothing, Scheduler, "I11"),
        (DropsTheYoung, Scheduler, "I8"),
        (SendsTheLate, Scheduler, "I8"),
        (lambda: Fixed(0.0), TwoOnASlot, "I2"),
        (Adaptive, LosesAnItem, "I1"),
        (Adaptive, LastInFirstOut, "I9"),
        (lambda: Fixed(0.01), ForgetsTheTimer, "I11"),
        (Adaptive, TellsTwice, "I1"),
    ],
)
def test_a_broken_policy_or_scheduler_is_caught(
    make: Callable[[], BatchPolicy], scheduler: type[Scheduler], name: str
) -> None:
    assert name in caught(make, scheduler)


def test_a_policy_that_reads_absolute_time_is_caught() -> None:
    setup = ScriptSetup(slots=1, steps=tuple(ScriptStep("offer", 1) for _ in range(20)))
    with pytest.raises(Violation, match="I13"):
        check_invariance(setup, HoldsByTheClock)


def test_a_policy_with_a_time_of_its_own_is_caught_when_time_is_stretched() -> None:
    setup = ScriptSetup(slots=1, steps=tuple(ScriptStep("offer", 1) for _ in range(3)))
    with pytest.raises(Violation, match="I14"):
        check_invariance(setup, HoldsAbsolutely)
