"""Brokers of several nodes: Sentinels and clusters, whose nodes fail and move under load."""

import asyncio
import signal
from collections import Counter
from typing import Any

import pytest

from penstock.errors import BrokerUnavailable, ConfigError
from penstock.streamer.redis.client import BrokerClient
from penstock.types import Item, ItemResult
from support.brokers import QUEUE, Crowd
from support.redis_nodes import Cluster, SentinelSetup, wait_for


@pytest.fixture
def sentinels(run_redis: Any, tmp_path: Any) -> SentinelSetup:
    return SentinelSetup(run_redis, tmp_path)


class Ledger:
    """Calls in flight from one client, and how often each was answered."""

    def __init__(self, broker: str) -> None:
        self.client = BrokerClient(broker, patience_s=30.0, timeout_s=60.0)
        self.answers: Counter[int] = Counter()
        self.wrong: list[Any] = []
        self._asked = 0
        self._answered = asyncio.Event()

    def put(self, count: int) -> None:
        for _ in range(count):
            self._asked += 1
            self.client.submit("m", None, Item(self._asked), self._sink(self._asked))

    def _sink(self, number: int) -> Any:
        def sink(result: ItemResult) -> None:
            self.answers[number] += 1
            self._answered.set()
            if result.error is not None or result.body != number:
                self.wrong.append((number, result))

        return sink

    async def until_answered(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.answers) < count:
                self._answered.clear()
                await self._answered.wait()

    async def settled(self) -> None:
        """All calls were answered, each once, with its own number."""
        await self.until_answered(self._asked)
        await self.client.close(5)
        assert not self.wrong
        assert self.answers == dict.fromkeys(range(1, self._asked + 1), 1)


async def test_a_failover_in_the_middle_of_batches_answers_every_call_once(worker, sentinels):
    first, second = worker(broker=sentinels.address), worker(broker=sentinels.address)
    ledger = Ledger(sentinels.address)
    ledger.put(4000)
    await ledger.until_answered(200)
    await asyncio.to_thread(sentinels.master.kill)
    ledger.put(1000)
    await asyncio.to_thread(sentinels.promoted)
    ledger.put(500)
    await ledger.settled()
    assert first.end() == second.end() == 0


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
@pytest.mark.parametrize("first", ["predict", "_wait_for_worker_ready"])
def test_the_first_call_of_a_program_waits_for_a_failover(worker, streamer, run_redis, request, kind, first):
    nodes = Cluster(run_redis, replicas=True) if kind == "cluster" else request.getfixturevalue("sentinels")
    worker(broker=nodes.address)
    assert streamer(nodes.address).predict([0]) == [0]
    (nodes.owner(QUEUE) if kind == "cluster" else nodes.master).kill()
    caller = streamer(nodes.address, patience_s=30.0, worker_timeout=60)
    if first != "predict":
        getattr(caller, first)()
    assert caller.predict([1]) == [1]


def test_without_any_sentinel_or_with_an_unknown_service_the_first_call_fails_at_once(streamer, sentinels):
    for broker, why in (
        (sentinels.address.replace("/main", "/other"), "no node knows the master 'other'"),
        ("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main", "no node knows the master 'main'"),
    ):
        with pytest.raises(BrokerUnavailable, match=why):
            streamer(broker, patience_s=1000.0).predict([1])


def test_a_demoted_master_is_left_for_the_new_one(worker, streamer, sentinels):
    worker(broker=sentinels.address)
    crowd = Crowd(streamer(sentinels.address, patience_s=30.0, worker_timeout=60))
    crowd.answered()
    sentinels.sentinels[0].ask.sentinel_failover("main")
    sentinels.promoted()
    wait_for(lambda: sentinels.master.ask.role()[0] == "slave", "the old master is demoted")
    crowd.answered(200)
    crowd.stop()
    assert not crowd.errors


def test_a_master_that_hangs_costs_callers_only_time(worker, streamer, sentinels):
    worker(broker=sentinels.address)
    crowd = Crowd(streamer(sentinels.address, patience_s=30.0, worker_timeout=100))
    crowd.answered()
    sentinels.master.signal(signal.SIGSTOP)
    sentinels.promoted()
    try:
        crowd.answered(200)
        crowd.stop()
    finally:
        sentinels.master.signal(signal.SIGCONT)
    assert not crowd.errors


async def test_a_cluster_that_loses_the_node_of_the_queue_answers_every_call_once(worker, run_redis):
    cluster = Cluster(run_redis, replicas=True)
    worker(broker=cluster.address)
    worker(broker=cluster.address)
    ledger = Ledger(cluster.address)
    ledger.put(3000)
    await ledger.until_answered(200)
    owner = cluster.owner(QUEUE)
    await asyncio.to_thread(owner.kill)
    ledger.put(1000)
    await ledger.settled()


def test_the_slot_of_a_queue_moves_to_another_node_under_load(worker, streamer, run_redis):
    cluster = Cluster(run_redis)
    worker(broker=cluster.address)
    crowd = Crowd(streamer(cluster.address, patience_s=30.0, worker_timeout=60))
    crowd.answered()
    source = cluster.owner(QUEUE)
    target = next(node for node in cluster.nodes if node is not source)
    with pytest.raises(ConfigError, match=r"is a node of a cluster: write redis\+cluster://127"):
        streamer(target.address).predict([1])
    move_slot(source, target, source.ask.execute_command("CLUSTER KEYSLOT", QUEUE))
    crowd.answered(200)
    crowd.stop()
    assert not crowd.errors
    assert cluster.owner(QUEUE) is target


def move_slot(source: Any, target: Any, slot: int) -> None:
    """As `redis-cli --cluster reshard` does, for one slot."""
    here, there = (node.ask.execute_command("CLUSTER MYID") for node in (source, target))
    target.ask.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", here)
    source.ask.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", there)

    def emptied() -> bool:
        keys = source.ask.execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
        if keys:
            source.ask.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        return not keys

    wait_for(emptied, "the keys move")
    for node in (target, source):
        node.ask.execute_command("CLUSTER SETSLOT", slot, "NODE", there)
