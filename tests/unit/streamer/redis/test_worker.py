import asyncio
import contextlib
import pickle
import threading
import time
from types import SimpleNamespace

import pytest

from penstock.errors import DeadlineExceeded, ModelNotReady, WorkerDied
from penstock.streamer.redis import worker as worker_module
from penstock.streamer.redis.codec import MalformedMessage, decode, encode
from penstock.streamer.redis.protocol import GROUP, VERSION, RequestHeader, dump, load_replies

CLIENT = "0123456789abcdef" * 2
QUEUE = "{penstock:}:queue"


def same(items):
    return items


class Gate:
    """A model that records its batches, and answers when it is opened."""

    def __init__(self):
        self.batches = []
        self.opened = threading.Event()

    def predict(self, items):
        self.batches.append(list(items))
        assert self.opened.wait(20)
        return items


def raw(redis_server):
    """A client that does not decode replies."""
    from redis import Redis

    return Redis(port=redis_server.port)


async def test_requests_run_in_order_of_arrival(work, asker, redis_server, until):
    seen = []

    def note(items):
        seen.extend(items)
        return items

    client = asker()
    answers = [client.put(n) for n in range(20)]
    await until(lambda: redis_server.ask.xlen(QUEUE) == 20)
    await work(note, batch=1)
    await asyncio.gather(*answers)
    assert seen == list(range(20))


async def test_requests_with_an_earlier_deadline_run_first(work, asker, redis_server, until):
    gate = Gate()
    client = asker()
    await work(gate, batch=8)
    running = client.put("running")
    await until(lambda: gate.batches)
    answers = [client.put("late", budget_s=19), client.put("early", budget_s=18)]
    await until(lambda: redis_server.ask.xpending(QUEUE, GROUP)["pending"] == 3)
    gate.opened.set()
    await asyncio.gather(running, *answers)
    assert gate.batches == [["running"], ["early", "late"]]


async def test_a_request_keeps_its_priority_and_has_a_deadline_only_if_its_caller_names_one(work, asker, monkeypatch):
    engine, received = (await work(same)).engine, []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *given: (received.append(given[2]), submit(*given))[1])
    await asker().ask(1, budget_s=15.0, priority=2)
    await asker().ask(2, priority=999)
    await asker().ask(3)
    assert [item.priority for item in received] == [2, 255, 0]
    assert 0 < received[0].budget_s <= 15
    assert [item.budget_s for item in received[1:]] == [None, None]


async def test_a_worker_reads_one_batch_ahead_and_leaves_the_rest_to_other_workers(work, asker, redis_server, until):
    gate = Gate()
    client = asker()
    answers = [client.put(n) for n in range(40)]
    await work(gate, batch=8)
    await until(lambda: gate.batches and redis_server.ask.xpending(QUEUE, GROUP)["pending"] == 16)
    await asyncio.sleep(0.1)
    assert redis_server.ask.xpending(QUEUE, GROUP)["pending"] == 16
    await work(same, batch=8)
    await until(lambda: sum(a.done() for a in answers) >= 24)
    gate.opened.set()
    await asyncio.gather(*answers)


async def test_batches_are_full_when_enough_requests_wait(work, asker):
    gate = Gate()
    gate.opened.set()
    client = asker()
    answers = [client.put(n) for n in range(64)]
    await work(gate, batch=8)
    await asyncio.gather(*answers)
    assert [len(b) for b in gate.batches] == [8] * 8


async def test_an_answered_request_leaves_nothing_in_the_queue(work, asker, redis_server, until):
    await work(same)
    await asker().ask(list(range(20)))
    await until(lambda: redis_server.ask.xpending(QUEUE, GROUP)["pending"] == 0)
    assert redis_server.ask.xlen(QUEUE) == 0


async def test_an_expired_request_is_answered_and_does_not_run(work, redis_server, until):
    gate = Gate()
    gate.opened.set()
    redis_server.ask.xadd(QUEUE, {"h": dump(RequestHeader(VERSION, CLIENT, 1, 1)), "p": encode("late")})
    await asyncio.sleep(0.01)
    await work(gate)
    replies = f"{{penstock:}}:replies:{CLIENT}"
    await until(lambda: redis_server.ask.exists(replies))
    (_, fields), *_ = raw(redis_server).xrange(replies)
    (answer,) = load_replies(fields[b"a"])
    assert (answer.number, answer.error.code) == (1, DeadlineExceeded.code)
    assert gate.batches == []
    assert 0 < redis_server.ask.ttl(replies) <= 120


