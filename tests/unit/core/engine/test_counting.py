"""What observers hear: every request that came ends in one answer, one rejection, or is in flight."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.contracts import BatchRecord, Observer
from penstock.core.engine.batcher import Batcher
from penstock.core.engine.calls import Notifier
from penstock.core.engine.engine import Engine
from penstock.errors import (
    BadRequest,
    DeadlineExceeded,
    DecodeError,
    ItemFailed,
    ModelNotReady,
    PenstockError,
    QueueFull,
    WorkerDied,
)
from penstock.types import BatchPart, Item, ItemResult


class Ledger(Observer):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.arrivals = 0
        self.answers: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.batches: list[BatchRecord] = []

    def on_arrival(self, model: str, version: str) -> None:
        self.arrivals += 1

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        assert 0 <= failed <= len(latencies_s) > 0
        self.answers.update(ok=len(latencies_s) - failed, failed=failed)

    def on_reject(self, model: str, version: str, reason: str) -> None:
        self.reasons[reason] += 1

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        self.errors[error.code] += 1

    def on_complete(self, record: BatchRecord) -> None:
        self.batches.append(record)

    @property
    def ended(self) -> int:
        return self.answers.total() + self.reasons.total()


class Bench:
    """A batcher, its transport and its ledger."""

    def __init__(self, make_batcher: Callable[..., Batcher], transport: Any, **keys: Any) -> None:
        self.ledger = Ledger()
        self.batcher = make_batcher(observers=[self.ledger], **keys)
        self.transport = transport
        self.accepted = 0

    def submit(self, sink: Any, **keys: Any) -> Any:
        call = self.batcher.submit(Item(b"x", **keys), sink, "", 1)
        self.accepted += 1
        return call

    async def turns(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def died(self, started: bool = True) -> None:
        """The worker ends with all that it has, and is back at once."""
        while self.transport.sent:
            self.transport.answer(results=[], error=WorkerDied("signal 9"), started=started)
            started = False
        self.batcher.scheduler.slot_down(0, 0.0)
        self.batcher.scheduler.slot_up(0, 0.0)
        self.batcher.wake()
        await self.turns()

    def check(self) -> None:
        assert self.accepted == self.ledger.ended + self.batcher.pending


@pytest.fixture
def bench(make_batcher: Callable[..., Batcher], transport: Any) -> Callable[..., Bench]:
    return lambda **keys: Bench(make_batcher, transport, **keys)


async def test_answers_and_failures_are_counted_separately(bench, caller) -> None:
    b = bench()
    for _ in range(3):
        b.submit(caller())
    await b.turns()
    b.transport.answer(results=[ItemResult(), ItemResult(error=ItemFailed("no")), ItemResult()])
    assert b.ledger.answers == Counter(ok=2, failed=1)
    assert b.ledger.errors == Counter(item_failed=1)
    assert [(r.outcome, r.failed, r.rows) for r in b.ledger.batches] == [("ok", 1, 3)]


async def test_a_batch_tells_which_requests_failed_and_whether_by_their_input(bench, caller) -> None:
    b = bench(max_batch_size=8)
    for rows in (1, 2, 3):
        b.submit(caller(), rows=rows)
    await b.turns()
    bad, broken = ItemResult(error=DecodeError("no")), ItemResult(error=ItemFailed("no"))
    b.transport.answer(results=[ItemResult(), bad, broken])
    (record,) = b.ledger.batches
    assert [(rows, bad) for _, rows, bad in record.failed_requests] == [(2, True), (3, False)]
    assert [wait_s for wait_s, _, _ in record.failed_requests] == list(record.waits_s[1:])


async def test_a_served_batch_is_reported_with_label_wait_and_latency(bench, caller) -> None:
    b = bench(max_batch_size=2)
    told: list[tuple[Any, ...]] = []

    class Ear(Observer):
        def on_served(self, *what: Any) -> None:
            told.append(what)

    b.batcher._notifier = Notifier("m", "1", [Ear()])
    calls = [b.submit(caller()) for _ in range(3)]
    for call, label in zip(calls, ("default", "", "1"), strict=True):
        call.label = label
    await b.turns()
    b.transport.answer(results=[ItemResult(), ItemResult(error=ItemFailed("no"))])
    await b.turns()
    b.transport.answer(results=[ItemResult()])
    assert [(*names, labels) for *names, labels, _, _ in told] == [("m", "1", ["default"]), ("m", "1", ["1"])]
    for (*_, (wait_s,), (latency_s,)), call in zip(told, (calls[0], calls[2]), strict=True):
        assert wait_s == call.sent_s - call.entry.arrival_s
        assert 0 <= wait_s <= latency_s < 10
    assert calls[2].sent_s > calls[0].sent_s  # it was in a second batch


async def test_items_that_fail_inside_a_request_of_many_are_failures_and_the_request_is_answered(bench, caller) -> None:
    b = bench()
    b.submit(caller(), rows=3, many=True)
    await b.turns()
    b.transport.answer(results=[ItemResult(body=[1, ItemFailed("no"), ItemFailed("no")])])
    assert b.ledger.errors == Counter(item_failed=2)
    assert b.ledger.answers == Counter(ok=1)
    assert b.ledger.batches[0].failed == 2


async def test_a_split_request_counts_as_one_answer(bench, caller) -> None:
    b = bench(max_queue=16)
    b.submit(caller(), rows=10)
    await b.turns()
    while b.transport.sent:
        b.transport.answer(results=[ItemResult(body=[1])])
        await b.turns()
    assert b.ledger.answers == Counter(ok=1)
    assert len(b.ledger.batches) == 3


async def test_a_caller_that_leaves_while_it_runs_is_cancelled_and_not_answered(bench, caller) -> None:
    b = bench()
    call = b.submit(caller())
    await b.turns()
    call.cancel()
    assert b.ledger.ended == 0
    b.transport.answer()
    assert (b.ledger.reasons, b.ledger.answers) == (Counter(cancelled=1), Counter())


async def test_a_stream_that_a_death_cut_is_the_workers_and_not_its_callers(bench, caller) -> None:
    b = bench()
    sink = caller()
    b.submit(sink)
    await b.turns()
    b.transport.part([ItemResult(body=b"1", final=False)])
    await b.died()
    assert isinstance(sink.answer.error, WorkerDied)
    assert b.ledger.reasons == Counter(worker_died=1)


async def test_a_caller_that_left_before_the_death_is_cancelled(bench, caller) -> None:
    b = bench()
    call = b.submit(caller())
    await b.turns()
    call.cancel()
    await b.died()
    assert b.ledger.reasons == Counter(cancelled=1)


@pytest.mark.parametrize("idempotent", [True, False])
async def test_an_answer_before_the_death_of_its_worker_counts(bench, caller, idempotent) -> None:
    b = bench(idempotent=idempotent)
    early, late = caller(), caller()
    b.submit(early)
    b.submit(late)
    await b.turns()
    b.transport.part([ItemResult(body=b"1"), None])
    await b.died()
    assert early.answer.body == b"1"
    while b.transport.sent:
        b.transport.answer()
        await b.turns()
    assert b.ledger.answers["ok"] == 1 + idempotent
    assert b.ledger.reasons["worker_died"] == 1 - idempotent
    b.check()


async def test_close_counts_everybody_it_answers(bench, caller) -> None:
    b = bench()
    for _ in range(6):
        b.submit(caller())
    await b.turns()
    b.batcher.close(PenstockError("broken"))
    assert b.ledger.reasons == Counter(internal=6)
    assert b.batcher.pending == 0


async def test_the_batches_of_a_dead_worker_are_recorded(bench, caller) -> None:
    b = bench(depth=8)
    b.batcher.scheduler.prime([(n, 0.0001) for n in (1, 2, 4) for _ in range(3)])  # brief: a batch is sent ahead
    for _ in range(8):
        b.submit(caller())
    await b.turns()
    assert len(b.transport.sent) == 2
    await b.died()
    assert [(r.outcome, r.rows, r.ahead) for r in b.ledger.batches] == [("died", 4, False), ("lost", 4, True)]


async def test_a_partial_result_does_not_answer_the_whole_request(bench, caller) -> None:
    b = bench()
    sink = caller()
    b.submit(sink, rows=6)
    await b.turns()
    b.transport.part([ItemResult(body=[1, 2, 3, 4])])
    b.transport.answer(results=[None])
    await b.turns()
    assert not sink.parts
    b.transport.answer(results=[ItemResult(body=[5, 6])])
    assert sink.answer.body == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("error", "reason", "item"),
    [
        (BadRequest, "bad_request", Item(b"x", rows=0)),
        (BadRequest, "bad_request", Item(b"x", rows=1000)),
        (DeadlineExceeded, "expired", Item(b"x", budget_s=0.0)),
    ],
)
async def test_a_request_that_is_refused_has_come_and_is_counted_by_its_reason(error, reason, item) -> None:
    ledger = Ledger()
    async with Engine(observers=[ledger]) as engine:
        batching = BatchingConfig(max_batch_size=4, max_queue=8)
        await engine.load(
            "m", ModelConfig(target="", transport="inline", batching=batching), target=lambda items: items
        )
        with pytest.raises(error):
            engine.submit("m", None, item, lambda result: None)
        assert (ledger.arrivals, ledger.reasons) == (1, Counter({reason: 1}))


async def test_the_size_of_each_request_is_reported_even_if_the_queue_is_full() -> None:
    sizes: list[tuple[Any, ...]] = []

    class Sizes(Observer):
        def on_request(self, *what: Any) -> None:
            sizes.append(what)

    async with Engine(observers=[Sizes()]) as engine:
        batching = BatchingConfig(max_batch_size=4, max_queue=4)
        await engine.load(
            "m", ModelConfig(target="", transport="inline", batching=batching), target=lambda items: items
        )
        engine.submit("m", None, Item(b"four", rows=3), lambda result: None)
        with pytest.raises(QueueFull):
            engine.submit("m", None, Item(b"", rows=2), lambda result: None)
    assert sizes == [("m", "1", 3, 4), ("m", "1", 2, 0)]


async def test_an_unready_model_counts_refused_requests() -> None:
    ledger = Ledger()
    async with Engine(observers=[ledger]) as engine:
        handle = engine.prepare("m", ModelConfig(target="", transport="inline"), target=lambda items: items)
        with pytest.raises(ModelNotReady):
            handle.submit(Item(b"x"), lambda result: None)
        assert (ledger.arrivals, ledger.reasons) == (1, Counter(model_not_ready=1))


def answer(random: Random, item: Item) -> ItemResult:
    if random.random() < 0.2:
        return ItemResult(error=ItemFailed("no"))
    return ItemResult(body=[ItemFailed("no") if random.random() < 0.3 else 0 for _ in range(item.rows)])


async def play(b: Bench, random: Random, caller: Any) -> list[Any]:
    """Some sixty random events; the sinks of those that were accepted."""
    calls: list[Any] = []
    sinks: list[Any] = []
    for _ in range(60):
        event = random.choices(("submit", "cancel", "answer", "part", "died", "turn"), (8, 2, 5, 2, 2, 4))[0]
        if event == "submit":
            sink = caller()
            try:
                calls.append(b.submit(sink, rows=random.choice((1, 1, 2, 7)), many=random.random() < 0.3))
                sinks.append(sink)
            except QueueFull:
                pass
        elif event == "cancel" and calls:
            random.choice(calls).cancel()
        elif event == "answer" and b.transport.sent:
            items = b.transport.sent[0][0].items
            b.transport.answer(results=[answer(random, item) for item in items])
        elif event == "part" and b.transport.sent:
            batch, on_part = b.transport.sent.pop(0)
            last = [answer(random, item) if random.random() < 0.3 else None for item in batch.items]
            first = [
                None if early is None and random.random() < 0.5 else early or ItemResult(body=[0], final=False)
                for early in last
            ]
            on_part(BatchPart(batch.id, results=first, final=False))
            if random.random() < 0.5:
                b.transport.sent.insert(0, (batch, on_part))
                await b.died(random.random() < 0.7)
            else:
                rest = [
                    answer(random, i) if early is None else None for i, early in zip(batch.items, last, strict=True)
                ]
                on_part(BatchPart(batch.id, results=rest))
        elif event == "died":
            await b.died(random.random() < 0.7)
        elif event == "turn":
            await b.turns()
        b.check()
    return [s for s, c in zip(sinks, calls, strict=True) if c.end != "cancelled"]


@pytest.mark.parametrize("seed", range(60))
async def test_requests_equal_answers_rejections_and_requests_in_flight(bench, caller, seed) -> None:
    random = Random(seed)
    b = bench(depth=1 + seed % 2, idempotent=seed % 3 > 0, max_queue=16)
    stayed = await play(b, random, caller)
    if seed % 5 == 0:
        b.batcher.close(PenstockError("stopped"))
    for _ in range(100):
        await b.turns()
        while b.transport.sent:
            b.transport.answer()
    b.check()
    assert b.batcher.pending == 0
    assert all(s.answer.final for s in stayed)
