"""`preprocess` in helper processes, for every transport that has them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import structs

from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import BadOutput, BadRequest, ItemFailed, LoadFailed, ModelNotReady, RunTimeout, WorkerDied
from penstock.plugins import resolve
from penstock.types import Item
from support.transports import TRANSPORT_CHECKS, MakeTransport, TransportHarness, values

MODEL = "support.preprocessed:Preprocessing"
LARGER_THAN_SHARED = 70 * 2**20  # than the memory of a helper for results


def transport(name: str, helpers: int = 2, wrapper: str = "", **options: Any) -> MakeTransport:
    """Makes transports whose workers have so many helpers; `options` are the class's."""

    def make(spec: WorkerSpec, pool: Any) -> Any:
        config = structs.replace(spec.config, preprocess_processes=helpers, options=options, transport=name)
        target = Wrapped(spec.target, wrapper) if wrapper else spec.target
        spec = structs.replace(spec, config=config, target=target)
        return resolve("transport", name)(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=4 * 2**20)

    return make


def both(test: Callable[..., Any]) -> Any:
    return pytest.mark.parametrize("name", ["thread", "process"])(test)


@both
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_a_transport_keeps_its_contract(name: str, check: Any) -> None:
    await check(transport(name, wrapper="support.preprocessed:preprocessing"))


@both
async def test_helpers_construct_the_class_and_only_they_prepare_it(name: str) -> None:
    async with TransportHarness(transport(name, prefix="p"), MODEL) as harness:
        found = await harness.values(*[("who", 0)] * 8)
        workers = {worker for worker, _, _ in found}
        helpers = {helper for _, _, (helper, *_) in found}
        assert (len(workers), len(helpers)) == (1, 2)
        assert not workers & helpers
        for _, loaded, (_, prepared, prefix, gpus, threads) in found:
            assert (loaded, prepared, prefix, gpus, threads) == (["cpu"], ["preprocess"], "p", "", "1")


async def test_without_helpers_the_worker_prepares_itself_first() -> None:
    async with TransportHarness(transport("process", helpers=0), MODEL) as harness:
        ((worker, loaded, (helper, *_)),) = await harness.values(("who", 0))
        assert (worker, loaded) == (helper, ["preprocess", "cpu"])


@both
async def test_results_keep_the_order_of_their_items(name: str) -> None:
    async with TransportHarness(transport(name), MODEL) as harness:
        naps = [0.02 if n % 7 == 0 else 0.0 for n in range(40)]
        assert await harness.values(*[n if nap == 0 else ("sleep", nap) for n, nap in enumerate(naps)]) == [
            n if nap == 0 else nap for n, nap in enumerate(naps)
        ]
        assert values(await harness.run([1, 2], [], [3], many=True)) == [[1, 2], [], [3]]


@both
async def test_a_bad_item_fails_alone(name: str) -> None:
    async with TransportHarness(transport(name), MODEL) as harness:
        raised, good, refused, lock, dies, last = await harness.values(
            ("raise", "no"), 1, ("refuse", "too dark"), ("object", 0), ("die", 5), 2
        )
        assert (good, last) == (1, 2)
        assert (type(raised), raised.message) == (ItemFailed, "preprocess raised ValueError")
        assert "in preprocess" in raised.detail
        assert (type(refused), refused.message) == (BadRequest, "too dark")
        assert type(lock) is BadOutput
        assert lock.message == "preprocess helper: the model returned a lock that cannot be pickled"
        assert (type(dies), dies.message) == (WorkerDied, "preprocess helper: the worker exited with code 5")
        assert not harness.downs
        assert await harness.values(3) == [3]


@both
async def test_arrays_and_large_bodies_cross_in_memory(name: str) -> None:
    async with TransportHarness(transport(name), MODEL) as harness:
        small, large, huge = await harness.values(*[("array", n) for n in (10, 300_000, LARGER_THAN_SHARED)])
        assert [len(a) for a in (small, large, huge)] == [10, 300_000, LARGER_THAN_SHARED]
        assert all((a == 7).all() for a in (small, large, huge))
        await harness.up()
        slab = harness.pool.allocate(300_000)
        assert slab is not None
        slab.view[:] = b"x" * 300_000
        (body,) = values(await harness.final(harness.post([Item(slab, "native")])))
        assert bytes(body) == b"x" * 300_000
        slab.release()
        sent = np.arange(300_000)
        (echoed,) = await harness.values({"x": sent})
        assert (echoed["x"] == sent).all()
        assert echoed["x"].flags.writeable


@both
async def test_metrics_of_helpers_arrive(name: str) -> None:
    async with TransportHarness(transport(name), MODEL) as harness:
        await harness.run(("die", 3))
        parts = [await harness.run(("count", n)) for n in (2, 3)]
        deltas = [delta for part in parts for delta in part.metrics or []]
        totals = {kind: sum(d.value for d in deltas if d.name == kind) for kind in ("counted", "preprocess_deaths")}
        assert totals["counted"] == 5


@both
@pytest.mark.parametrize("stage", ["init", "load", "item"])
async def test_a_helper_that_dies_once_costs_no_item(name: str, stage: str, tmp_path: Path) -> None:
    file = tmp_path / "ends"
    async with TransportHarness(transport(name, path=str(file)), MODEL) as harness:
        await harness.up()
        file.write_text(stage)
        if stage != "item":
            found = await harness.values(("who", 0), ("who", 0))
            for helper in {who[2][0] for who in found}:
                os.kill(helper, signal.SIGKILL)
        assert await harness.values(*[("sleep", 0.001 * n) for n in range(16)]) == [0.001 * n for n in range(16)]
        assert not file.exists()
        assert not harness.downs


