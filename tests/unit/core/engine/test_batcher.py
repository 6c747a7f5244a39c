import asyncio
import gc
import time
import weakref
from typing import Any

import pytest

from penstock.core.batching.entry import INF
from penstock.core.engine.batcher import Batcher
from penstock.core.wire.slabs import SlabPool
from penstock.errors import DeadlineExceeded, ItemFailed, Quarantined, QueueTimeout, RunTimeout, WorkerDied
from penstock.types import Item, ItemResult


def submit(batcher: Batcher, sink: Any, payload: Any = b"x", **fields: Any) -> Any:
    return batcher.submit(Item(payload, **fields), sink, "", len(payload) if payload else 0)


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def died(batcher: Batcher, transport: Any, started: bool = True, error: WorkerDied | None = None) -> None:
    """The worker ends under its batch, and is back at once."""
    transport.answer(results=[], error=error or WorkerDied("signal 9"), started=started)
    batcher.scheduler.slot_down(0, 0.0)
    batcher.scheduler.slot_up(0, 0.0)
    batcher.wake()
    await turns()


async def test_requests_of_one_loop_iteration_share_a_batch(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    callers = [caller() for _ in range(3)]
    for i, sink in enumerate(callers):
        submit(batcher, sink, b"%d" % i)
    await turns()
    assert [len(b.items) for b, _ in transport.sent] == [3]
    transport.answer()
    assert [c.answer.body for c in callers] == [b"0", b"1", b"2"]
    assert batcher.pending == 0


async def test_listeners_are_called_before_a_batch_is_sent(make_batcher, transport, caller) -> None:
    batcher, heard = make_batcher(), []
    batcher.on_dispatch = lambda dispatch: heard.append((dispatch.rows, len(transport.sent)))
    submit(batcher, caller(), rows=3)
    await turns()
    assert heard == [(3, 0)]
    assert (batcher.scheduler.running_rows, batcher.scheduler.queued_rows, batcher.scheduler.queued_bytes) == (3, 0, 0)
    transport.answer()
    assert batcher.scheduler.running_rows == 0


async def test_a_sink_that_raises_does_not_cost_others_their_answer(make_batcher, transport, caller) -> None:
    batcher = make_batcher()

    def broken(result: ItemResult) -> None:
        raise RuntimeError("broken")

    after = caller()
    submit(batcher, broken)
    submit(batcher, after)
    await turns()
    transport.answer()
    assert after.answer.error is None


async def test_a_deadline_that_passes_in_the_queue_is_answered_and_never_run(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    submit(batcher, caller())
    await turns()
    late = caller()
    submit(batcher, late, budget_s=0.02)
    await asyncio.sleep(0.1)
    transport.answer()
    await turns()
    assert isinstance(late.answer.error, DeadlineExceeded)
    assert not transport.sent


async def test_a_deadline_is_kept_during_the_run_and_the_late_answer_ignored(make_batcher, transport, caller) -> None:
    batcher, late, free = make_batcher(), caller(), caller()
    submit(batcher, late, budget_s=0.02)
    submit(batcher, free)
    submit(batcher, caller(), budget_s=60.0)
    await turns()
    await asyncio.sleep(0.1)
    assert isinstance(late.answer.error, DeadlineExceeded)
    assert "during the run" in late.answer.error.message
    assert batcher.pending == 3  # the worker still reads its payload
    transport.answer()
    assert free.answer.error is None
    assert batcher.pending == 0
    del late.parts[:]
    submit(batcher, late, budget_s=0.02)
    await turns()
    await asyncio.sleep(0.1)
    await died(batcher, transport)
    assert not transport.sent  # it does not run again


async def test_the_deadlines_of_ended_requests_cause_no_turns(make_batcher, transport, caller) -> None:
    batcher, at, answered = make_batcher(), [], asyncio.Event()
    for budget_s in (0.02, 0.03, 0.04, 0.05):
        submit(batcher, caller(), budget_s=budget_s)
    await turns()
    transport.answer()
    submit(batcher, lambda _: answered.set(), budget_s=0.2)
    await turns()
    began = time.monotonic()
    batcher.on_turn = at.append
    await answered.wait()
    assert len([now for now in at if now < began + 0.1]) <= 1  # the timer of the first one was set before


@pytest.mark.parametrize(("timeout_s", "wait_s"), [(0.02, None), (0.02, 60.0), (60.0, 0.02)])
async def test_the_shorter_wait_of_model_and_request_ends_what_waits(
    make_batcher, transport, caller, timeout_s, wait_s
) -> None:
    batcher = make_batcher(timeout_s=timeout_s)
    running, late, answered = caller(), caller(), asyncio.Event()
    submit(batcher, running, wait_s=wait_s)
    await turns()
    submit(batcher, lambda result: (late(result), answered.set()), wait_s=wait_s)
    async with asyncio.timeout(20):
        await answered.wait()
    assert isinstance(late.answer.error, QueueTimeout)
    assert "expired in the queue after 20000 us" in late.answer.error.message
    transport.answer()  # of the request that was started in time
    assert running.answer.error is None


async def test_a_caller_that_leaves_the_queue_is_not_run(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    submit(batcher, caller())
    await turns()
    gone = caller()
    submit(batcher, gone).cancel()
    transport.answer()
    await turns()
    assert not transport.sent
    assert not gone.parts
    assert batcher.pending == 0


async def test_a_caller_that_leaves_while_running_gets_nothing_and_others_do(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    gone, stays = caller(), caller()
    call = submit(batcher, gone)
    submit(batcher, stays)
    await turns()
    call.cancel()
    transport.answer()
    assert not gone.parts
    assert stays.answer
    assert batcher.pending == 0


async def test_a_slab_is_given_back_when_its_request_is_answered_cancelled_or_refused(
    make_batcher, transport, caller
) -> None:
    pool = SlabPool(2**20)
    batcher = make_batcher(max_queue=1)

    def slab() -> Item:
        payload = pool.allocate(100_000)
        assert payload is not None
        return Item(payload)

    batcher.submit(slab(), caller(), "", 100_000)
    await turns()
    call = batcher.submit(slab(), caller(), "", 100_000)
    assert pool.in_use_bytes >= 200_000
    call.cancel()
    transport.answer()
    await turns()
    assert pool.in_use_bytes == 0
    pool.close()


async def test_a_batch_that_hung_runs_again_with_little_time_and_one_that_crashed_with_all(
    make_batcher, transport, caller
) -> None:
    batcher = make_batcher(run_timeout_s=20)
    for error, limits_s in ((RunTimeout("hangs"), [2.0, 2.0]), (WorkerDied("signal 9"), [INF, INF])):
        for _ in range(4):
            submit(batcher, caller())
        await turns()
        assert transport.sent[0][0].limit_s == INF
        await died(batcher, transport, error=error)
        found = []
        while transport.sent:
            found.append(transport.answer().limit_s)
            await turns()
        assert found == limits_s
    batcher.scheduler.prime([(rows, 1.0 * rows) for rows in (1, 2, 4) * 5])
    for _ in range(4):
        submit(batcher, caller())
    await turns()
    await died(batcher, transport, error=RunTimeout("hangs"))
    assert transport.sent[0][0].limit_s == pytest.approx(20, rel=0.2)  # ten times what two rows take


async def test_a_stream_that_was_cut_by_a_death_ends_with_the_error(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    sink = caller()
    submit(batcher, sink)
    await turns()
    transport.part([ItemResult(body=b"1", final=False)])
    await died(batcher, transport)
    await turns()
    assert [p.body for p in sink.parts[:-1]] == [b"1"]
    assert isinstance(sink.answer.error, WorkerDied)
    assert not transport.sent


async def test_streamed_parts_come_in_order_and_end_once(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    one, two = caller(), caller()
    submit(batcher, one)
    submit(batcher, two)
    await turns()
    transport.part([ItemResult(body=b"a", final=False), None])
    transport.part([ItemResult(body=b"b", final=False), ItemResult(body=b"z")])
    transport.answer(results=[ItemResult(body=b""), None])
    assert [p.body for p in one.parts] == [b"a", b"b", b""]
    assert [p.body for p in two.parts] == [b"z"]


async def test_a_request_larger_than_the_batch_is_split_and_joined_in_row_order(
    make_batcher, transport, caller
) -> None:
    batcher = make_batcher(max_batch_size=4, max_queue=32)
    sink = caller()
    submit(batcher, sink, b"big", rows=10)
    await turns()
    rows = []
    while transport.sent:
        batch = transport.sent[0][0]
        rows += [(i.start, i.stop) for i in batch.items]
        transport.answer(results=[ItemResult(body=[(i.start, i.stop)]) for i in batch.items])
        await turns()
    assert rows == [(0, 4), (4, 8), (8, 10)]
    assert sink.answer.body == [(0, 4), (4, 8), (8, 10)]
    assert batcher.pending == 0


async def test_a_failed_part_fails_the_request_once_and_purges_its_siblings(make_batcher, transport, caller) -> None:
    batcher = make_batcher(max_batch_size=4, max_queue=32)
    sink = caller()
    submit(batcher, sink, b"big", rows=10)
    await turns()
    transport.answer(results=[ItemResult(error=ItemFailed("no"))])
    await turns()
    assert isinstance(sink.answer.error, ItemFailed)
    assert not transport.sent
    assert batcher.pending == 0


async def test_close_answers_every_waiting_caller(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    running, queued = caller(), caller()
    submit(batcher, running)
    await turns()
    submit(batcher, queued)
    batcher.close(WorkerDied("stopped"))
    assert running.answer.error
    assert queued.answer.error


async def test_drain_returns_when_the_last_answer_is_out(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    submit(batcher, caller())
    await turns()
    assert not await batcher.drain(0.01)
    drained = asyncio.ensure_future(batcher.drain(5))
    await turns()
    transport.answer()
    assert await drained


async def test_drain_ends_when_the_last_caller_leaves_the_queue(make_batcher, transport, caller) -> None:
    batcher = make_batcher()
    batcher.scheduler.slot_down(0, 0.0)
    call = batcher.submit(Item("a"), caller(), "", 0)
    draining = asyncio.create_task(batcher.drain(5.0))
    await asyncio.sleep(0)
    call.cancel()
    async with asyncio.timeout(1.0):
        assert await draining


async def test_an_unsendable_batch_fails_and_the_next_one_runs(make_batcher, transport, caller, caplog) -> None:
    batcher = make_batcher()
    send, transport.send = transport.send, None
    lost = caller()
    batcher.submit(Item("a"), lost, "", 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert lost.answer.error.code == "internal"
    assert "dispatch_failed" in caplog.text
    transport.send = send
    good = caller()
    batcher.submit(Item("b"), good, "", 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    transport.answer()
    assert good.answer.body == "b"
    assert batcher.pending == 0


async def test_a_broken_scheduler_answers_every_caller_and_reports(make_batcher, transport, caller, caplog) -> None:
    batcher = make_batcher()
    told: list[bool] = []
    batcher.on_broken = lambda: told.append(True)
    waits = caller()
    batcher.submit(Item("a"), waits, "", 0)

    def poll(now: float) -> list[object]:
        raise KeyError("a bug")

    batcher.scheduler.poll = poll
    await asyncio.sleep(0)
    assert waits.answer.error.code == "internal"
    assert told == [True]
    assert batcher.pending == 0
    assert "batcher_broken" in caplog.text


async def test_an_answered_request_is_freed_without_the_garbage_collector(make_batcher, transport, caller) -> None:
    class Payload:
        nbytes = 0

        def __len__(self) -> int:
            return 1

    batcher = make_batcher()
    payload = Payload()
    seen = weakref.ref(payload)
    gc.disable()
    try:
        submit(batcher, caller(), payload)
        await turns()
        transport.answer(results=[ItemResult(body=b"done")])
        del payload
        await turns()
        assert seen() is None
    finally:
        gc.enable()


async def test_a_sink_that_raises_on_a_part_does_not_cost_others_theirs(
    make_batcher, transport, caller, caplog
) -> None:
    batcher = make_batcher()

    def broken(result: ItemResult) -> None:
        raise RuntimeError("the reader of this stream has a bug")

    good = caller()
    submit(batcher, broken)
    submit(batcher, good)
    await turns()
    transport.part([ItemResult(body=b"a", final=False), ItemResult(body=b"b", final=False)])
    transport.answer()
    assert [p.body for p in good.parts] == [b"b", b"x"]
    assert "sink_failed" in caplog.text
    assert batcher.pending == 0


async def test_a_split_request_that_streams_ends_without_a_join(make_batcher, transport, caller) -> None:
    batcher = make_batcher(max_batch_size=4, max_queue=32)
    sink = caller()
    submit(batcher, sink, b"big", rows=8)
    await turns()
    while transport.sent:
        transport.part([ItemResult(body=b"part", final=False)])
        transport.answer(results=[ItemResult(body=b"")])
        await turns()
    assert [p.body for p in sink.parts] == [b"part", b"part", b""]
    assert sink.answer.error is None


# ---- payloads that kill workers


async def test_a_payload_that_killed_two_workers_is_refused_also_where_it_waits(
    make_batcher, transport, caller
) -> None:
    batcher = make_batcher(max_batch_size=1, quarantine_s=60.0)
    killer, same, good = caller(), caller(), caller()
    submit(batcher, killer, b"poison")
    submit(batcher, same, b"poison")
    submit(batcher, good, b"good")
    await turns()
    for _ in range(2):
        assert transport.sent[0][0].items[0].payload == b"poison"
        await died(batcher, transport)
    assert isinstance(killer.answer.error, WorkerDied)
    assert isinstance(same.answer.error, Quarantined)
    transport.answer()
    assert good.answer.body == b"good"
    with pytest.raises(Quarantined):
        submit(batcher, caller(), b"poison")
    assert batcher.pending == 0


async def test_a_suspect_runs_apart_until_a_worker_survives_it(make_batcher, transport, caller) -> None:
    batcher = make_batcher(max_batch_size=4, quarantine_s=60.0, idempotent=False)

    async def sizes(*payloads: bytes) -> list[int]:
        for payload in payloads:
            submit(batcher, caller(), payload)
        await turns()
        found = []
        while transport.sent:
            found.append(len(transport.answer().items))
            await turns()
        return found

    for payload in (b"a", b"poison"):
        submit(batcher, caller(), payload)
    await turns()
    await died(batcher, transport)
    assert await sizes(b"a", b"b", b"a", b"c") == [2, 2]
    assert await sizes(b"a", b"b", b"a", b"c") == [4]


async def test_the_row_that_kills_its_worker_fails_alone_in_a_request_of_many(make_batcher, transport, caller) -> None:
    batcher = make_batcher(max_batch_size=4)
    sink = caller()
    batcher.submit(Item(["a", "bad", "b"], rows=3, many=True), sink, "", 1)
    await turns()
    while transport.sent:
        item = transport.sent[0][0].items[0]
        rows = item.payload[item.start : item.stop] if item.stop >= 0 else item.payload
        if "bad" in rows:
            await died(batcher, transport)
        else:
            transport.answer(results=[ItemResult(rows)])
            await turns()
    one, bad, two = sink.answer.body
    assert (one, two, type(bad)) == ("a", "b", WorkerDied)
    assert batcher.pending == 0


async def test_without_leave_to_run_again_a_death_is_the_result_of_the_items_that_ran(
    make_batcher, transport, caller
) -> None:
    batcher = make_batcher(max_batch_size=2, idempotent=False)
    sink = caller()
    batcher.submit(Item(["a", "b", "c"], rows=3, many=True), sink, "", 1)
    await turns()
    await died(batcher, transport)
    transport.answer(results=[ItemResult(["c"])])
    assert [type(value) for value in sink.answer.body] == [WorkerDied, WorkerDied, str]
