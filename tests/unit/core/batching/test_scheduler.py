from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from penstock.core.batching.entry import Expire, Fail, Shed
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import WaitUntil
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.scheduler import CEILING_S, Scheduler
from penstock.errors import BadRequest, PayloadTooLarge, QueueFull

Make = Callable[..., Any]


# ---- bounds


def test_a_full_queue_refuses_at_once_with_retry_after(bench: Make) -> None:
    b = bench(max_queue=3, slots=1)
    b.prime(1.0, 0.5)
    b.offer(1, 2, rows=1)
    with pytest.raises(QueueFull, match="2 of 3 rows") as e:
        b.offer(3, rows=2)
    assert e.value.retry_after_s == pytest.approx(2 / 4 * 3.0)
    assert b.scheduler.queued == 2


def test_rows_are_counted_not_requests(bench: Make) -> None:
    b = bench(max_queue=6)
    b.offer(1, rows=3)
    b.offer(2, rows=3)
    assert (b.scheduler.queued, b.scheduler.queued_rows) == (2, 6)
    with pytest.raises(QueueFull):
        b.offer(3)


def test_bytes_are_bounded_and_given_back_when_a_request_leaves(bench: Make) -> None:
    b = bench(max_queue_bytes=100, max_batch_size=1)
    b.offer(1, 2, nbytes=50)
    with pytest.raises(QueueFull, match="100 of 100 bytes"):
        b.offer(3, nbytes=1)
    assert b.poll() == [[1]]
    assert b.scheduler.queued_bytes == 50
    b.offer(3, nbytes=50)