@both
async def test_a_helper_that_hangs_is_replaced_before_its_worker(name: str) -> None:
    async with TransportHarness(transport(name), MODEL, run_timeout_s=3.0) as harness:
        await harness.up()
        started = time.monotonic()
        first, hung, last = await harness.values(1, ("sleep", 60), 2)
        assert (first, type(hung), last) == (1, RunTimeout, 2)
        assert time.monotonic() - started < 3.0
        assert not harness.downs


@both
async def test_helpers_that_no_longer_load_end_in_an_error(name: str, tmp_path: Path) -> None:
    class_file = tmp_path / "vanishing.py"
    class_file.write_text("import os\nclass Model:\n    def preprocess(self, item):\n        os._exit(3)\n"
                          "    def predict(self, items):\n        return items\n")  # fmt: skip
    async with TransportHarness(transport(name, 1), f"{class_file}:Model", run_timeout_s=20.0) as harness:
        await harness.up()
        class_file.unlink()
        (found,) = await harness.values(1)
        assert type(found) is ModelNotReady
        assert "no helper process runs" in found.message
        assert "vanishing.py" in found.message
        (again,) = await harness.values(1)
        assert type(again) is ModelNotReady
        assert not harness.downs


@both
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("support.preprocessed:NoPreprocess", "is no Python class with preprocess"),
        ("support.preprocessed:without_preprocess", "is no Python class with preprocess"),
        ("support.scripted:DeclaredModel", "is no Python class with preprocess"),
        ("support.devices:model", "is no Python class with preprocess"),
    ],
)
async def test_a_target_without_preprocess_is_refused(name: str, target: str, words: str) -> None:
    if "devices" in target:
        pytest.importorskip("torch")
    async with TransportHarness(transport(name), target) as harness:
        await harness.until(lambda: harness.downs)
        assert type(harness.downs[0][0]) is LoadFailed
        assert words in harness.downs[0][0].message


@both
async def test_a_helper_that_does_not_load_is_reported_with_the_reason(name: str) -> None:
    async with TransportHarness(transport(name, path=__file__, wrong=1), MODEL) as harness:
        await harness.until(lambda: harness.downs)
        message = harness.downs[0][0].message
        assert message.startswith("preprocess_processes: ")
        assert "has no option 'wrong'" in message


async def test_an_option_that_cannot_be_sent_to_helpers_is_named() -> None:
    async with TransportHarness(transport("thread", path=sys.stderr), MODEL) as harness:
        await harness.until(lambda: harness.downs)
        assert "options, a dict, cannot be sent to a worker process" in harness.downs[0][0].message


@both
async def test_streams_and_collated_batches_are_preprocessed_in_helpers(name: str) -> None:
    async with TransportHarness(transport(name), "support.preprocessed:Streaming") as harness:
        await harness.up()
        number = harness.post([Item(2), Item(("raise", "no")), Item(3)])
        await harness.final(number)
        *parts, end = [values(part) for part in harness.parts[number]]
        assert parts == [[2, None, 3], [4, None, 6]]
        assert type(end[1]) is ItemFailed
    async with TransportHarness(transport(name), "support.preprocessed:Collating") as harness:
        one, bad, two = await harness.values(1, ("raise", "no"), 2)
        assert (one, type(bad), two) == (2, ItemFailed, 4)


@both
async def test_step_models_and_async_models_are_preprocessed_in_helpers(name: str) -> None:
    async with TransportHarness(transport(name), "support.preprocessed:Stepping") as harness:
        await harness.up()
        numbers = [harness.post([Item(n)]) for n in (5, -1, "die", 7)]
        parts = []
        for number in numbers:
            await harness.final(number)
            parts.append([result for part in harness.parts[number] for result in values(part)])
        assert [[r for r in each if not isinstance(r, (Exception, type(None)))] for each in parts] == [
            [5, 0], [], [], [7, 0]
        ]  # fmt: skip
        assert [type(each[-1]) for each in parts[1:3]] == [ItemFailed, WorkerDied]
    async with TransportHarness(transport(name), "support.preprocessed:Awaiting") as harness:
        await harness.up()
        number = harness.post([Item(1), Item(("raise", "no")), Item(("who", 0))])
        await harness.final(number)
        found = {k: v for part in harness.parts[number] for k, v in zip(part.at or range(3), values(part), strict=True)}
        assert (found[0], type(found[1])) == (1, ItemFailed)
        assert found[2][0] != found[2][2][0]
        assert found[2][1] == ["cpu"]


@both
async def test_helpers_end_with_their_worker(name: str) -> None:
    async with TransportHarness(transport(name), "support.preprocessed:Ending") as harness:
        found = await harness.values(*[("who", 0)] * 8)
        old = [psutil.Process(pid) for pid in {who[2][0] for who in found}]
        assert len(old) == 2
        assert type((await harness.run("end")).error) is WorkerDied
        assert not psutil.wait_procs(old, 10)[1]
        found = await harness.values(*[("who", 0)] * 8)
        new = [psutil.Process(pid) for pid in {who[2][0] for who in found}]
        await harness.transport.close(10.0)
        assert not psutil.wait_procs(new, 10)[1]
