"""Failures of a Redis broker and its workers: no call hangs, no error is silent, no answer is lost."""

import asyncio
import signal
import time

import pytest

from penstock.errors import BrokerUnavailable, ConfigError, DeadlineExceeded, QueueFull, WorkerDied
from support.brokers import QUEUE, Crowd, runs
from support.waiting import wait_for


def test_without_redis_a_clear_error_is_raised_at_once(streamer, redis_server):
    redis_server.kill()
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"at 127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        streamer().predict([1])
    assert time.monotonic() - started < 5


def test_a_worker_waits_for_redis_and_then_serves(worker, streamer, redis_server):
    redis_server.kill()
    worker("echo")
    redis_server.start()
    assert streamer().predict([1, 2]) == [1, 2]


def test_a_wrong_password_is_reported_at_once_without_showing_it(worker, streamer, run_redis):
    redis = run_redis("--requirepass", "right")
    broker = f"redis://:wr0ng@{redis.address}"
    with pytest.raises(ConfigError, match="refuses the user or password") as caught:
        streamer(broker).predict([1])
    assert "wr0ng" not in str(caught.value)
    one = worker("echo", broker=broker)
    assert one.process.wait(10) == 2
    assert "refuses the user or password" in one.log_text()
    assert "wr0ng" not in one.log_text()
    with pytest.raises(ConfigError, match="refuses the user or password"):
        streamer(redis.address).predict([1])
    right = f"redis://:right@{redis.address}/3"
    worker("echo", broker=right)
    assert streamer(right).predict([7]) == [7]


def test_a_redis_that_is_killed_and_restarted_costs_only_time(worker, streamer, redis_server):
    worker("echo", "--workers", "2")
    crowd = Crowd(streamer())
    crowd.answered()
    redis_server.kill()
    time.sleep(0.5)
    redis_server.start()
    crowd.answered(200)
    crowd.stop()
    assert not crowd.errors


def test_waiting_callers_get_an_error_if_redis_stays_away(worker, streamer, redis_server):
    worker("slow")
    one = streamer(patience_s=1.0)
    future = one.submit(["waits"])
    runs(redis_server)
    redis_server.kill()
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        future.result(10)
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        one.predict([1])
    redis_server.start()
    assert one.predict([2]) == [2]


@pytest.mark.parametrize("how", ["SIGSTOP", "CLIENT PAUSE"])
def test_a_redis_that_pauses_for_five_seconds_loses_no_request(worker, streamer, redis_server, how, chaos):
    worker("echo", "--lease", "10")
    crowd = Crowd(streamer())
    crowd.answered()
    pause_s = 5 if how == "SIGSTOP" else chaos.count(1, 5)
    if how == "SIGSTOP":
        redis_server.signal(signal.SIGSTOP)
        time.sleep(pause_s)
        redis_server.signal(signal.SIGCONT)
    else:
        redis_server.ask.client_pause(pause_s * 1000)
    crowd.answered(200)
    crowd.stop()
    assert not crowd.errors


def test_a_flushed_redis_loses_no_request(worker, streamer, redis_server, chaos):
    worker("echo", "--workers", "2")
    one = streamer()
    crowd = Crowd(one)
    crowd.answered()
    for _ in range(chaos.count(2, 20)):
        redis_server.ask.flushall()
        crowd.answered(20)
    crowd.stop()
    assert not crowd.errors
    assert one.statistics()["waiting"] == 0


def test_lost_connections_lose_no_request(worker, streamer, redis_server, chaos):
    worker("echo", "--workers", "2")
    crowd = Crowd(streamer())
    crowd.answered()
    for _ in range(chaos.count(5, 50)):
        redis_server.ask.client_kill_filter(_type="normal", skipme=True)
        crowd.answered(20)
    crowd.stop()
    assert not crowd.errors


def test_a_redis_without_memory_refuses_new_requests_and_still_takes_answers(worker, streamer, redis_server):
    worker("slow")
    one = streamer()
    future = one.submit(["x" * 1000])
    runs(redis_server)
    redis_server.ask.config_set("maxmemory", 1)
    with pytest.raises(QueueFull, match="no memory left"):
        one.predict(["y"])
    assert future.result(10) == ["x" * 1000]
    redis_server.ask.config_set("maxmemory", 0)
    assert one.predict(["z"]) == ["z"]


def test_a_worker_that_is_killed_costs_its_requests_a_lease(worker, streamer, chaos):
    crowd_of = streamer(worker_timeout=60)
    living = worker("echo")
    crowd = Crowd(crowd_of)
    crowd.answered()
    for _ in range(chaos.count(2, 20)):
        following = worker("echo")
        living.end(signal.SIGKILL)
        living = following
        crowd.answered(50)
    crowd.stop()
    assert not crowd.errors