def test_bulk_requests_leave_room_in_the_queue_for_urgent_ones(bench: Make) -> None:
    b = bench(max_queue=16, max_queue_bytes=160, slots=0)
    b.offer(1, rows=14, priority=1)
    with pytest.raises(QueueFull, match="14 of 14 rows"):
        b.offer(2, priority=1)
    b.offer(3, rows=2)
    with pytest.raises(BadRequest, match=r"15 rows.*\(14\)"):
        bench(max_queue=16).offer(1, rows=15, priority=2)
    b = bench(max_queue_bytes=160, slots=0)
    b.offer(1, nbytes=130, priority=1)
    with pytest.raises(QueueFull, match="of 140 bytes"):
        b.offer(2, nbytes=11, priority=1)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"rows": 0}, BadRequest, "0 rows"),
        ({"rows": 101}, BadRequest, "in pieces"),
        ({"nbytes": 1001}, PayloadTooLarge, "1001 bytes"),
    ],
)
def test_a_request_larger_than_the_queue_is_a_bad_request(
    bench: Make, fields: dict[str, int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        bench().offer(1, **fields)


# ---- order


def test_a_batch_keeps_filling_until_a_slot_is_idle(bench: Make) -> None:
    b = bench()
    b.offer(1)
    assert b.poll() == [[1]]
    b.offer(2, 3, 4, 5, 6)
    assert b.poll() == []
    b.complete(1)
    assert b.poll() == [[2, 3, 4, 5]]


def test_an_earlier_deadline_goes_first_and_equals_keep_their_order(bench: Make) -> None:
    b = bench(max_batch_size=2)
    b.offer(1, 2)
    b.offer(3, deadline_s=b.now + 5)
    b.offer(4, deadline_s=b.now + 5)
    assert b.poll() == [[3, 4]]
    b.complete(1)
    assert b.poll() == [[1, 2]]


def test_a_lower_class_may_wait_its_extra_budget_longer_but_is_not_starved(bench: Make) -> None:
    b = bench(max_batch_size=1, priority=(0.0, 1.0))
    b.offer(1, priority=1)
    b.now += 0.5
    b.offer(2, priority=0)
    b.now += 0.6
    b.offer(3, priority=0)
    order = []
    for batch in (1, 2, 3):
        order += b.poll()
        b.complete(batch)
    assert order == [[2], [1], [3]]


def test_a_class_beyond_the_last_has_the_budget_of_the_last(bench: Make) -> None:
    b = bench(max_batch_size=1, priority=(0.0, 1.0))
    b.offer(1, priority=7)
    b.offer(2, priority=1)
    assert b.poll() == [[1]]


def test_a_batch_has_one_bucket_and_the_oldest_head_is_served(bench: Make) -> None:
    b = bench()
    b.offer(1, bucket="x")
    b.now += 1
    b.offer(2, 3, 4, 5, bucket="y")
    b.offer(6, bucket="x")
    assert b.poll() == [[1, 6]]
    b.complete(1)
    assert b.poll() == [[2, 3, 4, 5]]


def test_a_misfit_is_skipped_and_heads_the_next_batch(bench: Make) -> None:
    b = bench()
    for id, rows in ((1, 3), (2, 2), (3, 1)):
        b.offer(id, rows=rows)
    assert b.poll() == [[1, 3]]
    b.complete(1)
    assert b.poll() == [[2]]


def test_an_entry_is_passed_over_at_most_eight_times(bench: Make) -> None:
    b = bench(max_queue=1000)
    b.offer(1, rows=4)
    b.poll()
    b.offer(2, rows=2)  # never fits behind an urgent head of three rows
    passed = 0
    for k in range(12):
        b.offer(100 + k, rows=3, deadline_s=b.now + 20)
        b.offer(200 + k, rows=1)
        b.complete(1 + k)
        passed += int(any(i >= 200 for batch in b.poll() for i in batch))
    assert passed == 8


# ---- time


def test_a_request_that_exceeds_its_timeout_is_expired(bench: Make) -> None:
    b = bench(slots=0)
    b.offer(1, expires_s=b.now + 2)
    b.poll()
    assert b.scheduler.wake_at == b.now + 2
    assert b.poll(2.0) == []
    assert b.told == [Expire(1, "timeout")]
    assert b.scheduler.wake_at is None
    assert (b.scheduler.queued, b.scheduler.queued_rows) == (0, 0)


def test_a_passed_deadline_is_never_run_even_when_it_passed_before_the_offer(bench: Make) -> None:
    b = bench()
    b.offer(1, deadline_s=b.now - 1)
    assert b.poll() == []
    assert b.told == [Expire(1, "expired")]


def test_a_timeout_shorter_than_older_ones_is_kept(bench: Make) -> None:
    b = bench(slots=0)
    b.offer(1, expires_s=b.now + 30)
    b.offer(2, expires_s=b.now + 1)
    b.poll()
    assert b.scheduler.wake_at == b.now + 1
    b.poll(1.0)
    assert b.told == [Expire(2, "timeout")]


def test_a_long_lived_head_does_not_keep_deadlines_of_removed_entries(bench: Make) -> None:
    b = bench(max_batch_size=1, max_queue=10_000)
    b.offer(1, priority=0, bucket="slow", deadline_s=b.now + 1000)  # ordered behind all others, which are served
    for k in range(5000):
        b.offer(10 + k, expires_s=b.now + 2000 + k)
        b.poll()
        b.complete(k + 1)
    assert len(b.scheduler._queue.expiries._line) < 2000


# ---- cancel


def test_a_cancelled_request_is_gone_without_an_event(bench: Make) -> None:
    b = bench()
    b.offer(1, 2, nbytes=10)
    assert b.scheduler.cancel(1, b.now) is True
    assert (b.scheduler.queued, b.scheduler.queued_bytes) == (1, 10)
    assert b.poll() == [[2]]
    assert b.told == []


def test_a_running_or_unknown_request_cannot_be_cancelled(bench: Make) -> None:
    b = bench()
    b.offer(1)
    b.poll()
    assert b.scheduler.cancel(1, b.now) is False
    assert b.scheduler.cancel(99, b.now) is False


# ---- split


def test_a_request_larger_than_the_batch_runs_in_parts_and_ends_once(bench: Make) -> None:
    b = bench(slots=2)
    b.offer(1, rows=10)
    assert b.poll() == [[1], [1]]
    assert [(e.start, e.rows, e.parent.id) for d in b.sent for e in d.entries] == [(0, 4, 1), (4, 4, 1)]
    assert b.scheduler.queued == 1
    assert b.complete(2) == []
    assert b.poll() == [[1]]
    assert b.scheduler.queued == 0
    assert b.complete(1) == []
    assert b.complete(3) == [1]


def test_a_failed_part_purges_queued_parts_and_ends_the_request(bench: Make) -> None:
    b = bench(slots=2)
    b.offer(1, rows=12)
    b.poll()
    assert b.complete(1, failed=frozenset({1})) == []
    assert b.scheduler.queued_rows == 0
    assert b.complete(2) == [1]
    assert b.poll() == []


def test_a_split_request_that_runs_in_part_ends_after_a_cancel_when_the_part_is_back(bench: Make) -> None:
    b = bench()
    b.offer(1, rows=8)
    b.poll()
    assert b.scheduler.cancel(1, b.now) is False
    assert b.scheduler.queued == 0
    assert b.complete(1) == [1]


def test_an_expired_split_request_ends_with_its_running_part(bench: Make) -> None:
    b = bench()
    b.offer(1, rows=8, expires_s=b.now + 1)
    b.poll()
    b.poll(1.0)
    assert b.told == []
    assert b.complete(1) == []
    b.poll()
    assert b.told == [Expire(1, "timeout")]


def test_a_lower_ceiling_splits_queued_requests(bench: Make) -> None:
    b = bench()
    b.offer(1)
    b.poll()
    b.offer(2, rows=4)
    b.complete(1, oom=(4, 3))
    assert b.poll() == [[2]]
    assert b.sent[0].rows == 3
    b.complete(2)
    assert b.poll() == [[2]]
    assert b.complete(3) == [2]


# ---- death


def test_a_batch_that_killed_its_worker_is_retried_in_pieces_on_other_slots(bench: Make) -> None:
    b = bench(slots=3)
    b.offer(1, 2, 3, 4)
    b.poll()
    assert b.sent[0].slot == 0
    b.offer(5)
    b.complete(1, "died")
    b.scheduler.slot_down(0, b.now)
    b.scheduler.slot_up(0, b.now)
    assert b.poll() == [[1, 2], [5], [3, 4]]  # while others wait, one slot at a time is at risk
    assert [d.slot for d in b.sent] == [1, 0, 2]
    assert [d.reason for d in b.sent][::2] == ["rerun", "rerun"]


def test_requests_that_were_in_a_death_leave_the_last_slot_to_others_for_a_while(bench: Make) -> None:
    b = bench(slots=2, max_batch_size=1)
    b.offer(1, 2, 3, 4, 5)
    assert b.poll() == [[1], [2]]
    b.complete(1, "died")
    b.scheduler.slot_down(0, b.now)
    b.complete(2)
    assert b.poll() == [[3]]
    b.complete(3)
    assert b.poll(3.7) == [[4]]  # an eighth of horizon_s
    b.complete(4)
    assert b.poll(0.2) == [[1]]
    b.scheduler.slot_up(0, b.now)
    assert b.poll() == [[5]]


def test_after_a_killer_what_was_in_a_death_waits_for_the_slot_that_died_and_spares_the_others(bench: Make) -> None:
    b = bench(slots=3, max_batch_size=1)

    def die(batch: int, slot: int) -> None:
        b.complete(batch, "died")
        b.scheduler.slot_down(slot, b.now)

    b.offer(1)
    assert b.poll() == [[1]]
    die(1, 0)
    assert b.poll() == [[1]]
    die(2, 1)  # the killer
    b.offer(2)
    assert b.poll() == [[2]]
    assert b.told == [Fail(1, "worker_died")]
    die(3, 2)
    b.scheduler.slot_up(0, b.now)
    b.scheduler.slot_up(1, b.now)
    assert b.poll() == []
    assert b.scheduler.wake_at == pytest.approx(b.now + 7.5)  # a quarter of horizon_s
    b.offer(3)
    assert b.poll() == [[3]]
    assert b.sent[0].slot == 0
    b.scheduler.slot_up(2, b.now)
    assert b.poll(1.0) == [[2]]
    assert b.sent[0].slot == 2
    die(5, 2)
    b.offer(4)
    assert b.poll() == [[4]]
    die(6, 1)
    b.complete(4)
    assert b.poll(7.4) == []
    assert b.poll(0.2) == [[4]]  # its slot is down for too long
    b.complete(7)
    b.offer(5)
    assert b.poll(60.0) == [[5]]  # the next death is nobody's work
    die(8, 0)
    b.scheduler.slot_up(1, b.now)
    assert b.poll() == [[5]]
    assert b.sent[0].slot == 1


def test_a_part_of_a_request_that_nobody_wants_is_no_killer(bench: Make) -> None:
    b = bench(slots=2, max_batch_size=2)
    b.offer(1, rows=6, divisible=True)
    assert b.poll() == [[1], [1]]
    assert not b.scheduler.cancel(1, b.now)
    b.complete(1, "died")
    assert not b.scheduler.killers(b.now)


def test_a_piece_that_kills_its_worker_is_retried_item_by_item(bench: Make) -> None:
    b = bench(slots=1, max_batch_size=8)
    b.offer(*range(8))
    order, told = [], []
    for batch in range(1, 8):
        order += b.poll()
        told += b.told
        b.complete(batch, "died" if 3 in order[-1] else "ok")
        b.scheduler.slot_up(0, b.now)
    assert order == [list(range(8)), [0, 1], [2, 3], [2], [3], [4, 5], [6, 7]]
    assert told == [Fail(3, "worker_died")]


def test_rows_that_are_separate_items_run_alone_after_a_death_and_the_killer_counts_as_answered(bench: Make) -> None:
    b = bench(slots=1)
    b.offer(1, rows=3, separate=True)
    b.poll()
    b.complete(1, "died")
    starts, ended = [], []
    for batch in range(2, 6):
        b.scheduler.slot_up(0, b.now)
        b.poll()
        (part,) = b.sent[0].entries
        starts.append(part.start)
        ended.append(b.complete(batch, "died" if part.start == 1 else "ok"))
        if len(ended) == 3:
            break
    assert (starts, ended) == ([0, 1, 2], [[], [], [1]])
    assert b.poll() == []
    assert b.told == []


def test_an_item_in_two_deaths_fails(bench: Make) -> None:
    b = bench(slots=2)
    b.offer(1)
    b.poll()
    b.complete(1, "died")
    assert b.poll() == [[1]]
    b.complete(2, "died")
    assert b.poll() == []
    assert b.told == [Fail(1, "worker_died")]


def test_without_idempotence_a_death_fails_at_once(bench: Make) -> None:
    b = bench(slots=2, idempotent=False)
    b.offer(1, 2)
    b.poll()
    b.complete(1, "died")
    assert b.poll() == []
    assert b.told == [Fail(1, "worker_died"), Fail(2, "worker_died")]


def test_a_batch_lost_behind_another_is_requeued_in_front_without_blame(bench: Make) -> None:
    b = bench(depth=2, max_batch_size=2)
    b.offer(1, 2, 3, 4, 5)
    assert b.poll() == [[1, 2], [3, 4]]
    b.complete(1, "died")
    b.complete(2, "lost")
    b.scheduler.slot_down(0, b.now)
    b.scheduler.slot_up(0, b.now)
    order = b.poll()
    for batch in range(3, 8):
        if b.scheduler.running:
            b.complete(batch)
        order += b.poll()
    assert order == [[1], [2], [3, 4], [5]]


def test_nothing_is_sent_to_a_slot_between_a_death_and_its_return(bench: Make) -> None:
    b = bench()
    b.offer(1)
    b.poll()
    b.complete(1, "died")
    assert b.poll() == []
    b.scheduler.slot_down(0, b.now)
    assert b.poll() == []
    b.scheduler.slot_up(0, b.now)
    assert b.poll() == [[1]]


def test_a_part_that_dies_twice_fails_its_request_once(bench: Make) -> None:
    b = bench(slots=1)
    b.offer(1, rows=8)
    for batch in (1, 2):
        b.poll()
        b.complete(batch, "died")
        b.scheduler.slot_up(0, b.now)
    assert b.poll() == []
    assert b.told == [Fail(1, "worker_died")]
    assert b.scheduler.queued_rows == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda b: b.complete(77), "exactly once"),
        (lambda b: b.scheduler.slot_down(0, b.now), "complete them first"),
        (lambda b: b.scheduler.slot_up(0, b.now), "complete them first"),
    ],
)
def test_a_wrong_order_of_calls_raises(bench: Make, wrong: Callable[[Any], object], words: str) -> None:
    b = bench()
    b.offer(1)
    b.poll()
    with pytest.raises(ValueError, match=words):
        wrong(b)


