from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from penstock.core.batching.entry import Shed
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import WaitUntil
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.scheduler import CEILING_S, Scheduler
from penstock.errors import BadRequest, PayloadTooLarge, QueueFull

Make = Callable[..., Any]


def keys(policy: float = 0.0, prime: tuple[float, float] | None = None, **more: Any) -> dict[str, Any]:
    """The arguments of a bench; `policy` is the delay of a Fixed."""
    return {"policy": Fixed(policy), "prime": prime, **more}


BRIEF = (0.0, 0.0001)  # seconds of a batch, and of a row: full batches are sent ahead at once

SCRIPTS: dict[str, tuple[dict[str, Any], str]] = {
    # order
    "a batch keeps filling until a slot is idle": (keys(), "+1 | >[1] | +2 3 4 5 6 | > | ok 1 | >[2 3 4 5]"),
    "an earlier deadline goes first and equals keep their order": (
        keys(max_batch_size=2),
        "+1 2 | +3 deadline_s=5 | +4 deadline_s=5 | >[3 4] | ok 1 | >[1 2]",
    ),
    "a lower class may wait its extra budget longer but is not starved": (
        keys(max_batch_size=1, priority=(0.0, 1.0)),
        "+1 priority=1 | wait 0.5 | +2 | wait 0.6 | +3 | >[2] | ok 1 | >[1] | ok 2 | >[3]",
    ),
    "a class beyond the last has the budget of the last": (
        keys(max_batch_size=1, priority=(0.0, 1.0)),
        "+1 priority=7 | +2 priority=1 | >[1]",
    ),
    "a batch has one bucket and the oldest head is served": (
        keys(),
        "+1 bucket=x | wait 1 | +2 3 4 5 bucket=y | +6 bucket=x | >[1 6] | ok 1 | >[2 3 4 5]",
    ),
    "a misfit is skipped and heads the next batch": (keys(), "+1 rows=3 | +2 rows=2 | +3 | >[1 3] | ok 1 | >[2]"),
    "a full bucket does not wait for a held one": (keys(policy=1.0), "+1 bucket=x | +2 3 4 5 bucket=y | >[2 3 4 5]"),
    # time
    "a request that exceeds its timeout is expired": (
        keys(slots=0),
        "+1 expires_s=2 | > | wake 2 | >@2 !timeout 1 | wake - | queued 0 0",
    ),
    "a passed deadline is never run even when it passed before the offer": (keys(), "+1 deadline_s=-1 | >!expired 1"),
    "a timeout shorter than older ones is kept": (
        keys(slots=0),
        "+1 expires_s=30 | +2 expires_s=1 | > | wake 1 | >@1 !timeout 2",
    ),
    "a second poll at the same time changes nothing": (keys(policy=1.0), "+1 | > | wake 1 | > | wake 1"),
    # split
    "a request larger than the batch runs in parts and ends once": (
        keys(slots=2),
        "+1 rows=10 | >[1] [1] | queued 1 2 | ok 2 | >[1] | queued 0 0 | ok 1 | ok 3 =>1",
    ),
    "a failed part purges queued parts and ends the request": (
        keys(slots=2),
        "+1 rows=12 | >[1] [1] | ok 1 failed=1 | queued 0 0 | ok 2 =>1 | >",
    ),
    "a split request that runs in part ends after a cancel when the part is back": (
        keys(),
        "+1 rows=8 | >[1] | cancel 1 | queued 0 0 | ok 1 =>1",
    ),
    "an expired split request ends with its running part": (
        keys(),
        "+1 rows=8 expires_s=1 | >[1] | >@1 | ok 1 | >!timeout 1",
    ),
    "a lower ceiling splits queued requests": (
        keys(),
        "+1 | >[1] | +2 rows=4 | ok 1 oom=4/3 | >[2] | running 3 | ok 2 | >[2] | ok 3 =>2",
    ),
    # death
    "a batch that killed its worker is retried in pieces on other slots one at a time while others wait": (
        keys(slots=3),
        "+1 2 3 4 | >[1 2 3 4]s0 | +5 | died 1 | back 0 | >[1 2]s1 [5]s0 [3 4]s2",
    ),
    "what is run again says so": (
        keys(slots=3),
        "+1 2 3 4 | >[1 2 3 4] | +5 | died 1 | back 0 | >[1 2]rerun [5] [3 4]rerun",
    ),
    "requests that were in a death leave the last slot to others for an eighth of the horizon": (
        keys(slots=2, max_batch_size=1),
        "+1 2 3 4 5 | >[1] [2] | died 1 | down 0 | ok 2 | >[3] | ok 3 | >@3.7 [4] | ok 4 | >@0.2 [1] | up 0 | >[5]",
    ),
    "after a killer what was in a death waits a quarter of the horizon for the slot that died and spares the others": (
        keys(slots=3, max_batch_size=1),
        "+1 | >[1] | died 1 | down 0 | >[1] | died 2 | down 1 | +2 | >[2] !worker_died 1 | died 3 | "
        "down 2 | up 0 | up 1 | > | wake 7.5 | +3 | >[3]s0 | up 2 | >@1 [2]s2 | died 5 | down 2 | +4 | "
        ">[4] !worker_died 2 | died 6 | down 1 | ok 4 | >@7.4 | >@0.2 [4] | ok 7 | +5 | >@60 [5] | "
        "died 8 | down 0 | up 1 | >[5]s1",
    ),
    "rows of a batch that kills again run one by one": (
        keys(max_batch_size=8),
        "+0 1 2 3 4 5 6 7 | >[0 1 2 3 4 5 6 7] | died 1 | up 0 | >[0 1] | ok 2 | >[2 3] | died 3 | "
        "up 0 | >[2] | ok 4 | >[3] | died 5 | up 0 | >[4 5] !worker_died 3 | ok 6 | >[6 7]",
    ),
    "an item in two deaths fails": (keys(slots=2), "+1 | >[1] | died 1 | >[1] | died 2 | >!worker_died 1"),
    "without idempotence a death fails at once": (
        keys(slots=2, idempotent=False),
        "+1 2 | >[1 2] | died 1 | >!worker_died 1 2",
    ),
    "a batch lost behind another is requeued in front without blame": (
        keys(depth=8, max_batch_size=2, prime=BRIEF),
        "+1 2 3 4 5 | >[1 2] [3 4] | died 1 | lost 2 | back 0 | >[1] | ok 3 | >[2] [3 4] | ok 4 | ok 5 | >[5]",
    ),
    "nothing is sent to a slot between a death and its return": (
        keys(),
        "+1 | >[1] | died 1 | > | down 0 | > | up 0 | >[1]",
    ),
    "a part that dies twice fails its request once": (
        keys(),
        "+1 rows=8 | >[1] | died 1 | up 0 | >[1] | died 2 | up 0 | >!worker_died 1 | queued 0 0",
    ),
    "a death ends only the running batch of several sent ahead": (
        keys(depth=8, max_batch_size=1, idempotent=False, prime=(0.0, 0.0001)),
        "+0 1 2 3 4 5 | >[0] [1] [2] [3] [4] [5] | died 1 | lost 2 | lost 3 | lost 4 | lost 5 | "
        "lost 6 | back 0 | >[1] [2] [3] [4] [5] !worker_died 0",
    ),
    # ahead
    "a full batch is sent ahead to the slot that ends first and two to a slot at most": (
        keys(slots=2, depth=2, prime=(1.0, 1.0)),
        "+0 | >[0] | ok 1 after_s=2.2 run_s=2 | "
        "+1 2 3 | >[1 2 3] | +4 | >@0.1 [4] | +5 6 7 | >@0.1 | +8 | >[5 6 7 8]s1 | +9 10 11 12 | "
        ">[9 10 11 12]ahead | +13 14 15 16 | >",
    ),
    "nothing more is sent behind a batch that is late": (
        keys(depth=8, max_batch_size=1, prime=(0.0, 0.0001)),
        "+1 | >[1] | +2 3 4 5 6 7 8 9 | >@0.002 [2] | >@0.002",
    ),
    "brief batches that are not full keep filling": (
        keys(depth=8, prime=(0.0001, 0.0)),
        "+100 | >[100] | ok 1 after_s=0.0003 run_s=0.0001 | +0 1 2 3 | >[0 1 2 3] | +4 | >[4] | +5 6 | "
        "> | +7 8 | >[5 6 7 8]",
    ),
    "any batch is sent ahead when the running one ends within the hand over": (
        keys(depth=2, prime=(1.0, 1.0)),
        "+1 | >[1] | ok 1 after_s=2 run_s=1.5 | +2 | >[2] | +3 | > | wake 1.5 | >@1.51 [3]ahead",
    ),
    "the slow hand over of a cold worker is not believed for long": (
        keys(depth=2, prime=(1.0, 1.0)),
        "+1 | >[1] | ok 1 after_s=151.5 run_s=1.5 | +2 | >[2] | ok 2 after_s=2 run_s=1.5 | +3 | >[3] | +4 | >",
    ),
    "an urgent request takes the place of a full lower class batch until that is sent": (
        keys(depth=2, priority=(0.0, 10.0), prime=(1.0, 1.0)),
        "+1 2 3 4 5 6 7 8 priority=1 | >[1 2 3 4] | +9 | > | ok 1 after_s=5 | >[9 5 6 7]",
    ),
    "a full batch of the most urgent class is sent ahead at once": (
        keys(depth=2, priority=(0.0, 10.0), prime=(1.0, 1.0)),
        "+0 | >[0] | ok 1 after_s=2.2 run_s=2 | "
        "+1 2 3 4 5 6 7 8 priority=1 | >[1 2 3 4] | +11 12 13 14 | >[11 12 13 14]ahead",
    ),
    "... but 32 leads before the end of a run at the earliest": (
        keys(depth=2, prime=(100.0, 0.0)),
        "+0 | >[0] | ok 1 after_s=101 run_s=100 | "
        "+1 2 3 4 | >[1 2 3 4] | +5 6 7 | >@10 | +8 | >@57 | >@2 [5 6 7 8]ahead",
    ),
    "nothing is sent ahead before the times of runs are known": (
        keys(depth=2, max_batch_size=1),
        "+1 2 | >[1] | > | wake - | +3 deadline_s=5 | > | wake 5.0 | ok 1 after_s=4 | >[3]",
    ),
    "nothing is sent ahead behind a run that is long beside the lead": (
        keys(depth=2, max_batch_size=1, priority=(0.0, 10.0), horizon_s=900.0, prime=(100.0, 0.0)),
        "+0 | >[0] | ok 1 after_s=100.25 run_s=100 | +1 | >[1] | +2 3 expires_s=99 | +4 priority=1 | > | wake 99.0 | "
        ">@98 | +5 deadline_s=300 | >@1!timeout 2 3 | >@5 | ok 2 | >[5]",
    ),
    "lower class batches follow brief batches at once": (
        keys(depth=8, max_batch_size=1, priority=(0.0, 10.0), prime=(0.0, 1e-05)),
        "+1 2 3 4 5 6 7 8 9 priority=1 | >[1] [2]ahead [3]ahead [4]ahead [5]ahead [6]ahead [7]ahead [8]ahead",
    ),
    # slots that leave
    "batches lost by a retired slot run elsewhere": (
        keys(slots=2, depth=2),
        "+1 | >[1]s0 | retire 0 | died 1 | down 0 | >[1]s1",
    ),
    "a slot whose worker died can be retired": (
        keys(slots=2, depth=8, max_batch_size=1, prime=BRIEF),
        "+1 2 3 4 | >[1]s0 [2]s1 [3]s0 [4]s1 | died 1 | retire 0 | lost 3 | > | up 0 | >[1]s0 [3]s0",
    ),
    "a retired slot answers its batches and gets no more until its number comes again": (
        keys(slots=2, depth=8, prime=BRIEF),
        "+0 1 2 3 | >[0 1 2 3]s0 | +4 5 6 7 | >[4 5 6 7]s1 | retire 0 | +8 9 10 11 12 | "
        ">[8 9 10 11]s1 | ok 1 | > | down 0 | up 0 | >[12]s0",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(bench: Make, name: str) -> None:
    (made, script) = SCRIPTS[name]
    prime = made["prime"]
    b = bench(**{key: value for key, value in made.items() if key != "prime"})
    if prime is not None:
        b.prime(*prime)
    b.play(script)


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


# ---- death


def test_a_part_of_a_request_that_nobody_wants_is_no_killer(bench: Make) -> None:
    b = bench(slots=2, max_batch_size=2)
    b.offer(1, rows=6, divisible=True)
    assert b.poll() == [[1], [1]]
    assert not b.scheduler.cancel(1, b.now)
    b.complete(1, "died")
    assert not b.scheduler.killers(b.now)


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


@pytest.mark.parametrize(
    ("takes_s", "lead_s", "sent"), [(0.0001, 1e-5, 8), (0.0004, 1e-5, 3), (0.01, 0.001, 2), (1.0, 0.001, 1)]
)
def test_more_than_one_full_batch_is_sent_ahead_only_behind_a_millisecond_of_work(
    bench: Make, takes_s: float, lead_s: float, sent: int
) -> None:
    b = bench(depth=8, max_batch_size=1)
    b.prime(0.0, takes_s)
    b.offer(-1)
    b.poll()
    b.complete(1, after_s=takes_s + lead_s, run_s=takes_s)
    b.prime(0.0, takes_s)
    b.offer(*range(20))
    assert b.poll() == [[id] for id in range(sent)]
    assert [d.ahead for d in b.sent] == [False] + [True] * (sent - 1)


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


# ---- turns


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


def test_the_time_of_a_device_is_learned_without_what_overlaps(bench: Make) -> None:
    """Answers take 3 ms more than the kernels: copies, which overlap the kernels of other batches."""
    b = bench(max_batch_size=4)
    for k in range(20):
        b.offer(2 * k, 2 * k + 1)
        assert b.poll() == [[2 * k, 2 * k + 1]]
        b.complete(k + 1, after_s=0.013, run_s=0.01, on_device=True)
    assert b.scheduler.seconds(2) == pytest.approx(0.01)
