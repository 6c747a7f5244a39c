"""A worker over a real Redis server, on the test's own loop; the model runs inline or in threads."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.streamer.redis.client import BrokerClient
from penstock.streamer.redis.connection import parse_address
from penstock.streamer.redis.worker import BrokerWorker, InstanceWatcher
from penstock.types import Item, ItemResult

PATIENCE_S = 20.0


class Worker:
    """A model that serves a queue, from `start` until `stop` or `die`."""

    def __init__(self, address: str, predict: Callable[..., Any], prefix: str, batch: int, lease_s: float) -> None:
        self.address, self.predict, self.prefix, self.batch, self.lease_s = address, predict, prefix, batch, lease_s
        self.stopping = asyncio.Event()

    async def start(self) -> None:
        watcher = InstanceWatcher()
        self.engine = Engine(None, [watcher])
        batching = BatchingConfig(max_batch_size=self.batch, max_hold_s=0.1)
        config = ModelConfig(target="", transport="thread", batching=batching)
        await self.engine.load("model", config, target=self.predict)
        self.worker = BrokerWorker(
            self.engine, "model", parse_address(self.address), self.prefix, watcher=watcher, lease_s=self.lease_s
        )
        self.task = asyncio.create_task(self.worker.run(self.stopping, drain_s=5))

    async def stop(self) -> None:
        """Ends gracefully."""
        self.stopping.set()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.engine.close(5)

    async def die(self) -> None:
        """Ends without notifying the broker, as a killed process does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Asker:
    """A client with awaitable answers."""

    def __init__(self, client: BrokerClient) -> None:
        self.client = client

    def put(self, value: Any, **keywords: Any) -> asyncio.Future[ItemResult]:
        """A future of the answer. Raises what `submit` raises."""
        answer: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()
        many = isinstance(value, list)
        item = Item(value, rows=len(value), many=True, **keywords) if many else Item(value, **keywords)
        call = self.client.submit("model", None, item, answer.set_result)
        answer.call = call
        return answer

    async def ask(self, value: Any, **keywords: Any) -> Any:
        """The answer. Raises it if it is an error."""
        async with asyncio.timeout(PATIENCE_S):
            result = await self.put(value, **keywords)
        if result.error is not None:
            raise result.error
        return result.body


async def until_true(true: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "the condition did not become true"
        await asyncio.sleep(0.01)


@pytest.fixture
def until() -> Callable[..., Any]:
    return until_true


@pytest.fixture
async def work(redis_server: Any) -> AsyncIterator[Callable[..., Any]]:
    """Starts a worker: `await work(predict, prefix="", batch=8, lease_s=10)`."""
    workers: list[Worker] = []

    async def start(
        predict: Callable[..., Any], prefix: str = "", batch: int = 8, lease_s: float = 10.0, address: str = ""
    ) -> Worker:
        worker = Worker(address or redis_server.address, predict, prefix, batch, lease_s)
        await worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await worker.stop()


@pytest.fixture
async def asker(redis_server: Any) -> AsyncIterator[Callable[..., Asker]]:
    """Creates a client: `asker(prefix="", **keywords)`."""
    clients: list[BrokerClient] = []

    def make(prefix: str = "", address: str = "", **keywords: Any) -> Asker:
        clients.append(BrokerClient(address or redis_server.address, prefix, **keywords))
        return Asker(clients[-1])

    yield make
    for client in clients:
        await client.close(0)