# ---- out of memory


@pytest.mark.parametrize(("oom", "ceiling"), [((4, 2), 3), ((10, 8), 8), ((2, 0), 1), ((1, 0), 1)])
def test_out_of_memory_lowers_the_ceiling(bench: Make, oom: tuple[int, int], ceiling: int) -> None:
    b = bench(max_batch_size=10)
    b.offer(1)
    b.poll()
    b.complete(1, oom=oom)
    assert b.scheduler.explain()["ceiling"] == ceiling
    assert b.scheduler.max_batch_size == 10


def test_the_ceiling_never_grows_until_it_is_forgotten(bench: Make) -> None:
    b = bench(max_batch_size=10)
    for batch, oom in ((1, (4, 4)), (2, (10, 9))):
        b.offer(batch)
        b.poll()
        b.complete(batch, oom=oom)
    assert b.scheduler.explain()["ceiling"] == 4
    b.offer(*range(10, 20))
    assert b.poll() == [[10, 11, 12, 13]]
    b.complete(3)
    b.offer(*range(20, 24))
    assert b.poll(CEILING_S) == [list(range(14, 24))]
    assert b.scheduler.explain()["ceiling"] is None


# ---- ahead


def test_a_full_batch_is_sent_ahead_to_the_slot_that_ends_first(bench: Make) -> None:
    b = bench(Fixed(0.0), slots=2, depth=2)
    b.prime(1.0, 1.0)
    b.offer(1, 2, 3)
    b.poll()
    b.offer(4)
    b.poll(0.1)
    b.offer(5, 6, 7)
    assert b.poll(0.1) == []  # not full
    b.offer(8)
    assert b.poll() == [[5, 6, 7, 8]]
    assert (b.sent[0].slot, b.sent[0].ahead) == (1, True)
    b.offer(9, 10, 11, 12)
    assert b.poll() == [[9, 10, 11, 12]]
    assert b.sent[0].slot == 0
    b.offer(13, 14, 15, 16)
    assert b.poll() == []  # two batches a slot, no more


