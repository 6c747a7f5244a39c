"""Linger: an idle slot of a pipeline's node waits for what is coming, and starts no more than there is credit for."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.batching.cost import Cost
from penstock.core.batching.entry import INF, Dispatch, Entry, Expire, Outcome
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import Choice, Take, View
from penstock.core.batching.queues import Bucket
from penstock.core.batching.scheduler import Scheduler
from penstock.pipeline.linger import Linger


class TransportHarness:
    """A scheduler with a node's policy; what comes and what there is room for are the test's."""

    def __init__(self, *, wait_s: float = 0.01, slice_s: float | None = None, slots: int = 1, most: int = 4) -> None:
        self.coming: tuple[float, int] = (INF, 0)
        self.credit = 100
        policy = Linger(
            Adaptive(0.0), wait_s=wait_s, coming=lambda now: self.coming, credit=lambda: self.credit, slice_s=slice_s
        )
        self.scheduler = Scheduler(policy, max_batch_size=most, max_queue=1000, max_queue_bytes=10**9)
        for slot in range(slots):
            self.scheduler.slot_up(slot, 0.0)
        self._ids = iter(range(1, 10**6))

    def offer(self, n: int, now: float, **keys: Any) -> None:
        for _ in range(n):
            self.scheduler.offer(Entry(next(self._ids), arrival_s=now, expires_s=now + 30.0, **keys), now)

    def poll(self, now: float) -> list[int]:
        """Rows of the batches that are sent now."""
        self.events = self.scheduler.poll(now)
        self.sent = [e for e in self.events if isinstance(e, Dispatch)]
        return [e.rows for e in self.sent]

    def learn(self, set_up_s: float, row_s: float, now: float = 0.0) -> float:
        """Runs batches until their cost is known; the time after them."""
        coming, self.coming = self.coming, (INF, 0)
        for i in range(24):
            self.offer(1 + i % 4, now)
            for event in [e for e in self.scheduler.poll(now) if isinstance(e, Dispatch)]:
                now += set_up_s + row_s * event.rows
                self.scheduler.complete(event.batch_id, Outcome("ok", set_up_s), now)
        while self.poll(now):
            now += set_up_s + row_s * self.sent[0].rows
            self.scheduler.complete(self.sent[0].batch_id, Outcome("ok", set_up_s), now)
        self.coming = coming
        return now


NOTHING = (INF, 0)


@pytest.mark.parametrize(
    ("rows", "coming", "cost", "sent"),
    [
        (1, NOTHING, None, [1]),
        (1, (0.005, 1), None, []),
        (4, (0.005, 1), None, [4]),  # a full batch
        (1, (0.02, 1), None, [1]),  # too late
        (1, (0.005, 1), (0.008, 0.001), []),
        (1, (0.005, 1), (0.002, 0.001), [1]),  # waiting costs more than the set-up that it saves
        (3, (0.005, 100), (0.008, 0.001), [3]),  # one more fits: 8 ms that three would wait 5 ms for
        (1, (0.001, 1), (0.0, 0.003), [1]),  # nothing to save
    ],
)
def test_a_batch_is_held_only_for_requests_that_are_coming_and_save_more_than_they_cost(
    rows: int, coming: tuple[float, int], cost: tuple[float, float] | None, sent: list[int]
) -> None:
    harness = TransportHarness()
    now = 0.0 if cost is None else harness.learn(*cost)
    harness.coming = (now + coming[0], coming[1])
    harness.offer(rows, now)
    assert harness.poll(now) == sent


def test_a_batch_waits_for_expected_requests_within_its_limit() -> None:
    harness = TransportHarness()
    harness.coming = (0.005, 1)
    harness.offer(1, 0.0)
    assert harness.poll(0.0) == []
    assert harness.scheduler.wake_at == 0.01
    assert harness.poll(0.009) == []
    assert harness.poll(0.01) == [1]


@pytest.mark.parametrize(("ahead_s", "answer"), [(0.001, type(None)), (0.01, Take)])
def test_behind_a_running_batch_the_wait_ends_when_that_does(ahead_s: float, answer: type) -> None:
    class Takes(Adaptive):
        def select(self, view: View, now: float) -> Choice:
            return Take(view.bucket.rows, full=True)

    bucket = Bucket("")
    bucket.push(Entry(1, arrival_s=0.0, expires_s=30.0))
    policy = Linger(Takes(0.0), wait_s=0.01, coming=lambda now: (0.005, 1), credit=lambda: 100)
    view = View(bucket, Cost(), slots=1, max_rows=4, ahead=True, ahead_s=ahead_s)
    choice = policy.select(view, 0.0)
    assert type(choice) is answer
    assert not isinstance(choice, Take) or not choice.full, "another slot may be idle sooner"


def test_a_hold_ends_before_the_deadline_of_the_head() -> None:
    harness = TransportHarness()
    harness.coming = (0.005, 1)
    harness.offer(1, 0.0, deadline_s=0.006)
    assert harness.poll(0.0) == []
    assert harness.scheduler.wake_at == 0.006


def test_no_more_starts_than_there_is_credit_for() -> None:
    harness = TransportHarness(wait_s=0.0)
    harness.offer(6, 0.0)
    harness.credit = 0
    assert harness.poll(0.0) == []
    assert harness.scheduler.wake_at == 30.0  # nobody polls: whoever gives credit asks for a turn
    harness.credit = 3
    assert harness.poll(1.0) == [3]


def test_requests_that_expire_during_backpressure_are_reported() -> None:
    harness = TransportHarness(wait_s=0.0)
    harness.credit = 0
    harness.offer(1, 0.0, deadline_s=0.5)
    assert harness.poll(0.1) == []
    assert harness.scheduler.wake_at == 0.5
    harness.poll(0.5)
    assert [type(e) for e in harness.events] == [Expire]


def test_a_slice_of_slow_items_is_small_and_of_brief_ones_large() -> None:
    for row_s, rows in ((0.003, 1), (0.00024, 4), (0.00001, 32)):
        harness = TransportHarness(wait_s=0.0, slice_s=0.001, most=32)
        now = harness.learn(0.0, row_s)
        harness.offer(64, now)
        assert harness.poll(now)[:1] == [rows]


def test_a_slow_hand_over_of_single_rows_makes_no_slice_smaller() -> None:
    harness, now = TransportHarness(wait_s=0.0, slice_s=0.005, most=32), 0.0
    for _ in range(20):
        harness.offer(1, now)
        assert harness.poll(now) == [1]
        now += 0.006
        harness.scheduler.complete(harness.sent[0].batch_id, Outcome("ok", 0.001), now)
    harness.offer(8, now)
    assert harness.poll(now) == [5], "a row runs for 1 ms"


@pytest.mark.parametrize(("slots", "rows", "sent"), [(1, 32, [4]), (4, 8, [2, 2, 2, 2])])
def test_without_a_known_cost_slices_are_small_and_shared_among_idle_slots(
    slots: int, rows: int, sent: list[int]
) -> None:
    harness = TransportHarness(wait_s=0.0, slice_s=0.001, slots=slots, most=32)
    harness.offer(rows, 0.0)
    assert harness.poll(0.0) == sent


def test_work_shorter_than_a_hand_over_is_not_shared() -> None:
    harness = TransportHarness(wait_s=0.0, slice_s=0.001, most=32)
    now = harness.learn(0.0002, 0.000002)
    for slot in range(1, 4):
        harness.scheduler.slot_up(slot, now)
    harness.offer(8, now)
    assert harness.poll(now) == [8]


def test_statistics_count_decisions() -> None:
    harness = TransportHarness()
    harness.coming = (0.005, 1)
    harness.offer(1, 0.0)
    harness.poll(0.0)
    told = harness.scheduler.explain()
    assert (told["policy"], told["wait_s"], told["lingered"]) == ("linger", 0.01, 1)


def test_a_scheduler_reports_the_end_of_the_next_batch() -> None:
    harness = TransportHarness(wait_s=0.0)
    assert harness.scheduler.next_end() == (INF, 0)
    assert harness.scheduler.seconds(3) == 0.0
    now = harness.learn(0.004, 0.001)
    harness.offer(2, now)
    assert harness.poll(now) == [2]
    end_s, rows = harness.scheduler.next_end()
    assert (round(end_s - now, 4), rows) == (0.006, 2)
    assert round(harness.scheduler.seconds(2), 4) == 0.006


def test_the_wait_for_a_late_request_is_bounded_by_its_savings() -> None:
    harness = TransportHarness(wait_s=1.0)
    now = harness.learn(0.008, 0.001)
    harness.coming = (now + 0.002, 1)
    harness.offer(1, now)
    assert harness.poll(now) == []
    harness.coming = (now + 0.005, 1)  # it did not come
    assert harness.poll(now + 0.004) == []
    assert harness.scheduler.wake_at == pytest.approx(now + 0.008, abs=1e-4)
    assert harness.poll(now + 0.0081) == [1]
