"""The Ray transport keeps the contract of transports."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest
from msgspec import structs

from penstock.config.schema import RayConfig
from penstock.core.transports.slot import SlotTransport
from penstock.errors import Cancelled, LoadFailed, RunTimeout, WorkerDied
from penstock.plugins import resolve
from penstock.types import Item
from support.concurrent_batches import TARGET
from support.scripted import CRASHING
from support.stepped import STEP_CHECKS
from support.transports import TRANSPORT_CHECKS, MakeTransport, TransportHarness, values

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that Ray leaves open
]


def make(spec: Any, pool: Any) -> SlotTransport:
    transport: SlotTransport = resolve("transport", "ray")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=0)
    return transport


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_ray_transport(check: Any) -> None:
    await check(make)


@pytest.mark.parametrize("check", STEP_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_a_step_model_on_ray(check: Any) -> None:
    await check(make)


async def test_the_ray_transport_runs_a_concurrent_model_one_batch_at_a_time() -> None:
    async with TransportHarness(make, TARGET) as harness:
        assert await harness.values(1, ("open", "a"), 3) == [1, "opened", 3]
        assert harness.ready is not None
        assert harness.ready.concurrency == 1


async def test_an_actor_that_hangs_is_killed_and_its_item_answered() -> None:
    async with TransportHarness(make, CRASHING, run_timeout_s=0.5) as harness:
        await harness.up()
        number = harness.post([Item(("hang", 0))])
        final = await harness.final(number)
        assert type(final.error) is RunTimeout
        (first, _) = harness.parts[number]
        assert type(values(first)[0]) is RunTimeout
        assert await harness.values(5) == [5]


async def test_an_actor_that_dies_while_it_has_nothing_to_do_is_noticed_and_replaced() -> None:
    async with TransportHarness(make, CRASHING) as harness:
        (pid,) = await harness.values(("pid", 0))
        os.kill(pid, signal.SIGKILL)
        await harness.until(lambda: harness.downs)
        error, pause_s = harness.downs[0]
        assert type(error) is WorkerDied
        assert str(error) == "the worker on the Ray cluster died"  # no address
        assert pause_s == 0.0
        assert await harness.values(("pid", 0)) != [pid]


async def test_a_stream_that_nobody_waits_for_ends() -> None:
    async with TransportHarness(make, "support.scripted:endless") as harness:
        await harness.up()
        number = harness.post([Item(1)])
        await harness.until(lambda: harness.parts[number])
        harness.transport.abandon(0, number)
        assert type(values(await harness.final(number))[0]) is Cancelled
        assert harness.downs == []


async def test_a_body_in_shared_memory_is_not_pinned() -> None:
    async with TransportHarness(make, CRASHING) as harness:
        await harness.up()
        slab = harness.pool.allocate(300_000)
        assert slab is not None
        number = harness.post([Item(slab, "native")])
        slab.release()
        assert harness.pool.in_use_bytes == 0
        (result,) = values(await harness.final(number))
        assert len(result) == 300_000


def making(**keys: Any) -> MakeTransport:
    """`make` with keys of `[models.NAME.ray]`."""

    def made(spec: Any, pool: Any) -> SlotTransport:
        config = structs.replace(spec.config, ray=RayConfig(num_cpus=0, **keys))
        return make(structs.replace(spec, config=config), pool)

    return made


async def test_an_actor_without_a_place_is_reported_and_starts_when_a_node_joins(ray_cluster: Any) -> None:
    async with TransportHarness(making(resources={"late": 1}, placement_timeout_s=5)) as harness:
        await harness.until(lambda: harness.downs)
        error, _ = harness.downs[0]
        assert type(error) is LoadFailed
        assert "placed no instance with late 1" in error.message
        assert "no node has as much" in error.message
        node = await asyncio.to_thread(ray_cluster.add_node, num_cpus=0, resources={"late": 1})
        try:
            assert await harness.values(5) == [5]
        finally:
            await asyncio.to_thread(ray_cluster.remove_node, node)


async def test_an_actor_whose_node_is_lost_before_it_starts_starts_on_another(ray_cluster: Any) -> None:
    def add() -> Any:
        return ray_cluster.add_node(num_cpus=0, resources={"brief": 1})

    lost = await asyncio.to_thread(add)
    os.kill(lost.all_processes["raylet"][0].process.pid, signal.SIGKILL)  # the cluster notices it later
    async with TransportHarness(making(resources={"brief": 1})) as harness:
        node = await asyncio.to_thread(add)
        try:
            assert await harness.values(5) == [5]
            assert harness.downs == []
        finally:
            await asyncio.to_thread(ray_cluster.remove_node, node)
            await asyncio.to_thread(ray_cluster.remove_node, lost)


async def test_helper_processes_preprocess_beside_their_actor_and_end_with_it() -> None:
    def with_helpers(spec: Any, pool: Any) -> SlotTransport:
        return make(structs.replace(spec, config=structs.replace(spec.config, preprocess_processes=2)), pool)

    async with TransportHarness(with_helpers, "support.preprocessed:Preprocessing") as harness:
        refused, *found = await harness.values(("refuse", "too dark"), *[("who", 0)] * 8)
        assert refused.message == "too dark"
        helpers = [psutil.Process(pid) for pid in {who[0] for _, _, who in found}]
        assert len(helpers) == 2
        (worker,) = {worker for worker, _, _ in found}
        assert worker not in {helper.pid for helper in helpers}
        os.kill(worker, signal.SIGKILL)
        assert not psutil.wait_procs(helpers, 10)[1]