@pytest.mark.parametrize(("takes_s", "sent"), [(0.0001, 8), (0.0004, 3), (0.01, 2), (1.0, 2)])
def test_more_than_one_full_batch_is_sent_ahead_only_behind_a_millisecond_of_work(
    bench: Make, takes_s: float, sent: int
) -> None:
    b = bench(depth=8, max_batch_size=1)
    b.prime(0.0, takes_s)
    b.offer(*range(20))
    assert b.poll() == [[id] for id in range(sent)]
    assert [d.ahead for d in b.sent] == [False] + [True] * (sent - 1)


def test_nothing_more_is_sent_behind_a_batch_that_is_late(bench: Make) -> None:
    b = bench(depth=8, max_batch_size=1)
    b.prime(0.0, 0.0001)
    b.offer(1)
    b.poll()
    b.offer(*range(2, 20))
    assert b.poll(after_s=0.002) == [[2]], "the first may be one that takes an hour"
    assert b.poll(after_s=0.002) == []


def test_brief_batches_that_are_not_full_keep_filling(bench: Make) -> None:
    b = bench(depth=8, max_batch_size=4)
    b.prime(0.0001, 0.0)
    b.offer(100)
    b.poll()
    b.complete(1, after_s=0.0003, run_s=0.0001)  # a hand-over of 0.2 ms: every batch is about to end
    b.offer(*range(4))
    b.poll()
    b.offer(4)
    assert b.poll() == [[4]]
    b.offer(5, 6)
    assert b.poll() == []
    b.offer(7, 8)
    assert b.poll() == [[5, 6, 7, 8]]


