import asyncio

import numpy as np
import pytest

from penstock.core.engine.load import CallersLoad
from penstock.errors import BadRequest, BrokerUnavailable, DeadlineExceeded, QueueFull
from penstock.streamer.redis import client as client_module
from penstock.streamer.redis.connection import RedisConnection
from penstock.streamer.redis.protocol import SUBMIT


@pytest.fixture
def submissions(monkeypatch):
    """The calls of the script that adds entries to a queue."""
    calls, run = [], RedisConnection.run

    async def counted(self, script, keys, arguments):
        if script is SUBMIT:
            calls.append(arguments)
        return await run(self, script, keys, arguments)

    monkeypatch.setattr(RedisConnection, "run", counted)
    return calls


def double(items):
    return [x * 2 for x in items]


async def test_requests_of_one_pass_of_the_loop_form_one_submission(work, asker, submissions):
    await work(double)
    client = asker()
    await client.ask(1)
    submissions.clear()
    answers = [client.put(n) for n in range(50)]
    await asyncio.gather(*answers)
    assert [a.result().body for a in answers] == [2 * n for n in range(50)]
    assert len(submissions) == 1


async def test_requests_of_callers_that_keep_a_processor_busy_gather(work, asker, submissions, monkeypatch):
    await work(double)
    client = asker()
    await client.ask(0)
    monkeypatch.setattr(CallersLoad, "look", lambda load, clocks: True)
    monkeypatch.setattr(client_module, "GATHER_S", 0.3)
    submissions.clear()
    answers = []
    for n in range(20):
        answers.append(client.put(n))
        await asyncio.sleep(0)
    await asyncio.gather(*answers)
    assert len(submissions) == 1


async def test_a_large_call_is_sent_in_bounded_submissions(work, asker, submissions):
    await work(double, batch=64)
    client = asker()
    assert await client.ask(list(range(1200))) == [2 * n for n in range(1200)]
    assert len(submissions) == 3


async def test_a_value_that_cannot_be_sent_fails_alone_and_the_error_names_its_type(work, asker):
    await work(double)
    answers = await asker().ask([1, object(), np.arange(2)])
    assert answers[0] == 2
    assert answers[2].tolist() == [0, 2]
    assert isinstance(answers[1], BadRequest)
    assert "builtins.object" in str(answers[1])


async def test_a_full_queue_refuses_at_once(asker, redis_server, until):
    client, other = asker(max_queue=10), asker(max_queue=10)
    held = client.put(list(range(8)))
    await until(lambda: redis_server.ask.xlen("{penstock:}:queue") == 8)
    with pytest.raises(QueueFull, match="8 of 10") as elsewhere:
        await other.ask([1, 2, 3])
    with pytest.raises(QueueFull, match="8 of 10") as here:
        client.put([1, 2, 3])
    assert all(0.1 <= caught.value.retry_after_s <= 60 for caught in (elsewhere, here))
    assert redis_server.ask.xlen("{penstock:}:queue") == 8
    held.call.cancel()


async def test_a_full_queue_names_the_age_of_its_oldest_entry_as_the_time_to_retry(asker, redis_server):
    seconds, _ = redis_server.ask.time()
    redis_server.ask.xadd("{penstock:}:queue", {"h": "", "p": ""}, id=f"{(seconds - 30) * 1000}-0")
    with pytest.raises(QueueFull, match="1 of 1 items") as caught:
        await asker(max_queue=1).ask([1])
    assert 29 <= caught.value.retry_after_s < 60


async def test_a_call_that_never_fits_into_the_queue_is_a_bad_request(asker):
    with pytest.raises(BadRequest, match="the call has 1 items, but the queue may hold 0"):
        await asker(max_queue=0).ask([1])


async def test_waiting_payloads_are_bounded_in_bytes(asker):
    client = asker(max_bytes=1000)
    client.put(b"x" * 600)
    with pytest.raises(QueueFull, match="of 1000 bytes"):
        await client.ask(b"x" * 600)