def test_an_item_that_killed_two_workers_does_not_run_again(worker, streamer, redis_server):
    one = streamer(worker_timeout=60)
    future = one.submit(["poison"])
    for _ in range(2):
        assert worker("poison", wait=False).process.wait(20) == -signal.SIGKILL
    worker("poison")
    with pytest.raises(WorkerDied, match="2 workers died"):
        future.result(20)
    assert one.predict(["good"]) == ["good"]
    assert redis_server.ask.xlen("{penstock:}:dead") == 1


def test_without_a_worker_the_caller_gets_an_error_in_time(streamer):
    with pytest.raises(DeadlineExceeded):
        streamer(worker_timeout=0.3).predict([1])


def test_workers_shut_down_gracefully_and_leave_nothing(worker, streamer, redis_server):
    first = worker("echo", "--workers", "2")
    one = streamer()
    assert one.predict(list(range(100))) == list(range(100))
    assert first.end() == 0
    one.close()
    assert redis_server.ask.keys("*") == []


def test_a_rolling_restart_under_load_loses_nothing(worker, streamer, chaos):
    working = [worker("echo"), worker("echo")]
    crowd = Crowd(streamer())
    crowd.answered()
    for _ in range(chaos.count(2, 20)):
        working.append(worker("echo"))
        assert working.pop(0).end() == 0
        crowd.answered(50)
    crowd.stop()
    assert not crowd.errors


def test_a_worker_without_time_to_drain_hands_back_what_it_has_taken(worker, streamer, redis_server):
    first = worker("slow", "--drain", "0", "--lease", "30")
    one = streamer(worker_timeout=60)
    future = one.submit(list(range(40)))
    wait_for(lambda: taken(redis_server) >= 16)
    assert first.end() == 0
    worker("echo", "--lease", "30")
    assert future.result(10) == list(range(40))


def taken(redis):
    return redis.ask.exists(QUEUE) and sum(c["pending"] for c in consumers(redis))


def consumers(redis):
    return redis.ask.xinfo_consumers(QUEUE, "workers") if redis.ask.xinfo_groups(QUEUE) else []


def test_kedas_scaler_sees_the_waiting_requests(worker, streamer, redis_server):
    """It reads XLEN of the queue (streamLength), or the lag of the group (lagCount). Before the first worker there is
    no group, and KEDA falls back to XLEN."""
    assert redis_server.ask.xlen(QUEUE) == 0
    one = streamer(worker_timeout=60)
    future = one.submit(list(range(40)))
    wait_for(lambda: redis_server.ask.xlen(QUEUE) == 40)
    assert redis_server.ask.xinfo_groups(QUEUE) == []
    worker("slow")
    wait_for(lambda: taken(redis_server) == 16)
    assert (redis_server.ask.xlen(QUEUE), redis_server.ask.xinfo_groups(QUEUE)[0]["lag"]) == (40, 24)
    with pytest.raises(DeadlineExceeded):
        one.submit(["late"], deadline=0.1).result(10)
    wait_for(lambda: redis_server.ask.xlen(QUEUE) <= 40)  # Redis may not know the lag now; the length is right
    assert future.result(20) == list(range(40))
    wait_for(lambda: redis_server.ask.xlen(QUEUE) == 0)
    assert redis_server.ask.xinfo_groups(QUEUE)[0]["lag"] == 0


def test_data_of_another_program_under_the_same_keys_is_reported_until_it_is_gone(worker, streamer, redis_server):
    redis_server.ask.set(QUEUE, "other")
    working, caller = worker("echo"), streamer()
    with pytest.raises(BrokerUnavailable, match="another prefix"):
        caller.predict([1])
    wait_for(lambda: "another prefix: the worker retries" in working.log_text())
    redis_server.ask.delete(QUEUE)
    assert caller.predict([1]) == [1]
    redis_server.ask.delete(QUEUE)
    redis_server.ask.set(QUEUE, "other")
    wait_for(lambda: working.log_text().count("another prefix") == 2)
    redis_server.ask.delete(QUEUE)
    assert caller.predict([1]) == [1]
    assert working.process.poll() is None


def test_memory_is_bounded_when_callers_do_not_read(worker, redis_server):
    """A client that stops reading leaves its answers in the broker until they expire."""
    worker("echo")

    async def ask_and_leave() -> None:
        from penstock.streamer.redis.client import BrokerClient
        from penstock.types import Item

        client = BrokerClient(redis_server.address)
        for n in range(100):
            client.submit("m", None, Item(n), lambda result: None)
        await asyncio.to_thread(runs, redis_server)
        for task in client._tasks:
            task.cancel()
        await asyncio.gather(*client._tasks, return_exceptions=True)
        await client._out.close()
        await client._in.close()

    asyncio.run(ask_and_leave())
    wait_for(lambda: not redis_server.ask.xlen(QUEUE))
    (replies,) = redis_server.ask.keys("{penstock:}:replies:*")
    assert 0 < redis_server.ask.ttl(replies) <= 120
    (sent,) = redis_server.ask.keys("{penstock:}:sent:*")
    assert 0 < redis_server.ask.ttl(sent) <= 60