def test_a_death_ends_only_the_running_batch_of_several_sent_ahead(bench: Make) -> None:
    b = bench(depth=8, max_batch_size=1, slots=1, idempotent=False)
    b.prime(0.0, 0.0001)
    b.offer(*range(6))
    b.poll()
    for place, dispatch in enumerate(b.sent):
        b.complete(dispatch.batch_id, "lost" if place else "died")
    b.scheduler.slot_down(0, b.now)
    b.scheduler.slot_up(0, b.now)
    assert b.poll() == [[1], [2], [3], [4], [5]]
    assert [e.id for e in b.told] == [0]


def test_any_batch_is_sent_ahead_when_the_running_one_ends_within_the_hand_over(bench: Make) -> None:
    b = bench(Fixed(0.0), depth=2)
    b.prime(1.0, 1.0)
    b.offer(1)
    b.poll()
    b.complete(1, after_s=2.0, run_s=1.5)  # half a second of hand-over
    b.offer(2)
    b.poll()
    b.offer(3)
    assert b.poll() == []
    wake = b.scheduler.wake_at
    assert wake == pytest.approx(b.now + 2.0 - 0.5, abs=0.05)
    assert b.poll(wake - b.now) == [[3]]
    assert b.sent[0].ahead


def test_the_slow_hand_over_of_a_cold_worker_is_not_believed_for_long(bench: Make) -> None:
    b = bench(Fixed(0.0), depth=2)
    b.prime(1.0, 1.0)
    for batch, handover_s in ((1, 150.0), (2, 0.5)):
        b.offer(batch)
        b.poll()
        b.complete(batch, after_s=1.5 + handover_s, run_s=1.5)
    b.offer(3)
    b.poll()
    b.offer(4)
    assert b.poll() == []  # the running one goes on for longer than a hand-over: 4 may still get company


