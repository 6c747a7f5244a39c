"""The state of queues, and its page."""

import asyncio
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import BrokerUnavailable
from penstock.streamer.redis.connection import parse_address
from penstock.streamer.redis.metrics import (
    EVENTS,
    QUEUE,
    ROUND_TRIP,
    UP,
    WORKER_EVENTS,
    QueueMetrics,
    QueueState,
    worker_page,
)
from penstock.streamer.redis.protocol import GROUP, RELEASED

METRICS_PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


class Gate:
    def __init__(self):
        self.opened = threading.Event()

    def predict(self, items):
        assert self.opened.wait(20)
        return items


@pytest.fixture
async def queues(redis_server):
    found = QueueMetrics(parse_address(redis_server.address), ["", "other"])
    yield found
    await found.close()


def samples(page: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(page.decode())
    return {s.name: s.value for family in families for s in family.samples if s.labels["prefix"] == ""}


async def test_a_broker_without_queues_has_states_of_zeros(queues):
    assert await queues.states() == [QueueState(prefix, 0, 0, 0.0, 0, 0) for prefix in ("", "other")]


async def test_requests_wait_until_a_worker_takes_them_and_again_when_it_hands_them_back(
    queues, work, asker, redis_server, until
):
    client, gate = asker(), Gate()
    answers = [client.put(n) for n in range(40)]
    await until(lambda: redis_server.ask.xlen("{penstock:}:queue") == 40)
    await asyncio.sleep(0.05)
    state = (await queues.states())[0]
    assert (state.waiting, state.running, state.workers) == (40, 0, 0)
    assert 0.05 <= state.wait_s < 20

    worker = await work(gate.predict, batch=8)
    await until(lambda: worker.worker.statistics()["leases"] == 16)
    state = (await queues.states())[0]
    assert (state.waiting, state.running, state.workers) == (24, 16, 1)

    release_oldest(redis_server.ask)
    state = (await queues.states())[0]
    assert (state.waiting, state.running) == (25, 15)
    assert state.wait_s > 0.05  # it is the oldest one again
    gate.opened.set()
    answers.pop(0).call.cancel()
    await asyncio.gather(*answers)
    state = (await queues.states())[0]
    assert (state.waiting, state.running, state.wait_s) == (0, 0, 0.0)


def release_oldest(redis):
    """Hands an entry back, as a worker does at shutdown."""
    (oldest,) = redis.xpending_range("{penstock:}:queue", GROUP, "-", "+", 1)
    redis.xclaim("{penstock:}:queue", GROUP, RELEASED, 0, [oldest["message_id"]], retrycount=0, justid=True)


async def test_the_page_shows_each_queue(queues, redis_server):
    redis_server.ask.xadd("{penstock:}:queue", {"h": "", "p": ""})
    redis_server.ask.xadd("{penstock:}:dead", {"why": ""})
    found = samples(await queues.scrape())
    assert found.pop("penstock_redis_queue_wait_seconds") < 20
    assert found == {
        "penstock_redis_up": 1.0,
        "penstock_redis_queue_waiting_requests": 1.0,
        "penstock_redis_queue_running_requests": 0.0,
        "penstock_redis_queue_workers": 0.0,
        "penstock_redis_queue_dead_letters": 1.0,
    }


async def test_a_broker_that_is_away_is_a_value_on_the_page_and_no_zeros(queues, redis_server):
    redis_server.kill()
    assert samples(await queues.scrape()) == {"penstock_redis_up": 0.0}
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        await queues.states()


def test_the_counters_of_a_worker_are_on_its_page():
    page = worker_page("p", {"taken": 3, "answered": 2, "leases": 1})
    assert b'penstock_redis_requests_total{prefix="p",event="taken"} 3.0' in page
    assert b'event="leases"' not in page


def test_the_document_has_all_metrics_of_queues():
    lines = METRICS_PAGE.read_text().splitlines()
    for family in (UP, *(family for _, family in QUEUE), WORKER_EVENTS, ROUND_TRIP):
        labels = ", ".join(f"`{label}`" for label in family.labels)
        assert f"| `{family.name}` | {family.kind} | {labels} | {family.help} |" in lines
    assert all(any(f"`{event}`" in line for line in lines) for event in EVENTS)
