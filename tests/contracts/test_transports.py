"""Every transport keeps the contract of transports."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from penstock.core.worker.spec import Wrapped
from penstock.errors import BadRequest, ItemFailed
from penstock.plugins import resolve
from penstock.types import Item
from support.concurrent_batches import CONCURRENCY_CHECKS, TARGET
from support.devices import KERNELS_S, LOSES, MOST_ROWS, RAISES
from support.stepped import CONTINUOUS_CHECKS, STEP_CHECKS
from support.transports import TRANSPORT_CHECKS, TransportHarness, check_transport


@pytest.mark.parametrize("name", ["inline", "thread", "process"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_transport(name, check):
    await check(
        lambda spec, pool: resolve("transport", name)(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20)
    )


@pytest.mark.parametrize("name", ["thread", "process"])
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_a_transport_with_results_finished_in_another_thread(name, check):
    def apart(spec, pool):
        wrapped = structs.replace(spec, target=Wrapped(spec.target, "support.scripted:apart"))
        return resolve("transport", name)(wrapped, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20)

    await check(apart)


@pytest.mark.parametrize("name", ["inline", "thread", "process"])
async def test_batches_of_a_model_on_a_device(name):
    """They overlap, a bad row fails alone, and the worker is replaced once its device is lost."""
    pytest.importorskip("torch")
    async with TransportHarness(
        lambda spec, pool: resolve("transport", name)(
            spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20
        ),
        "support.devices:model",
        max_batch_size=8,
    ) as harness:
        await harness.up()
        sent = [harness.post([Item([row, row]) for row in range(k + 1)]) for k in range(6)]
        for k, number in enumerate(sent):
            part = await harness.final(number)
            assert [r.body.tolist() for r in part.results] == [[2 * row, 2 * row] for row in range(k + 1)]
            assert part.on_device
            assert part.run_s == pytest.approx(KERNELS_S)
        good, bad, also = (await harness.run([1, 1], [RAISES, 0], [3, 3])).results
        assert bad.error.message == "the model raised ValueError"
        assert (good.body.tolist(), also.body.tolist()) == ([2, 2], [6, 6])
        part = await harness.run(*[[row, 0] for row in range(MOST_ROWS + 1)])
        assert part.oom == (MOST_ROWS + 1, (MOST_ROWS + 2) // 2)
        assert [r.body.tolist() for r in part.results] == [[2 * row, 0] for row in range(MOST_ROWS + 1)]
        if name == "inline":
            return  # there is nothing that could end but the program
        good, bad, behind = (harness.post([Item([first, 0])]) for first in (1, LOSES, 3))
        assert (await harness.final(good)).results[0].body.tolist() == [2, 0]
        assert [(p.error.code, p.started) for p in [await harness.final(n) for n in (bad, behind)]] == [
            ("worker_died", True),
            ("worker_died", False),
        ]
        await harness.up()
        assert [r.body.tolist() for r in (await harness.run([1, 1])).results] == [[2, 2]]


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


@pytest.mark.parametrize("name", ["inline", "thread", "process"])
async def test_arrays_of_a_model_with_declared_tensors(name):
    """Requests share a call, a bad row fails alone, and a request may leave an optional input out."""
    async with TransportHarness(
        lambda spec, pool: resolve("transport", name)(
            spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20
        ),
        "support.scripted:DeclaredModel",
        max_batch_size=8,
    ) as harness:
        rows = [np.full((n, 2), n, np.float32) for n in (1, 2, 3)]
        found = await harness.values(*[{"x": each} for each in rows])
        assert [each["y"].tolist() for each in found] == [(2 * each).tolist() for each in rows]
        assert {n for each in found for n in each["n"].tolist()} == {6}
        first, bad, wrong, last = await harness.values(
            {"x": rows[0]}, {"x": -rows[1]}, {"x": rows[2][:, :1]}, {"x": rows[2], "bias": np.ones((3, 1), np.float32)}
        )
        assert (first["y"].tolist(), last["y"].tolist()) == ([[2, 2]], [[7, 7]] * 3)
        assert [type(bad), type(wrong)] == [ItemFailed, BadRequest]
        assert harness.ready is not None
        assert [spec.optional for spec in harness.ready.metadata.inputs] == [False, True]


def test_the_process_transport_keeps_the_contract_on_uvloop():
    uvloop = pytest.importorskip("uvloop")
    uvloop.run(
        check_transport(
            lambda spec, pool: resolve("transport", "process")(
                spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20
            )
        )
    )