def test_the_time_of_a_batch_sent_ahead_counts_from_the_end_of_the_one_before_it(bench: Make) -> None:
    b = bench(max_batch_size=2, depth=2)
    for k in range(20):
        b.offer(10 * k, 10 * k + 1)
        b.poll()
        if k:
            b.complete(k, after_s=3.0)
    assert b.scheduler.explain()["b_s"] == pytest.approx(1.5, rel=0.05)


def test_a_full_lower_class_batch_is_sent_just_in_time(bench: Make) -> None:
    b = bench(Fixed(0.0), depth=2, priority=(0.0, 10.0))
    b.prime(1.0, 1.0)
    b.offer(0)
    b.poll()
    b.complete(1, after_s=2.9, run_s=2.0, prepare_s=0.7)  # the rest, 0.2 s, is the hand-over
    b.offer(*range(1, 10), priority=1)
    assert b.poll() == [[1, 2, 3, 4]]
    ends = b.now + 5.0
    assert b.scheduler.wake_at == pytest.approx(ends - 0.9, abs=0.1)
    assert b.poll(b.scheduler.wake_at - b.now) == [[5, 6, 7, 8]]
    assert b.sent[0].ahead


def test_until_then_an_urgent_request_takes_its_place(bench: Make) -> None:
    b = bench(Fixed(0.0), depth=2, priority=(0.0, 10.0))
    b.prime(1.0, 1.0)
    b.offer(*range(1, 9), priority=1)
    assert b.poll() == [[1, 2, 3, 4]]
    b.offer(9)
    assert b.poll() == []
    b.complete(1, after_s=5.0)
    assert b.poll() == [[9, 5, 6, 7]]