async def test_without_a_worker_the_deadline_holds_and_the_entry_leaves_the_queue(asker, redis_server, until):
    client = asker()
    with pytest.raises(DeadlineExceeded, match="no response came in time"):
        await client.ask(1, budget_s=0.05)
    await until(lambda: redis_server.ask.xlen("{penstock:}:queue") == 0)
    assert client.client.statistics("m")["waiting"] == 0


async def test_a_cancelled_request_does_not_run(work, asker, redis_server, until):
    seen = []

    def note(items):
        seen.extend(items)
        return items

    client = asker()
    gone, kept = client.put("gone"), client.put("kept")
    await until(lambda: redis_server.ask.xlen("{penstock:}:queue") == 2)
    gone.call.cancel()
    await until(lambda: redis_server.ask.xlen("{penstock:}:queue") == 1)
    await work(note)
    assert (await kept).body == "kept"
    assert seen == ["kept"]
    assert not gone.done()


async def test_close_answers_waiting_calls_and_deletes_the_clients_keys(work, asker, redis_server):
    await work(double)
    client = asker()
    assert await client.ask(1) == 2
    waiting = client.put(2)
    await client.client.close(5)
    assert (await waiting).body == 4
    assert redis_server.ask.keys("*") == ["{penstock:}:queue"]


@pytest.mark.parametrize("restarts", [False, True], ids=["flushed", "restarted"])
async def test_requests_that_a_broker_lost_are_sent_again(work, asker, redis_server, until, restarts):
    client = asker()
    answers = [client.put(n) for n in range(20)]
    await until(lambda: redis_server.ask.xlen("{penstock:}:queue") == 20)
    if restarts:
        redis_server.kill()
        redis_server.start()
    else:
        redis_server.ask.flushall()
        await until(lambda: redis_server.ask.exists("{penstock:}:queue"))
    await work(double)
    await asyncio.gather(*answers)
    assert [a.result().body for a in answers] == [2 * n for n in range(20)]
    assert client.client.statistics("m")["resent"] == 20


async def test_requests_that_a_broker_lost_are_sent_again_while_others_are_submitted(
    work, asker, redis_server, until, monkeypatch
):
    monkeypatch.setattr(client_module, "SESSION_CHECK_S", 0.1)
    client = asker()
    lost = client.put(1)
    await until(lambda: client.client._sender._connects)  # it has looked at the session
    redis_server.ask.flushall()
    later = client.put(2)  # by which the broker knows the client again
    await work(double)
    assert [(await answer).body for answer in (lost, later)] == [2, 4]


async def test_a_submission_whose_reply_was_lost_is_not_added_twice(work, asker, redis_server, until, monkeypatch):
    client = asker()
    run = RedisConnection.run
    results = []

    async def lose_one(self, script, keys, arguments):
        found = await run(self, script, keys, arguments)
        if script is SUBMIT:
            results.append(found)
            if len(results) == 1:
                raise BrokerUnavailable("cut")
        return found

    monkeypatch.setattr(RedisConnection, "run", lose_one)
    answers = [client.put(n) for n in range(5)]
    await until(lambda: len(results) == 2)
    assert results[0] == results[1]
    await work(double)
    await asyncio.gather(*answers)
    assert redis_server.ask.xinfo_stream("{penstock:}:queue")["entries-added"] == 5
    assert [a.result().body for a in answers] == [0, 2, 4, 6, 8]


async def test_the_first_call_waits_while_redis_loads_its_data(work, asker, redis_server):
    refused = 0

    async def pipe(reader, writer):
        while data := await reader.read(2**16):
            writer.write(data)
        writer.close()

    async def loading(reader, writer):
        nonlocal refused
        if refused < 3:
            await reader.read(2**16)
            refused += 1
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
            writer.close()
            return
        host, port = redis_server.address.split(":")
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    await work(double)
    async with await asyncio.start_server(loading, "127.0.0.1", 0) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        assert await asker(address=address).ask(1) == 2
        refused = -1000
        with pytest.raises(BrokerUnavailable, match="is loading its data"):
            await asker(address=address, patience_s=0.1).ask(1)
