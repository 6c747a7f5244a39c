"""Slots that work on batches side by side."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from penstock.core.batching.entry import Fail, Outcome
from penstock.core.batching.policies.adaptive import Adaptive

Make = Callable[..., Any]


def concurrent(make: Make, *widths: int, **keys: Any) -> Any:
    """A bench whose slots have these widths."""
    b = make(slots=0, **keys)
    for slot, concurrency in enumerate(widths):
        b.scheduler.slot_up(slot, b.now, concurrency)
    return b


def part(b: Any, batch: int, *ids: int, failed: tuple[int, ...] = ()) -> list[int]:
    """Some entries of a batch of the last poll are answered."""
    dispatch = next(d for d in b.kept if d.batch_id == batch)
    entries = [e for e in dispatch.entries if e.id in ids]
    return b.scheduler.answered(batch, entries, frozenset(failed))


def poll(b: Any) -> list[tuple[int, list[int]]]:
    """(slot, ids) of each batch that is sent now."""
    b.poll()
    b.kept = [*getattr(b, "kept", []), *b.sent]
    return [(d.slot, [e.id for e in d.entries]) for d in b.sent]


def test_batches_are_sent_side_by_side_as_long_as_there_is_room(bench: Make) -> None:
    b = concurrent(bench, 6, depth=8)
    for id in (1, 2):
        b.offer(id)
        assert poll(b) == [(0, [id])]
        assert b.sent[0].concurrent
        assert not b.sent[0].ahead
    b.offer(*range(3, 10))
    assert poll(b) == [(0, [3, 4, 5, 6])]
    assert b.scheduler.running_rows == 6
    b.complete(2)
    assert poll(b) == [(0, [7])]
    b.complete(3)
    assert poll(b) == [(0, [8, 9])]


def test_the_slot_with_the_most_room_is_next(bench: Make) -> None:
    b = concurrent(bench, 8, 8, 8)
    b.offer(*range(4))
    assert poll(b) == [(0, [0, 1, 2, 3])]
    b.offer(4, 5)
    assert poll(b) == [(1, [4, 5])]
    b.offer(6)
    assert poll(b) == [(2, [6])]
    b.offer(7, 8)
    assert poll(b) == [(2, [7, 8])]
    b.offer(9)
    assert poll(b) == [(1, [9])]


def test_a_partial_result_makes_room(bench: Make) -> None:
    b = concurrent(bench, 4)
    b.offer(*range(1, 7))
    assert poll(b) == [(0, [1, 2, 3, 4])]
    assert poll(b) == []
    assert part(b, 1, 3) == []
    assert poll(b) == [(0, [5])]
    part(b, 1, 1, 4)
    assert poll(b) == [(0, [6])]
    b.complete(1)
    b.complete(2)
    b.complete(3)
    assert (b.scheduler.running_rows, b.scheduler.running) == (0, 0)


def test_a_request_that_needs_more_room_than_there_is_gets_the_next(bench: Make) -> None:
    b = concurrent(bench, 4)
    b.offer(1, 2, 3)
    assert poll(b) == [(0, [1, 2, 3])]
    b.offer(4, rows=3)
    b.offer(5)
    assert poll(b) == []
    part(b, 1, 1)
    assert poll(b) == []
    part(b, 1, 2)
    assert poll(b) == [(0, [4])]


def test_a_request_larger_than_a_batch_ends_with_its_last_part(bench: Make) -> None:
    b = concurrent(bench, 8, max_batch_size=2)
    b.offer(1, rows=5)
    assert poll(b) == [(0, [1]), (0, [1]), (0, [1])]
    assert b.complete(2) == []
    assert b.complete(1) == []
    assert b.complete(3) == [1]


def test_concurrent_batches_do_not_train_the_cost_model(bench: Make) -> None:
    b = concurrent(bench, 8, policy=Adaptive())
    for batch in range(1, 30):
        b.offer(batch)
        poll(b)
        b.complete(batch, after_s=1.0, run_s=0.9)
    assert not b.scheduler.explain()["ready"]
    assert b.scheduler.explain()["handover_s"] is None


def test_a_full_wide_slot_is_sent_nothing_ahead(bench: Make) -> None:
    b = concurrent(bench, 2, depth=8)
    b.prime(0.0, 1e-6)
    b.offer(*range(8))
    assert poll(b) == [(0, [0, 1])]
    assert poll(b) == []


def kill(b: Any, *batches: int, slot: int = 0, concurrency: int = 16) -> None:
    for batch in batches:
        b.complete(batch, "died")
    b.scheduler.slot_down(slot, b.now)
    b.scheduler.slot_up(slot, b.now, concurrency)


def test_items_of_a_dead_worker_are_retried_on_an_exclusive_slot(bench: Make) -> None:
    b = concurrent(bench, 16)
    for id in range(6):
        b.offer(id)
        poll(b)
    part(b, 1, 0)  # answered before: it is not run again
    b.complete(1)
    kill(b, 2, 3, 4, 5, 6)
    b.offer(9)
    for batch, ids in enumerate(([1, 2], [3, 4], [5]), 7):
        assert poll(b) == [(0, ids)]
        assert b.sent[0].reason == "rerun"
        b.complete(batch)
    assert poll(b) == [(0, [9])]


def test_the_last_slot_takes_others_while_what_was_in_a_death_waits(bench: Make) -> None:
    b = concurrent(bench, 16, 16)
    b.offer(1)
    assert poll(b) == [(0, [1])]
    b.complete(1, "died")
    b.scheduler.slot_down(0, b.now)
    b.offer(2)
    assert poll(b) == [(1, [2])]
    b.offer(3)
    assert poll(b) == [(1, [3])]


def test_partly_answered_items_are_not_retried(bench: Make) -> None:
    b = concurrent(bench, 16)
    b.offer(1, 2, 3, 4)
    poll(b)
    part(b, 1, 2, 3)
    kill(b, 1)
    assert poll(b) == [(0, [1])]
    b.complete(2)
    assert poll(b) == [(0, [4])]
    b.complete(3)
    assert (b.scheduler.running_rows, b.scheduler.queued_rows) == (0, 0)


def test_many_that_were_in_a_death_are_run_again_in_about_eight_pieces(bench: Make) -> None:
    b = concurrent(bench, 64, max_batch_size=64)
    for id in range(64):
        b.offer(id)
        poll(b)
    kill(b, *range(1, 65), concurrency=64)
    sizes, ids, batch = [], [], 65
    while found := poll(b):
        ((_, group),) = found
        sizes.append(len(group))
        ids += group
        b.complete(batch)
        batch += 1
    assert sorted(ids) == list(range(64))
    assert sizes == [8] * 8


def test_a_retry_batch_holds_items_of_one_recent_death(bench: Make) -> None:
    b = concurrent(bench, 64, max_batch_size=64)
    b.offer(*range(64))
    poll(b)
    kill(b, 1, concurrency=64)
    batch = 2
    while poll(b):
        b.complete(batch)
        batch += 1
    for id in range(100, 116):
        b.offer(id)
        poll(b)
    kill(b, *range(batch, batch + 16), concurrency=64)
    assert poll(b) == [(0, [100, 101, 102, 103])]


def test_a_retry_batch_has_one_bucket(bench: Make) -> None:
    b = concurrent(bench, 64, max_batch_size=64)
    for id in range(16):
        b.offer(id, bucket="ab"[id % 2])
        poll(b)
    kill(b, *range(1, 17), concurrency=64)
    assert poll(b) == [(0, [0])]
    b.complete(17)
    assert poll(b) == [(0, [1])]


def test_items_of_a_dead_worker_are_retried_on_another_slot(bench: Make) -> None:
    b = concurrent(bench, 8, 8)
    b.offer(1)
    assert poll(b) == [(0, [1])]
    kill(b, 1)
    assert poll(b) == [(1, [1])]


def test_items_of_a_second_death_run_alone_and_only_the_killer_fails(bench: Make) -> None:
    b = concurrent(bench, 16, 16)
    b.offer(*range(8))
    assert poll(b) == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])]
    kill(b, 1)
    assert poll(b) == [(0, [0, 1])]
    kill(b, 3)
    for batch, ids in enumerate(([0], [1]), 4):
        assert poll(b) == [(0, ids)]
        if ids != [1]:
            b.complete(batch)
    kill(b, 5)
    assert poll(b) == [(0, [2, 3])]
    assert b.told == [Fail(1, "worker_died")]
    assert b.scheduler.running_rows == 6


def test_other_slots_continue_while_one_drains_for_a_retry(bench: Make) -> None:
    b = concurrent(bench, 8, 8, 8)
    for ids in ((1, 2), (3, 4), (5, 6)):
        b.offer(*ids)
        poll(b)
    b.complete(1, "died")
    b.scheduler.slot_down(0, b.now)
    b.offer(7, 8, 9)
    assert poll(b) == [(2, [7, 8, 9])]  # slot 1 is given nothing: it is to be empty
    b.complete(2)
    assert poll(b) == [(1, [1])]
    b.offer(10)
    assert poll(b) == [(2, [10])]
    b.complete(5)
    assert poll(b) == [(1, [2])]
    b.offer(11)
    b.complete(7)
    assert poll(b) == [(1, [11])]


def test_a_retired_concurrent_slot_answers_its_batches_and_gets_no_more(bench: Make) -> None:
    b = concurrent(bench, 8, 8)
    b.offer(1)
    assert poll(b) == [(0, [1])]
    b.scheduler.slot_retired(0, b.now)
    b.offer(2)
    assert poll(b) == [(1, [2])]
    b.complete(1)
    b.scheduler.slot_up(0, b.now, 8)
    b.offer(3)
    assert poll(b) == [(0, [3])]


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_exactly_once(bench: Make, seed: int) -> None:
    random = Random(seed)
    b = concurrent(bench, 7, 12, max_batch_size=5, max_queue=1000)
    running: dict[int, list[Any]] = {}
    ended: dict[int, int] = {}
    widths = [7, 12]
    for id in range(1, 300):
        b.now += 0.001
        b.offer(id, rows=random.choice((1, 1, 1, 2, 4, 9)))
        take_note(b, running, ended)
        for batch in random.sample(list(running), min(len(running), random.randrange(3))):
            answer(b, running, ended, batch, random)
        if random.random() < 0.05:
            die(b, running, random.randrange(2), widths)
            take_note(b, running, ended)
    for _ in range(3000):
        take_note(b, running, ended)
        for batch in list(running):
            answer(b, running, ended, batch, random)
    assert not running
    assert ended == dict.fromkeys(range(1, 300), 1)
    assert (b.scheduler.running_rows, b.scheduler.queued_rows) == (0, 0)


def take_note(b: Any, running: dict[int, list[Any]], ended: dict[int, int]) -> None:
    b.poll()
    for d in b.sent:
        running[d.batch_id] = [d.slot, list(d.entries)]
    for event in b.told:
        ended[event.id] = ended.get(event.id, 0) + 1
    for slot, concurrency in enumerate((7, 12)):
        on_it = [entries for number, entries in running.values() if number == slot]
        assert sum(e.rows for entries in on_it for e in entries) <= concurrency


def answer(b: Any, running: dict[int, list[Any]], ended: dict[int, int], batch: int, random: Random) -> None:
    entries = running[batch][1]
    some = entries if random.random() < 0.5 else entries[: random.randrange(len(entries))]
    if len(some) == len(entries):
        split = b.scheduler.complete(batch, Outcome(), b.now)
        del running[batch]
    else:
        split = b.scheduler.answered(batch, some, frozenset())
        running[batch][1] = entries[len(some) :]
    for id in [*split, *(e.id for e in some if e.parent is None)]:
        ended[id] = ended.get(id, 0) + 1


def die(b: Any, running: dict[int, list[Any]], slot: int, widths: list[int]) -> None:
    for batch in [batch for batch, (number, _) in running.items() if number == slot]:
        del running[batch]
        b.complete(batch, "died")
    b.scheduler.slot_down(slot, b.now)
    b.scheduler.slot_up(slot, b.now, widths[slot])