def test_a_full_batch_of_the_most_urgent_class_is_sent_ahead_at_once(bench: Make) -> None:
    b = bench(Fixed(0.0), depth=2, priority=(0.0, 10.0))
    b.prime(1.0, 1.0)
    b.offer(*range(1, 9), priority=1)
    b.poll()
    b.offer(*range(11, 15))
    assert b.poll() == [[11, 12, 13, 14]]


def test_lower_class_batches_follow_brief_batches_at_once(bench: Make) -> None:
    b = bench(depth=8, priority=(0.0, 10.0))
    b.prime(0.0, 0.00001)
    b.offer(*range(1, 33), priority=1)
    b.poll()
    assert [d.ahead for d in b.sent] == [False] + [True] * 7


# ---- turns


def test_a_second_poll_at_the_same_time_changes_nothing(bench: Make) -> None:
    b = bench(Fixed(1.0))
    b.offer(1)
    assert b.poll() == []
    wake = b.scheduler.wake_at
    assert (b.poll(), b.told, b.scheduler.wake_at) == ([], [], wake)


def test_a_full_bucket_does_not_wait_for_a_held_one(bench: Make) -> None:
    b = bench(Fixed(1.0))
    b.offer(1, bucket="x")
    b.offer(2, 3, 4, 5, bucket="y")
    assert b.poll() == [[2, 3, 4, 5]]


def test_a_policy_must_not_wait_for_now(bench: Make) -> None:
    class Waits(Fixed):
        def select(self, view: Any, now: float) -> Any:
            return WaitUntil(now)

    b = bench(Waits())
    b.offer(1)
    with pytest.raises(AssertionError, match="later time than now"):
        b.poll()


def test_holds_can_be_explained(bench: Make) -> None:
    b = bench(Fixed(1.0))
    b.offer(1)
    b.offer(2, deadline_s=b.now + 0.25)
    b.poll()
    b.poll(0.25)
    b.poll(0.75)
    told = b.scheduler.explain()
    assert (told["holds"], told["held_s"]) == (1, 1.0)


def test_the_policy_sheds_overload_lowest_class_first(bench: Make) -> None:
    b = bench(Adaptive(), max_batch_size=2, horizon_s=10.0, priority=(0.0, 0.0))
    b.prime(1.0, 0.5)  # two rows take 2 s
    b.offer(1, 2)
    b.poll()
    b.offer(3, 4, 5, deadline_s=b.now + 5.5)
    b.offer(6, 7, 8, deadline_s=b.now + 5.5, priority=1)
    b.poll()
    assert b.told == [Shed(6, "overload"), Shed(7, "overload"), Shed(8, "overload")]


# ---- construction


@pytest.mark.parametrize("wrong", [{"horizon_s": float("inf")}, {"priority": ()}, {"max_batch_size": 0}])
def test_a_scheduler_that_could_starve_or_never_send_is_refused(wrong: dict[str, Any]) -> None:
    kwargs: dict[str, Any] = {"max_batch_size": 1, "max_queue": 1, "max_queue_bytes": 1} | wrong
    with pytest.raises(ValueError, match="finite horizon_s"):
        Scheduler(Fixed(), **kwargs)


# ---- slots that are taken away


def test_a_retired_slot_answers_its_batches_and_gets_no_more(bench: Make) -> None:
    b = bench(slots=2, depth=2)
    b.offer(*range(8))
    b.poll()
    assert [d.slot for d in b.sent] == [0, 1]
    b.scheduler.slot_retired(0, b.now)
    assert b.scheduler.explain()["slots"] == 1
    b.offer(*range(8, 16))
    b.poll()
    assert {d.slot for d in b.sent} == {1}, "not even ahead"
    b.complete(1)
    b.poll()
    assert 0 not in {d.slot for d in b.sent}
    b.scheduler.slot_down(0, b.now)  # its worker ends
    b.scheduler.slot_up(0, b.now)  # the number comes again
    b.offer(*range(16, 24))
    b.poll()
    assert 0 in {d.slot for d in b.sent}


