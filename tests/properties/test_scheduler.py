"""Every policy keeps the invariants of `testing/policies.py` in random scripts, and broken policies are detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import Dispatch, Entry, Event
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy, Choice, Drop, Take, View, WaitUntil
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.policies.none import Unbatched
from penstock.core.batching.scheduler import Scheduler
from penstock.testing.policies import INVARIANTS, PolicyChecker, Violation, check_invariance, check_policy
from penstock.testing.scripts import ScriptSetup, ScriptStep, random_setup

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
        assert cost.t(1) < cost.t(2) < cost.t(64)


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
