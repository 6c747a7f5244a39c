"""Batches side by side on one worker, as their callers see them."""

import asyncio
from random import Random
from typing import Any

import pytest

from penstock.core.contracts import Observer
from penstock.core.engine.batcher import Batcher
from penstock.core.wire.slabs import SlabPool
from penstock.errors import DeadlineExceeded, ItemFailed, WorkerDied
from penstock.types import BatchPart, Item, ItemResult


def submit(batcher: Batcher, sink: Any, payload: Any = b"x", budget_s: float | None = None, rows: int = 1) -> Any:
    return batcher.submit(Item(payload, rows=rows, budget_s=budget_s), sink, "", 1)


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def died(batcher: Batcher, transport: Any, width: int = 16) -> None:
    """The worker ends under all its batches, and is back at once."""
    sent, transport.sent = transport.sent, []
    for batch, on_part in sent:
        on_part(BatchPart(batch.id, error=WorkerDied("signal 9")))
    batcher.scheduler.slot_down(0, 0.0)
    batcher.scheduler.slot_up(0, 0.0, width)
    batcher.wake()
    await turns()


@pytest.fixture
async def batcher(make_batcher: Any) -> Batcher:
    made: Batcher = make_batcher(width=16, max_queue=64)
    return made


async def test_each_caller_is_answered_as_soon_as_its_item_is(batcher, transport, caller) -> None:
    callers = [caller() for _ in range(4)]
    for i, sink in enumerate(callers[:3]):
        submit(batcher, sink, b"%d" % i)
    await turns()
    submit(batcher, callers[3], b"3")
    await turns()
    assert [len(batch.items) for batch, _ in transport.sent] == [3, 1]
    transport.some(1, 2)
    assert callers[2].answer.body == b"2"
    assert (batcher.pending, batcher.scheduler.running_rows) == (3, 3)
    transport.some(2, 0, final=True)
    assert callers[3].answer.body == b"3"
    transport.some(1, 0, 1, final=True)
    assert [c.answer.body for c in callers] == [b"0", b"1", b"2", b"3"]
    assert (batcher.pending, batcher.scheduler.running) == (0, 0)


async def test_the_payload_of_an_answered_item_is_freed_while_its_batch_runs(batcher, transport, caller) -> None:
    pool = SlabPool(2**20)
    slab = pool.allocate(70_000)
    submit(batcher, caller(), slab)
    submit(batcher, caller())
    await turns()
    transport.some(1, 0)
    assert pool.in_use_bytes == 0


async def test_a_worker_that_takes_many_batches_hears_the_time_that_each_request_has_left(
    batcher, transport, caller
) -> None:
    submit(batcher, caller(), budget_s=5.0)
    submit(batcher, caller())
    await turns()
    limited, free = transport.sent[0][0].items
    assert 4.0 < limited.budget_s <= 5.0
    assert free.budget_s is None


async def test_a_worker_that_keeps_deadlines_itself_answers_first_and_a_silent_one_does_not_delay_the_caller(
    batcher, transport, caller, monkeypatch
) -> None:
    monkeypatch.setattr("penstock.core.engine.batcher.LATE_S", 0.3)
    named, silent = caller(), caller()
    for sink in (named, silent):
        submit(batcher, sink, budget_s=0.02)
    await turns()
    await asyncio.sleep(0.05)
    transport.some(1, 0, results=[ItemResult(error=DeadlineExceeded("node 'b'"))])
    await asyncio.sleep(0.5)
    assert named.answer.error.message == "node 'b'"
    assert isinstance(silent.answer.error, DeadlineExceeded)
    assert transport.abandoned == (0, 1)


async def test_a_caller_that_left_is_not_run_again_after_a_death(batcher, transport, caller) -> None:
    gone, stays = submit(batcher, caller()), caller()
    submit(batcher, stays, b"stays")
    await turns()
    gone.cancel()
    await died(batcher, transport)
    assert transport.answer().items[0].payload == b"stays"
    assert stays.answer.body == b"stays"
    assert not transport.sent
    assert batcher.pending == 0


async def test_a_batch_without_remaining_callers_is_abandoned(batcher, transport, caller) -> None:
    calls = [submit(batcher, caller()) for _ in range(3)]
    await turns()
    submit(batcher, caller())
    await turns()
    calls[0].cancel()
    transport.some(1, 2)
    assert transport.abandoned is None
    calls[1].cancel()
    assert transport.abandoned == (0, 1)
    assert batcher.pending == 3
    transport.some(1, 0, 1, final=True)
    assert batcher.pending == 1


