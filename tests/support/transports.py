"""The contract of transports, as checks of any implementation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.contracts import Transport
from penstock.core.wire.slabs import SlabPool
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import BadRequest, ItemFailed, LoadFailed, PenstockError, TargetNotFound, WorkerDied
from penstock.types import Batch, BatchPart, Item, MetricDelta, Ready

MakeTransport = Callable[[WorkerSpec, SlabPool], Transport]
"""Returns a transport with one slot on "cpu" that has not been started."""

POOL_BYTES = 8 * 2**20
WAIT_S = 60.0
LARGE = 300_000


class TransportHarness:
    """A transport with one slot, its listener, and callers that record the parts they receive."""

    def __init__(self, make: MakeTransport, target: Any = "support.scripted:ScriptedModel", **batching: Any) -> None:
        self.pool = SlabPool(POOL_BYTES)
        config = ModelConfig(target=str(target), batching=BatchingConfig(**batching))
        self.transport = make(WorkerSpec("scripted", "1", config, target), self.pool)
        self.ready: Ready | None = None
        self.downs: list[tuple[PenstockError, float | None]] = []
        self.parts: dict[int, list[BatchPart]] = {}
        self.metrics: list[MetricDelta] = []
        self._changed = asyncio.Event()
        self._ids = 0

    async def __aenter__(self) -> TransportHarness:
        await self.transport.start(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.transport.close(0.0)
        self.pool.close()

    def slot_up(self, slot: int, ready: Ready) -> None:
        assert slot == 0
        self.ready = ready
        self._changed.set()

    def slot_down(self, slot: int, error: PenstockError, retry_in_s: float | None) -> None:
        assert slot == 0
        self.ready = None
        self.downs.append((error, retry_in_s))
        self._changed.set()

    def slot_used(self, slot: int, requests: int) -> None:
        assert slot == 0
        assert requests > 0

    def slot_metrics(self, slot: int, deltas: list[MetricDelta]) -> None:
        assert slot == 0
        self.metrics += deltas
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until `condition` is true, which events of the listener or a caller may change."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def up(self) -> None:
        await self.until(lambda: self.ready is not None)

    def post(self, items: Sequence[Item], more: bool = False) -> int:
        """Sends a batch and returns its number. `more`: another batch follows at once."""
        self._ids += 1
        number = self._ids
        received = self.parts[number] = []

        def on_part(part: BatchPart) -> None:
            assert part.batch_id == number
            assert not (received and received[-1].final), "a part arrived after the final one"
            received.append(part)
            self._changed.set()

        self.transport.send(Batch(number, 0, list(items), more), on_part)
        assert not received, "on_part was called during send"
        return number

    async def final(self, number: int) -> BatchPart:
        received = self.parts[number]
        await self.until(lambda: received and received[-1].final)
        return received[-1]

    async def run(self, *payloads: Any, codec: str = "object", many: bool = False) -> BatchPart:
        """Runs one batch of these payloads."""
        await self.up()
        rows = [len(p) if many else 1 for p in payloads]
        items = [Item(p, codec, rows=n, many=many) for p, n in zip(payloads, rows, strict=True)]
        return await self.final(self.post(items))

    async def values(self, *payloads: Any) -> list[Any]:
        """The results of these payloads; errors replace failed ones."""
        return values(await self.run(*payloads))


def values(part: BatchPart) -> list[Any]:
    assert part.error is None, part.error
    return [None if r is None else (r.error or r.body) for r in part.results]


async def check_results_are_aligned(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        payloads = [{"a": (1, 2)}, "text", b"bytes", None, 3.5, [1, 2]]
        assert await harness.values(*payloads) == payloads
        ready = harness.ready
        assert ready is not None
        assert (ready.metadata.name, ready.metadata.version, ready.device) == ("scripted", "1", "cpu")


async def check_an_item_that_raises_fails_alone(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        found = await harness.values(*[("raise", "no") if i == 41 else i for i in range(64)])
        bad = found.pop(41)
        assert type(bad) is ItemFailed
        assert bad.message == "the model raised ValueError"
        assert "no" in bad.detail
        assert found == [i for i in range(64) if i != 41]
        refused, fine = await harness.values(("refuse", "too dark"), 1)
        assert type(refused) is BadRequest
        assert refused.message == "too dark"
        assert fine == 1


async def check_out_of_memory_halves_the_batch_and_is_reported(make: MakeTransport) -> None:
    async with TransportHarness(make, retry_split=False) as harness:
        part = await harness.run(*[("memory", 2)] * 8)
        assert values(part) == [2] * 8
        assert part.oom == (4, 2)


async def check_several_items_in_one_request(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        first, second = values(await harness.run([1, ("raise", "no"), 3], [4], many=True))
        assert (first[0], first[2], second) == (1, 3, [4])
        assert type(first[1]) is ItemFailed
        number = harness.post([Item([0, 1, 2, 3], many=True, rows=2, start=1, stop=3)])
        assert values(await harness.final(number)) == [[1, 2]]


async def check_parts_of_a_stream(make: MakeTransport, target: str = "support.scripted:stream") -> None:
    async with TransportHarness(make, target) as harness:
        await harness.up()
        number = harness.post([Item(2), Item(3)])
        await harness.final(number)
        received = [values(part) for part in harness.parts[number]]
        assert received == [[0, 0], [1, 1], [None, 2], [None, None]]
        assert [part.final for part in harness.parts[number]] == [False, False, False, True]
        refused, fine = values(await harness.final(harness.post([Item(-1), Item(1)])))
        assert type(refused) is ItemFailed
        assert fine is None


async def check_wire_payloads_and_large_payloads(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        for codec in ("native", "object"):
            small, large = b"small", bytes(range(256)) * (LARGE // 256)
            part = await harness.run(small, large, codec=codec)
            assert values(part) == [small, large]
        await harness.up()
        slab = harness.pool.allocate(LARGE)
        assert slab is not None
        slab.view[:] = b"x" * LARGE
        (result,) = values(await harness.final(harness.post([Item(slab, "native")])))
        assert bytes(result) == b"x" * LARGE
        del result
        slab.release()
        await harness.run(0)
        assert harness.pool.in_use_bytes == 0


async def check_an_array_crosses_with_its_buffers(make: MakeTransport) -> None:
    import numpy as np

    async with TransportHarness(make) as harness:
        array = np.arange(LARGE, dtype=np.float32).reshape(2, -1)
        (found,) = await harness.values({"x": array})
        assert found["x"].dtype == np.float32
        assert (found["x"] == array).all()
        del found
        await harness.run(0)
        assert harness.pool.in_use_bytes == 0


async def check_a_full_pool_does_not_stop_large_payloads(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        slab = harness.pool.allocate(harness.pool.capacity_bytes)
        assert slab is not None
        assert await harness.values(b"y" * LARGE) == [b"y" * LARGE]
        slab.release()


async def check_results_larger_than_the_shared_memory(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        for size in (LARGE, 3 * POOL_BYTES, LARGE):
            for _ in range(20 if size == LARGE else 1):
                (found,) = await harness.values(("repeat", size))
                assert found == b"r" * size


async def check_a_slab_that_the_model_keeps_is_not_reused(make: MakeTransport) -> None:
    async with TransportHarness(make, "support.transports:KeepingModel") as harness:
        await harness.up()
        slab = harness.pool.allocate(LARGE)
        assert slab is not None
        slab.view[:] = b"k" * LARGE
        assert values(await harness.final(harness.post([Item(slab, "native")]))) == [b"kept"]
        slab.release()
        other = harness.pool.allocate(LARGE)
        assert other is not None
        other.view[:] = b"o" * LARGE  # where the slab was, if the transport has let it go
        other.release()
        assert values(await harness.final(harness.post([Item(b"", "native")]))) == [b"k"]
        await harness.final(harness.post([Item(b"", "native")]))
        assert harness.pool.in_use_bytes == 0


class KeepingModel:
    """A model that keeps a large item after answering; an empty item returns its first byte and releases it."""

    kept: Any = None

    def predict(self, items: list[Any]) -> list[Any]:
        (item,) = items
        if len(item):
            self.kept = item[10:20]
            return [b"kept"]
        kept, self.kept = self.kept, None
        return [b"" if kept is None else bytes(kept[:1])]


async def check_metrics_arrive_with_the_results(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        await harness.run(1)  # includes counts of other checks in this process
        (delta,) = (await harness.run(("count", 2), ("count", 3))).metrics or []
        assert (delta.kind, delta.name, delta.value, delta.labels) == ("counter", "counted", 5, {"kind": "test"})
        assert (await harness.run(1)).metrics is None


async def check_batches_are_answered_in_order(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        await harness.up()
        for _ in range(50):
            numbers = [harness.post([Item(n)]) for n in range(harness.transport.depth)]
            for n, number in enumerate(numbers):
                assert values(await harness.final(number)) == [n]


async def check_close_answers_running_batches(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        await harness.up()
        number = harness.post([Item(("sleep", 0.1))])
        await harness.transport.close(WAIT_S)
        assert values(harness.parts[number][-1]) == [0.1]


async def check_a_batch_sent_while_closing_is_answered(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        await harness.up()
        closing = asyncio.ensure_future(harness.transport.close(WAIT_S))
        await asyncio.sleep(0)
        number = harness.post([Item(1)])
        await closing
        part = await harness.final(number)
        assert type(part.error) is WorkerDied
        assert not part.started


async def check_a_worker_that_ends_is_reported_and_replaced(make: MakeTransport) -> None:
    async with TransportHarness(make) as harness:
        await harness.up()
        numbers = [harness.post([Item(("exit", 3))]), harness.post([Item(1)])][: harness.transport.depth]
        parts = [await harness.final(number) for number in numbers]
        assert all(type(part.error) is WorkerDied for part in parts)
        assert [part.started for part in parts] == [True, False][: len(parts)]
        await harness.until(lambda: harness.downs)
        assert 0 <= harness.downs[0][1] <= 0.1  # no longer than the load took
        assert await harness.values(5) == [5]


async def check_a_model_that_does_not_load_is_reported_with_the_reason(make: MakeTransport) -> None:
    async with TransportHarness(make, "support.scripted:NeverLoads") as harness:
        await harness.until(lambda: len(harness.downs) >= 2)
        (error, first), (_, second) = harness.downs[:2]
        assert type(error) is LoadFailed
        assert "RuntimeError: no weights here" in error.message
        assert "Traceback" in error.detail
        assert (first, second) == (0.1, 0.2)


async def check_a_model_that_ends_its_worker_while_loading_is_reported(make: MakeTransport) -> None:
    async with TransportHarness(make, "support.scripted:DiesWhileLoading") as harness:
        await harness.until(lambda: harness.downs)
        assert type(harness.downs[0][0]) is LoadFailed
        assert "7" in harness.downs[0][0].message


async def check_a_missing_target_is_reported_with_candidates(make: MakeTransport) -> None:
    async with TransportHarness(make, "support.scripted:ScriptedModl") as harness:
        await harness.until(lambda: harness.downs)
        error = harness.downs[0][0]
        assert type(error) is TargetNotFound
        assert "did you mean 'ScriptedModel'?" in error.message


async def check_a_class_object_is_a_target(make: MakeTransport) -> None:
    from support.scripted import ScriptedModel

    async with TransportHarness(make, ScriptedModel) as harness:
        assert await harness.values(("size", 0), 1) == [2, 1]


TRANSPORT_CHECKS: list[Callable[[MakeTransport], Awaitable[None]]] = [
    check for name, check in list(globals().items()) if name.startswith("check_") and inspect.iscoroutinefunction(check)
]


async def check_transport(make: MakeTransport) -> None:
    """Runs every check on transports that `make` returns. Raises AssertionError."""
    for check in TRANSPORT_CHECKS:
        await check(make)