async def test_a_broker_whose_clock_is_set_back_makes_requests_expire_for_a_moment_only(work, asker, monkeypatch):
    ahead_s = 0.0
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    await work(same, lease_s=0.3)
    client = asker()
    assert await client.ask(1, budget_s=15.0) == 1
    ahead_s = 3600.0  # of the worker's clock: as if the broker's clock were set back
    async with asyncio.timeout(20):
        found = 0
        while found != 2:
            with contextlib.suppress(DeadlineExceeded):
                found = await client.ask(2, budget_s=15.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"foreign": "message"},
        {"h": b"\xff", "p": encode(1)},
        {"h": dump(RequestHeader(VERSION, CLIENT, 1, 60_000))},
        {"h": dump(RequestHeader(VERSION, CLIENT, 1, 60_000)), "p": encode(1), "x": b"more"},
        {"h": dump(RequestHeader(99, CLIENT, 1, 60_000)), "p": encode(1)},
        {"h": pickle.dumps(print), "p": pickle.dumps(print)},
    ],
    ids=["foreign", "bad head", "no payload", "more fields", "version", "pickle"],
)
async def test_a_foreign_message_becomes_a_dead_letter_and_does_not_run(work, asker, redis_server, until, fields):
    gate = Gate()
    gate.opened.set()
    redis_server.ask.xadd(QUEUE, fields)
    await work(gate)
    await until(lambda: redis_server.ask.xlen("{penstock:}:dead") == 1)
    ((_, letter),) = raw(redis_server).xrange("{penstock:}:dead")
    for name, value in fields.items():
        assert letter[name.encode()] == (value.encode() if isinstance(value, str) else value)
    assert letter[b"why"]
    assert gate.batches == []
    await until(lambda: redis_server.ask.xlen(QUEUE) == 0)
    assert await asker().ask(1) == 1


async def test_a_malformed_value_does_not_run_and_its_caller_gets_an_error(work, redis_server, until):
    gate = Gate()
    gate.opened.set()
    redis_server.ask.xadd(QUEUE, {"h": dump(RequestHeader(VERSION, CLIENT, 5, 60_000)), "p": pickle.dumps(print)})
    await work(gate)
    await until(lambda: redis_server.ask.xlen("{penstock:}:dead") == 1)
    ((_, fields),) = raw(redis_server).xrange(f"{{penstock:}}:replies:{CLIENT}")
    (answer,) = load_replies(fields[b"a"])
    assert (answer.number, answer.error.code) == (5, MalformedMessage.code)
    assert gate.batches == []


async def test_the_caller_of_a_message_without_a_value_gets_an_error(work, redis_server, until):
    redis_server.ask.xadd(QUEUE, {"h": dump(RequestHeader(VERSION, CLIENT, 6, 60_000)), "q": b"?"})
    await work(same)
    await until(lambda: redis_server.ask.xlen("{penstock:}:dead") == 1)
    ((_, fields),) = raw(redis_server).xrange(f"{{penstock:}}:replies:{CLIENT}")
    (answer,) = load_replies(fields[b"a"])
    assert (answer.number, answer.error.code) == (6, MalformedMessage.code)


async def test_dead_letters_are_bounded(work, redis_server, until):
    pipe = redis_server.ask.pipeline()
    for n in range(1500):
        pipe.xadd(QUEUE, {"n": n})
    pipe.execute()
    await work(same, batch=64)
    await until(lambda: redis_server.ask.xlen(QUEUE) == 0)
    assert redis_server.ask.xlen("{penstock:}:dead") < 1200


async def test_another_worker_runs_the_requests_of_a_dead_worker(work, asker, until):
    gate = Gate()
    first = await work(gate, lease_s=0.3)
    client = asker()
    answer = client.put("x")
    await until(lambda: gate.batches)
    await first.die()
    await work(same, lease_s=0.3)
    assert (await answer).body == "x"
    gate.opened.set()


async def test_an_item_in_two_worker_deaths_becomes_a_dead_letter_and_its_caller_gets_an_error(
    work, asker, redis_server, until
):
    client = asker()
    answer = client.put("poison")
    for _ in range(2):
        gate = Gate()
        worker = await work(gate, lease_s=0.3)
        await until(lambda gate=gate: gate.batches)
        await worker.die()
        gate.opened.set()
    last = Gate()
    await work(last, lease_s=0.3)
    error = (await answer).error
    assert isinstance(error, WorkerDied)
    assert "2 workers died" in str(error)
    assert last.batches == []
    await until(lambda: redis_server.ask.xlen("{penstock:}:dead") == 1)
    ((_, letter),) = raw(redis_server).xrange("{penstock:}:dead")
    assert decode(letter[b"p"]) == "poison"
    last.opened.set()


