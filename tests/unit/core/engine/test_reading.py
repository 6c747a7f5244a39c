import asyncio
import threading
from typing import Any

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.contracts import BatchRecord, Observer
from penstock.core.engine.engine import Engine
from penstock.types import Item


def config(version: str = "1", **keys: Any) -> ModelConfig:
    return ModelConfig(target="here", transport="thread", version=version, batching=BatchingConfig(**keys))


async def test_a_snapshot_holds_queue_costs_and_memory() -> None:
    go = threading.Event()

    def wait(items: list[Any]) -> list[Any]:
        go.wait(10)
        return items

    async with Engine() as engine:
        await engine.load("m", config(max_batch_size=1, policy="none"), target=wait)
        answers: list[Any] = []
        for i in range(4):
            engine.submit("m", None, Item(i), answers.append)
        (m,) = engine.reading().models
        assert (m.status.name, m.status.version, m.in_flight, m.queue_rows) == ("m", "1", 4, 4)
        assert m.scheduler["ready"] is False
        assert m.max_queue_rows >= 4
        assert m.pids == {}  # a thread is no process of its own
        slab = engine.allocate(100_000)
        assert slab is not None
        reading = engine.reading()
        assert 100_000 <= reading.pool_used_bytes < reading.pool_capacity_bytes
        slab.release()
        assert engine.reading().pool_used_bytes == 0
        go.set()


async def test_each_version_is_read_once_by_name() -> None:
    async with Engine() as engine:
        for name, version in (("b", "2"), ("b", "1"), ("a", "1")):
            await engine.load(name, config(version), target=lambda items: items)
        found = [(m.status.name, m.status.version) for m in engine.reading().models]
        assert found == [("a", "1"), ("b", "1"), ("b", "2")]


async def test_a_record_names_the_bucket_and_a_listener_hears_arrivals() -> None:
    class Ears(Observer):
        arrivals = 0
        buckets: tuple[str, ...] = ()

        def on_arrival(self, model: str, version: str) -> None:
            self.arrivals += 1

        def on_complete(self, record: BatchRecord) -> None:
            self.buckets += (record.bucket,)

    ears = Ears()
    async with Engine(observers=[Observer(), ears]) as engine:
        await engine.load("m", config(bucket="content-type"), target=lambda items: items)
        done = asyncio.Event()
        engine.submit("m", None, Item(1, content_type="image/png"), lambda result: done.set())
        await done.wait()
    assert (ears.arrivals, ears.buckets) == (1, ("image/png",))


async def test_during_a_swap_only_the_visible_version_is_in_the_snapshot() -> None:
    async with Engine() as engine:
        await engine.load("m", config(), target=lambda items: items)
        same = engine.prepare("m", config(), target=lambda items: items)
        other = engine.prepare("m", config("2"), target=lambda items: items)
        assert [(m.status.version, m.status.state) for m in engine.reading().models] == [
            ("1", "READY"),
            ("2", "LOADING"),
        ]
        await engine.put(same)
        await engine.put(other)
        assert [m.status.state for m in engine.reading().models] == ["READY", "READY"]