async def test_the_last_answer_that_somebody_waits_for_abandons_the_rest(batcher, transport, caller) -> None:
    call = submit(batcher, caller())
    submit(batcher, caller())
    await turns()
    call.cancel()
    assert transport.abandoned is None
    transport.some(1, 1)
    assert transport.abandoned == (0, 1)


async def test_a_split_request_is_joined_of_parts_that_come_in_any_order(make_batcher, transport, caller) -> None:
    batcher = make_batcher(width=16, max_batch_size=2)
    many = caller()
    batcher.submit(Item([0, 1, 2, 3, 4], rows=5, many=True), many, "", 1)
    await turns()
    assert [(b.items[0].start, b.items[0].stop) for b, _ in transport.sent] == [(0, 2), (2, 4), (4, 5)]
    transport.some(3, 0, final=True, results=[ItemResult([40])])
    transport.some(1, 0, final=True, results=[ItemResult([0, 10])])
    assert not many.parts
    transport.some(2, 0, final=True, results=[ItemResult([20, ItemFailed("no")])])
    found = many.answer.body
    assert [found[i] for i in (0, 1, 2, 4)] == [0, 10, 20, 40]
    assert type(found[3]) is ItemFailed
    assert batcher.pending == 0


async def test_observers_hear_of_a_batch_once_and_of_each_answer(make_batcher, transport, caller) -> None:
    class Ear(Observer):
        def __init__(self) -> None:
            self.answers: list[tuple[int, int]] = []
            self.batches: list[tuple[int, int]] = []

        def on_answer(self, model: str, version: str, latencies_s: Any, failed: int) -> None:
            self.answers.append((len(latencies_s), failed))

        def on_complete(self, record: Any) -> None:
            self.batches.append((record.rows, record.failed))

    ear = Ear()
    batcher = make_batcher(width=16, observers=[ear])
    for _ in range(3):
        submit(batcher, caller())
    await turns()
    transport.some(1, 0, results=[ItemResult(error=ItemFailed("no"))])
    transport.some(1, 1, 2, final=True)
    assert ear.answers == [(1, 1), (2, 0)]
    assert ear.batches == [(3, 1)]


async def test_close_answers_the_rest_of_a_partly_answered_batch(batcher, transport, caller) -> None:
    callers = [caller() for _ in range(2)]
    for sink in callers:
        submit(batcher, sink)
    await turns()
    transport.some(1, 0)
    batcher.close(WorkerDied("stopped"))
    assert [c.answer.error is None for c in callers] == [True, False]
    transport.some(1, 1, final=True)
    assert batcher.pending == 0


@pytest.mark.parametrize("seed", range(15))
async def test_every_caller_is_answered_once_whatever_the_worker_does(make_batcher, transport, caller, seed) -> None:
    random, batcher = Random(seed), make_batcher(width=12, max_batch_size=5, max_queue=10_000)
    open_places: dict[int, list[int]] = {}
    waiting: list[tuple[Any, Any, int]] = []  # call, sink, number
    gone: list[Any] = []

    def take_note() -> None:
        for batch, _ in transport.sent:
            open_places.setdefault(batch.id, list(range(len(batch.items))))
        assert sum(transport.item(batch, place).rows for batch in open_places for place in open_places[batch]) <= 12

    def answer(batch: int) -> None:
        places = random.sample(open_places[batch], random.randint(1, len(open_places[batch])))
        left = open_places[batch] = [place for place in open_places[batch] if place not in places]
        transport.some(batch, *places, final=not left, results=[transport.echo(batch, place) for place in places])
        if not left:
            del open_places[batch]
            transport.sent = [pair for pair in transport.sent if pair[0].id != batch]

    for number in range(250):
        rows, sink = random.choice((1, 1, 1, 3, 8)), caller()
        item = Item([number] * rows, rows=rows, many=True)
        waiting.append((batcher.submit(item, sink, "", 1), sink, number))
        await turns()
        take_note()
        for batch in random.sample(list(open_places), min(len(open_places), random.randrange(3))):
            answer(batch)
        if random.random() < 0.05:
            call, sink, _ = waiting.pop(random.randrange(len(waiting)))
            call.cancel()
            gone.append((sink, len(sink.parts)))
        if random.random() < 0.04:
            open_places.clear()
            await died(batcher, transport, width=12)
            take_note()
    await turns()
    take_note()
    while open_places:
        answer(random.choice(list(open_places)))
        await turns()
        take_note()
    assert (batcher.pending, batcher.scheduler.running_rows, batcher.scheduler.queued_rows) == (0, 0, 0)
    for _, sink, number in waiting:
        found = sink.answer
        assert found.error is None
        assert all(value == number or type(value) is WorkerDied for value in found.body)
    assert all(len(sink.parts) == count for sink, count in gone)
    assert sum(set(sink.answer.body) == {number} for _, sink, number in waiting) > 200
