"""Slots that work on batches side by side."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from penstock.core.batching.entry import Outcome
from penstock.core.batching.policies.adaptive import Adaptive

Make = Callable[..., Any]


def concurrent(make: Make, *widths: int, **keys: Any) -> Any:
    """A bench whose slots have these widths."""
    b = make(slots=0, **keys)
    for slot, concurrency in enumerate(widths):
        b.scheduler.slot_up(slot, b.now, concurrency)
    return b


SCRIPTS: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {  # by name: widths of the slots, keys, script
    "batches are sent side by side as long as there is room": (
        (6,),
        {"depth": 8},
        "+1 | >[1]s0 | +2 | >[2]s0 | +3 4 5 6 7 8 9 | >[3 4 5 6] | running 6 | ok 2 | >[7] | ok 3 | >[8 9]",
    ),
    "the slot with the most room is next": (
        (8, 8, 8),
        {},
        "+0 1 2 3 | >[0 1 2 3]s0 | +4 5 | >[4 5]s1 | +6 | >[6]s2 | +7 8 | >[7 8]s2 | +9 | >[9]s1",
    ),
    "a partial result makes room": (
        (4,),
        {},
        "+1 2 3 4 5 6 | >[1 2 3 4] | > | answer 1: 3 | >[5] | answer 1: 1 4 | >[6] | ok 1 | ok 2 | ok 3 | running 0",
    ),
    "a request that needs more room than there is gets the next": (
        (4,),
        {},
        "+1 2 3 | >[1 2 3] | +4 rows=3 | +5 | > | answer 1: 1 | > | answer 1: 2 | >[4]",
    ),
    "a request larger than a batch ends with its last part": (
        (8,),
        {"max_batch_size": 2},
        "+1 rows=5 | >[1] [1] [1] | ok 2 | ok 1 | ok 3 =>1",
    ),
    "the last slot takes others while what was in a death waits": (
        (16, 16),
        {},
        "+1 | >[1]s0 | died 1 | down 0 | +2 | >[2]s1 | +3 | >[3]s1",
    ),
    "partly answered items are not retried": (
        (16,),
        {},
        "+1 2 3 4 | >[1 2 3 4] | answer 1: 2 3 | died 1 | back 0 16 | >[1] | ok 2 | >[4] | ok 3 | "
        "running 0 | queued 0 0",
    ),
    "items of a dead worker are retried on an exclusive slot, except those that were answered": (
        (16,),
        {},
        "+0 1 | >[0 1] | +2 3 | >[2 3] | +4 5 | >[4 5] | answer 1: 0 | died 1 | died 2 | died 3 | "
        "back 0 16 | +9 | >[1 2]rerun | ok 4 | >[3 4]rerun | ok 5 | >[5]rerun | ok 6 | >[9]",
    ),
    "items of a dead worker are retried on another slot": ((8, 8), {}, "+1 | >[1]s0 | died 1 | back 0 8 | >[1]s1"),
    "items of a second death run alone and only the killer fails": (
        (16, 16),
        {},
        "+0 1 2 3 4 5 6 7 | >[0 1 2 3]s0 [4 5 6 7]s1 | died 1 | back 0 16 | >[0 1]s0 | died 3 | "
        "back 0 16 | >[0]s0 | ok 4 | >[1]s0 | died 5 | back 0 16 | >[2 3]s0 !worker_died 1 | "
        "running 6",
    ),
    "other slots continue while one drains for a retry": (
        (8, 8, 8),
        {},
        "+1 2 | >[1 2]s0 | +3 4 | >[3 4]s1 | +5 6 | >[5 6]s2 | died 1 | down 0 | +7 8 9 | >[7 8 9]s2 | "
        "ok 2 | >[1]s1 | +10 | >[10]s2 | ok 5 | >[2]s1 | +11 | ok 7 | >[11]s1",
    ),
    "a retired concurrent slot answers its batches and gets no more": (
        (8, 8),
        {},
        "+1 | >[1]s0 | retire 0 | +2 | >[2]s1 | ok 1 | up 0 8 | +3 | >[3]s0",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(bench: Make, name: str) -> None:
    widths, keys, script = SCRIPTS[name]
    b = concurrent(bench, *widths, **keys)
    b.play(script)
    assert all(d.concurrent and not d.ahead for d in b.batches.values())


def poll(b: Any) -> list[tuple[int, list[int]]]:
    """(slot, ids) of each batch that is sent now."""
    b.poll()
    return [(d.slot, [e.id for e in d.entries]) for d in b.sent]


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
