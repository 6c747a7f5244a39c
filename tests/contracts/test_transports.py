"""Every transport keeps the contract of transports."""

from __future__ import annotations

import pytest
from msgspec import structs

from penstock.core.worker.spec import Wrapped
from penstock.plugins import resolve
from support.concurrent_batches import CONCURRENCY_CHECKS, TARGET
from support.stepped import CONTINUOUS_CHECKS, STEP_CHECKS
from support.transports import TRANSPORT_CHECKS, TransportHarness, check_transport


@pytest.mark.parametrize("name", ["inline", "thread", "process"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_transport(name, check):
    await check(
        lambda spec, pool: resolve("transport", name)(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20)
    )


def apart(spec, pool):
    """A worker that finishes results in a separate thread."""
    wrapped = structs.replace(spec, target=Wrapped(spec.target, "support.scripted:apart"))
    return resolve("transport", "process")(wrapped, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20)


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_process_transport_with_results_finished_in_a_thread(check):
    await check(apart)


@pytest.mark.parametrize("check", CONCURRENCY_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_process_transport_with_concurrent_batches(check):
    await check(
        lambda spec, pool: resolve("transport", "process")(
            spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20
        )
    )


@pytest.mark.parametrize("name", ["inline", "thread"])
async def test_other_transports_run_a_concurrent_model_one_batch_at_a_time(name):
    async with TransportHarness(
        lambda spec, pool: resolve("transport", name)(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=0), TARGET
    ) as harness:
        assert await harness.values(1, ("open", "a"), 3) == [1, "opened", 3]
        assert harness.ready.concurrency == 1


@pytest.mark.parametrize("name", ["inline", "thread", "process"])
@pytest.mark.parametrize("check", STEP_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_a_step_model(name, check):
    await check(
        lambda spec, pool: resolve("transport", name)(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20)
    )


@pytest.mark.parametrize("check", CONTINUOUS_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_continuous_batching_in_a_worker_process(check):
    await check(
        lambda spec, pool: resolve("transport", "process")(
            spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20
        )
    )


def test_the_process_transport_keeps_the_contract_on_uvloop():
    uvloop = pytest.importorskip("uvloop")
    uvloop.run(
        check_transport(
            lambda spec, pool: resolve("transport", "process")(
                spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20
            )
        )
    )