def test_batches_lost_by_a_retired_slot_run_elsewhere(bench: Make) -> None:
    b = bench(slots=2, depth=2)
    b.offer(1)
    b.poll()
    (slot,) = (d.slot for d in b.sent)
    b.scheduler.slot_retired(slot, b.now)
    b.complete(b.sent[0].batch_id, "died")
    b.scheduler.slot_down(slot, b.now)
    assert b.poll() == [[1]]
    assert b.sent[0].slot == 1 - slot


@pytest.mark.parametrize("state", ["idle", "down", "unknown", "twice"])
def test_a_slot_without_a_batch_is_forgotten_at_once(bench: Make, state: str) -> None:
    b = bench(slots=2)
    if state == "down":
        b.scheduler.slot_down(0, b.now)
    for _ in range(2 if state == "twice" else 1):
        b.scheduler.slot_retired(7 if state == "unknown" else 0, b.now)
    b.offer(1)
    b.poll()
    assert b.sent[0].slot == (0 if state == "unknown" else 1)
    assert b.scheduler.explain()["slots"] == (2 if state == "unknown" else 1)


def test_a_slot_whose_worker_died_can_be_retired(bench: Make) -> None:
    b = bench(slots=2, depth=2, max_batch_size=1)
    b.offer(1, 2, 3, 4)
    b.poll()
    first, second = [d.batch_id for d in b.sent if d.slot == 0]
    b.complete(first, "died")
    b.scheduler.slot_retired(0, b.now)
    b.complete(second, "lost")
    assert b.scheduler.explain()["slots"] == 1
    b.scheduler.slot_up(0, b.now)
    assert b.scheduler.explain()["slots"] == 2


def test_scaling_at_random_loses_nothing_and_repeats_nothing(bench: Make) -> None:
    rng = Random("scaling")
    b = bench(slots=2, depth=2, max_queue=10_000, max_queue_bytes=10**9)
    up, running, answered = {0, 1}, {}, []
    for id in range(3000):
        b.offer(id)
        if rng.random() < 0.1 and len(up) > 1:
            slot = rng.choice(sorted(up))
            up.remove(slot)
            b.scheduler.slot_retired(slot, b.now)
        if rng.random() < 0.1 and len(up) < 5:
            slot = next(n for n in range(50) if n not in up and n not in {d.slot for d in running.values()})
            up.add(slot)
            b.scheduler.slot_up(slot, b.now)
        b.poll()
        assert {d.slot for d in b.sent} <= up
        running |= {d.batch_id: d for d in b.sent}
        while running and rng.random() < 0.7:
            first = {}  # a slot answers in order
            for d in running.values():
                first.setdefault(d.slot, d)
            d = running.pop(rng.choice(list(first.values())).batch_id)
            answered += [e.id for e in d.entries]
            b.complete(d.batch_id, after_s=0.001)
    while running or b.scheduler.queued:
        b.poll()
        running |= {d.batch_id: d for d in b.sent}
        d = running.pop(next(iter(running)))
        answered += [e.id for e in d.entries]
        b.complete(d.batch_id, after_s=0.001)
    assert sorted(answered) == list(range(3000))
    assert b.scheduler.explain()["slots"] == len(up)


def test_a_smaller_queue_drops_nothing_and_refuses_until_there_is_room(bench: Make) -> None:
    b = bench(max_queue=8, slots=0)
    b.offer(*range(6))
    b.scheduler.max_queue = 4
    with pytest.raises(QueueFull, match="6 of 4 rows"):
        b.offer(6)
    assert b.scheduler.queued == 6
    with pytest.raises(ValueError, match="max_queue"):
        b.scheduler.max_queue = 0
