"""Models of an engine with budgets, in threads: who waits is answered once, and memory is counted until it is free."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from penstock.config.checks import check_model
from penstock.config.schema import AutoscaleConfig, BatchingConfig, ModelConfig, ResidencyConfig
from penstock.core.engine.engine import Engine
from penstock.core.wire.slabs import Slab
from penstock.errors import ConfigError, DeadlineExceeded, LoadFailed, ModelNotReady, PenstockError
from penstock.types import Item, ItemResult
from support.waiting import until


class Gated:
    """A model whose loads and batches wait for a test."""

    def __init__(self) -> None:
        self.may_load, self.may_run = threading.Event(), threading.Event()
        self.may_load.set()
        self.may_run.set()
        self.loads = 0
        self.loaded = threading.Event()

    def __call__(self) -> Gated:
        return self

    def load(self, device: str) -> None:
        self.loads += 1
        assert self.may_load.wait(30)

    def predict(self, items: Sequence[Any]) -> list[Any]:
        self.running = True
        assert self.may_run.wait(30)
        return list(items)


def config(memory_bytes: int = 60, **residency: Any) -> ModelConfig:
    return ModelConfig(
        target="",
        transport="thread",
        batching=BatchingConfig(max_batch_size=1),
        residency=ResidencyConfig(memory_bytes=memory_bytes, **residency),
    )


def place(engine: Engine, name: str) -> str:
    resident = engine.handle(name, None).resident
    assert resident is not None
    return resident.place


async def test_a_model_that_is_wanted_while_it_leaves_comes_back_after_that() -> None:
    model = Gated()
    async with Engine(budgets={"cpu": 1000}) as engine:
        await engine.load("m", config(keep_alive_s=0.01), target=model)
        handle = engine.handle("m", None)
        assert await engine.infer("m", 1) == 1
        model.may_run.clear()
        slow = asyncio.create_task(engine.infer("m", 2))
        await until(lambda: handle.batcher is not None and handle.batcher.scheduler.running_rows == 1)
        assert handle.resident is not None
        leaving = asyncio.create_task(engine._residency._leave(handle.resident, "a test"))
        await until(lambda: place(engine, "m") == "leaving")
        again = asyncio.create_task(engine.infer("m", 3))
        await asyncio.sleep(0.2)
        assert (model.loads, place(engine, "m")) == (1, "leaving")
        model.may_run.set()
        assert (await slow, await again) == (2, 3)
        await leaving
        assert model.loads == 2


async def test_models_leave_when_a_load_has_proved_larger_than_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"first": 40, "second": 70}
    monkeypatch.setattr("penstock.core.engine.residency._measured", lambda handle: {"cpu": measured[handle.name]})
    async with Engine(budgets={"cpu": 100}) as engine:
        for name in measured:
            await engine.load(name, config(40), target=Gated())
            assert await engine.infer(name, 1) == 1
        await until(lambda: sorted(place(engine, name) for name in measured) == ["in", "out"])


@pytest.mark.parametrize("declared", [False, True])
async def test_a_model_that_proves_larger_than_the_budget_is_not_kept(
    declared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.core.engine.residency._measured", lambda handle: {"cpu": 150})
    said = r"model 'm' took 150 bytes of cpu when it was loaded, and its budget is 100 bytes: raise it in \[devices\]"
    model = Gated()
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("m", config(40), target=model)
        resident = engine.handle("m", None).resident
        assert resident is not None
        if not declared:
            resident.need, resident.declared = {"cpu": 0}, False
        answers: list[ItemResult] = []
        for k in range(10):
            engine.submit("m", None, Item(k), answers.append)
        await until(lambda: place(engine, "m") == "out" and len(answers) == 10)
        refused = [answer.error for answer in answers if answer.error is not None]
        assert [error for error in refused if not re.match(said, str(error))] == []
        assert engine.reading().devices == [("cpu", 100, 0)]
        for pause_s in (0.0, 1.1):  # also after the pause, it is not loaded in vain
            await asyncio.sleep(pause_s)
            with pytest.raises(ModelNotReady, match=said):
                await engine.infer("m", 1)
        assert model.loads == 1
    assert re.search(f"load_failed .*{said}", caplog.text)


async def test_a_pinned_model_that_proves_larger_than_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.core.engine.residency._measured", lambda handle: {"cpu": 150})
    async with Engine(budgets={"cpu": 100}) as engine:
        with pytest.raises(ConfigError, match="took 150 bytes of cpu when it was loaded, and its budget is 100 bytes"):
            await engine.load("m", config(40, pinned=True), target=Gated())
        assert engine.reading().devices == [("cpu", 100, 0)]


async def test_the_measured_memory_counts_for_all_instances_that_the_load_may_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.core.engine.residency.private_bytes", lambda pid: 30)
    scaled = msgspec.structs.replace(config(20), autoscale=AutoscaleConfig(max=4))
    async with Engine(budgets={"cpu": 200}) as engine:
        monkeypatch.setattr("penstock.core.engine.instances.Instances.pids", lambda self: dict.fromkeys(range(1), 1))
        await engine.load("m", scaled, target=Gated())
        assert engine.reading().devices == [("cpu", 200, 120)]


async def test_a_model_that_never_fits_is_refused_and_the_others_are_served() -> None:
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("large", config(80), target=Gated())
        await engine.load("other", config(20), target=Gated())
        await engine.load("pinned", config(40, pinned=True), target=Gated())
        tasks = [asyncio.create_task(engine.infer(name, 1)) for name in ("large", "other")]
        async with asyncio.timeout(20):
            assert await tasks[1] == 1
            with pytest.raises(
                ModelNotReady, match=r"needs 80 bytes of cpu, .* 100 bytes, of which pinned models hold 40"
            ):
                await tasks[0]


async def test_models_of_unknown_size_are_loaded_one_after_the_other() -> None:
    engine = Engine(budgets={"cpu": 100})
    models = [Gated() for _ in range(2)]
    async with engine:
        for k, model in enumerate(models):
            model.may_load.clear()
            await engine.load(f"m{k}", config(), target=model)
            resident = engine.handle(f"m{k}", None).resident
            assert resident is not None
            resident.need, resident.declared = {"cpu": 0}, False
        tasks = [asyncio.create_task(engine.infer(f"m{k}", k)) for k in range(2)]
        await until(lambda: models[0].loads == 1)
        await asyncio.sleep(0.1)
        assert models[1].loads == 0
        for model in models:
            model.may_load.set()
        assert await asyncio.gather(*tasks) == [0, 1]


@pytest.mark.parametrize("pinned", [False, True])
async def test_a_replaced_version_counts_until_it_has_ended(pinned: bool) -> None:
    old, new = Gated(), Gated()
    async with Engine(budgets={"cpu": 120}) as engine:
        await engine.load("m", config(60, pinned=pinned), target=old)
        assert await engine.infer("m", 1) == 1
        handle = engine.handle("m", None)
        old.may_run.clear()
        slow = asyncio.create_task(engine.infer("m", 2))
        await until(lambda: handle.batcher is not None and handle.batcher.scheduler.running_rows == 1)
        put = asyncio.create_task(engine.put(engine.prepare("m", config(60, pinned=pinned), target=new)))
        await until(lambda: engine.handle("m", None) is not handle)
        assert await engine.infer("m", 3) == 3
        assert engine.reading().devices == [("cpu", 120, 120)]
        old.may_run.set()
        assert await slow == 2
        await put
        assert engine.reading().devices == [("cpu", 120, 60)]
        assert len(engine._residency._residency.models) == len(engine._residency._handles) == 1


@pytest.mark.parametrize(
    ("budgets", "residency"),
    [({"cpu": 120}, {"pinned": True}), ({"cpu": 120}, {}), ({}, {"keep_alive_s": 60.0})],
    ids=["pinned", "with room", "without a budget"],
)
@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_version_that_does_not_load_leaves_the_old_one_as_it_was(
    budgets: dict[str, int], residency: dict[str, Any], version: str
) -> None:
    async with Engine(budgets=budgets) as engine:
        await engine.load("m", config(60, **residency), target=Gated())
        assert await engine.infer("m", 1) == 1
        new = msgspec.structs.replace(config(60, **residency), version=version)
        with pytest.raises(LoadFailed):
            await engine.put(engine.prepare("m", new, target=Failing()))
        assert engine.reading().devices == [(device, budget, 60) for device, budget in budgets.items()]
        assert await engine.infer("m", 1) == 1


async def test_a_new_version_without_room_beside_the_old_one_is_loaded_by_its_first_request() -> None:
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("m", config(60), target=Gated())
        assert await engine.infer("m", 1) == 1
        await engine.put(engine.prepare("m", config(60), target=Gated()))
        assert place(engine, "m") == "out"
        assert await engine.infer("m", 1) == 1


class Failing:
    def __call__(self) -> Failing:
        return self

    def load(self, device: str) -> None:
        raise RuntimeError("no weights")

    def predict(self, items: Sequence[Any]) -> list[Any]:
        return list(items)


async def test_a_pinned_model_waits_for_a_busy_one() -> None:
    busy = Gated()
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("busy", config(60), target=busy)
        assert await engine.infer("busy", 1) == 1
        busy.may_run.clear()
        slow = [asyncio.create_task(engine.infer("busy", k)) for k in range(2)]
        put = asyncio.create_task(engine.load("pinned", config(60, pinned=True), target=Gated()))
        for _ in range(30):
            await asyncio.sleep(0.01)
            assert engine.reading().devices[0][2] <= 100
        busy.may_run.set()
        await put
        assert engine.reading().devices[0][2] <= 100
        first, second = await asyncio.gather(*slow, return_exceptions=True)
        assert first == 0
        assert second == 1 or isinstance(second, ModelNotReady), "it had a place, or there is none any more"
        with pytest.raises(ModelNotReady):
            await engine.infer("busy", 1)


async def test_a_model_whose_batcher_cannot_be_made_fails_each_time_it_is_wanted() -> None:
    def bad() -> Any:
        raise ValueError("no policy")

    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("m", config(60), target=Gated())
        engine.handle("m", None)._policy = bad
        async with asyncio.timeout(20):
            for _ in range(2):
                with pytest.raises(ModelNotReady, match="did not load") as found:
                    await engine.infer("m", 1)
                await asyncio.sleep(0.01 + (found.value.retry_after_s or 0))
        assert place(engine, "m") == "out"


@pytest.mark.parametrize("error", [OSError("too many open files"), ConfigError("no file /srv/secret/weights")])
async def test_any_error_ends_a_load_and_clients_do_not_see_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("m", config(60), target=Gated())

        async def refuse(drain_s: float) -> None:
            raise error

        monkeypatch.setattr(engine.handle("m", None).instances, "bring_up", refuse)
        async with asyncio.timeout(20):
            with pytest.raises(ModelNotReady, match=r"^model 'm' did not load$"):
                await engine.infer("m", 1)
        assert place(engine, "m") == "out"


async def test_a_model_that_is_unloaded_while_it_comes_answers_once() -> None:
    model = Gated()
    model.may_load.clear()
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("m", config(60), target=model)
        answers: list[ItemResult] = []
        engine.submit("m", None, Item(1), answers.append)
        await engine.unload("m", drain_s=0.1)  # before the task of the load begins
        assert [type(answer.error) for answer in answers] == [ModelNotReady]
        await engine.load("m", config(60), target=model)
        engine.submit("m", None, Item(1), answers.append)
        await until(lambda: model.loads == 1)
        model.may_load.set()
        await engine.unload("m", drain_s=5.0)
        assert len(answers) == 2
        assert engine.reading().devices == [("cpu", 100, 0)]
        residency = engine._residency
        for known in (residency._handles, residency._wanted, residency._refused, residency._residency.models):
            assert not known


async def test_requests_that_left_take_no_place_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated()
    model.may_load.clear()
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("m", config(60), target=model)
        handle, answers = engine.handle("m", None), defaultdict[str, list[ItemResult]](list)
        slab = engine.allocate(100)
        assert isinstance(slab, Slab)
        engine.submit("m", None, Item(1), answers["cancelled"].append).cancel()
        engine.submit("m", None, Item(2, budget_s=0.05), answers["late"].append)
        engine.submit("m", None, Item(slab), answers["slab"].append)
        await until(lambda: bool(answers["late"]))
        assert handle.pending == 1

        def refuse(*arguments: Any) -> Any:
            raise DeadlineExceeded("late")

        with monkeypatch.context() as patch:
            patch.setattr(handle, "submit", refuse)
            model.may_load.set()
            await until(lambda: bool(answers["slab"]))
        assert engine.pool.in_use_bytes == 0
        assert not answers["cancelled"]
        assert all(isinstance(a.error, PenstockError) for a in (*answers["late"], *answers["slab"]))
        assert await engine.infer("m", 3) == 3


def test_keys_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_alive_s: a model with residency.pinned never leaves"):
        check_model(config(pinned=True, keep_alive_s=1.0))


async def test_requests_of_a_model_that_comes_back_are_answered_at_once_when_it_is_unloaded() -> None:
    model = Gated()
    async with Engine(budgets={"cpu": 100}) as engine:
        await engine.load("m", config(60), target=model)
        handle = engine.handle("m", None)
        assert await engine.infer("m", 1) == 1
        assert handle.resident is not None
        await engine._residency._leave(handle.resident, "a test")
        model.may_load.clear()
        answers: list[ItemResult] = []
        engine.submit("m", None, Item(2), answers.append)
        unload = asyncio.create_task(engine.unload("m", drain_s=3600))
        await until(lambda: bool(answers))
        model.may_load.set()
        async with asyncio.timeout(20):
            await unload
        assert [type(answer.error) for answer in answers] == [ModelNotReady]


async def test_a_model_with_sequences_must_be_pinned() -> None:
    sequences = BatchingConfig(max_batch_size=1, max_sequences=2)
    async with Engine(budgets={"cpu": 100}) as engine:
        with pytest.raises(ConfigError, match=r"would lose its sequences .* set residency.pinned = true"):
            await engine.load("m", msgspec.structs.replace(config(), batching=sequences), target=Gated())