async def test_a_lease_is_renewed_while_the_model_runs(work, asker, redis_server, until):
    gate = Gate()
    await work(gate, lease_s=0.3)
    answer = asker().put("slow")
    await until(lambda: gate.batches)
    other = Gate()
    await work(other, lease_s=0.3)
    await asyncio.sleep(1.0)
    gate.opened.set()
    assert (await answer).body == "slow"
    assert other.batches == []


async def test_a_stopping_worker_answers_running_requests_and_hands_back_the_rest(work, asker, redis_server, until):
    gate = Gate()
    gate.opened.set()
    first = await work(gate, batch=2)
    client = asker()
    assert await client.ask("before") == "before"
    gate.opened.clear()
    answers = [client.put(n) for n in range(4)]
    await until(lambda: len(gate.batches) > 1 and redis_server.ask.xpending(QUEUE, GROUP)["pending"] == 4)
    first.stopping.set()
    await asyncio.sleep(0.1)
    assert not first.task.done()
    gate.opened.set()
    await first.stop()
    await asyncio.gather(*answers)
    assert [a.result().body for a in answers] == [0, 1, 2, 3]
    assert redis_server.ask.exists(QUEUE) == 0  # the last one leaves no empty queue behind


async def test_a_request_that_did_not_run_counts_as_no_death_and_runs_elsewhere(
    work, asker, redis_server, until, monkeypatch
):
    first = await work(same)
    client = asker()

    def refuse(*arguments, **keywords):
        raise ModelNotReady("no instance is up")

    monkeypatch.setattr(first.engine, "submit", refuse)
    answer = client.put("x")
    await until(lambda: first.worker.statistics()["released"] == 1)
    assert redis_server.ask.xpending_range(QUEUE, GROUP, "-", "+", 5)[0]["times_delivered"] == 0
    await first.stop()
    await work(same, lease_s=0.3)
    assert (await answer).body == "x"


async def test_prefixes_separate_two_models_on_one_broker(work, asker):
    await work(lambda items: [("a", x) for x in items], prefix="a")
    await work(lambda items: [("b", x) for x in items], prefix="b")
    a, b = asker("a"), asker("b")
    found = await asyncio.gather(*(c.ask(n) for n in range(20) for c in (a, b)))
    assert found == [(name, n) for n in range(20) for name in "ab"]


async def test_dead_consumers_are_removed(work, asker, redis_server, until, monkeypatch):
    monkeypatch.setattr("penstock.streamer.redis.worker.BrokerWorker._idle_ms", 50)
    first = await work(same, lease_s=0.3)
    await asker().ask(1)
    await first.die()
    await asyncio.sleep(0.1)
    second = await work(same, lease_s=0.3)
    assert await asker().ask(1) == 1
    await second.stop()
    assert redis_server.ask.exists(QUEUE) == 0


async def test_a_reply_key_of_the_wrong_type_costs_only_its_own_client(work, asker, redis_server, until):
    gate = Gate()
    await work(gate, batch=2)
    poisoned, other = asker(), asker()
    first = poisoned.put("first", budget_s=15)
    await until(lambda: gate.batches)
    redis_server.ask.set(f"{{penstock:}}:replies:{poisoned.client.id}", "other data")
    answers = [poisoned.put("second", budget_s=15), other.put("third")]
    await until(lambda: redis_server.ask.xpending(QUEUE, GROUP)["pending"] == 3)
    gate.opened.set()
    assert (await answers[1]).body == "third"
    await until(lambda: redis_server.ask.xlen(QUEUE) == 0)
    assert redis_server.ask.ttl(f"{{penstock:}}:replies:{poisoned.client.id}") == -1
    assert await other.ask(1) == 1
    assert not first.done()


async def test_a_dead_letter_key_of_the_wrong_type_does_not_end_the_worker(work, asker, redis_server, until):
    redis_server.ask.set("{penstock:}:dead", "other data")
    redis_server.ask.xadd(QUEUE, {"foreign": "message"})
    await work(same)
    assert await asker().ask(1) == 1
    await until(lambda: redis_server.ask.xlen(QUEUE) == 0)
