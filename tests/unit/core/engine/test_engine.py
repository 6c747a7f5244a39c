import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import penstock
from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.contracts import BatchRecord, Observer
from penstock.core.engine.engine import Engine
from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    PenstockError,
)
from penstock.types import Item, ItemResult


def double(items: list[Any]) -> list[Any]:
    return [ValueError("negative") if x < 0 else 2 * x for x in items]


def count_up(items: list[int]) -> Any:
    for i in range(max(items)):
        yield [i if i < n else None for n in items]


class NeverLoads:
    def load(self, device: str) -> None:
        raise RuntimeError("no weights")

    def predict(self, items: list[Any]) -> list[Any]:
        return items


def config(transport: str = "thread", **keys: Any) -> ModelConfig:
    batching = BatchingConfig(**{k: keys.pop(k) for k in list(keys) if k in BatchingConfig.__struct_fields__})
    return ModelConfig(target="here", transport=transport, batching=batching, **keys)


@pytest.fixture(params=["thread", "inline"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def test_infer_gives_the_result_and_raises_the_items_own_error(transport: str) -> None:
    async with Engine() as engine:
        await engine.load("double", config(transport), target=double)
        assert await engine.infer("double", 21) == 42
        with pytest.raises(Exception, match=r".") as caught:
            await engine.infer("double", -1)
        assert "ValueError" in str(caught.value) or isinstance(caught.value, ValueError)


async def test_a_configuration_may_hold_the_target_itself(transport: str) -> None:
    async with Engine() as engine:
        await engine.load("double", ModelConfig(target=double, transport=transport))
        assert await engine.infer("double", 21) == 42


async def test_infer_many_keeps_the_order_and_puts_exceptions_in_place(transport: str) -> None:
    async with Engine() as engine:
        await engine.load("double", config(transport, max_batch_size=4), target=double)
        results = await engine.infer_many("double", [*range(10), -1])
        assert results[:10] == [2 * i for i in range(10)]
        assert isinstance(results[10], Exception)
        assert await engine.infer_many("double", []) == []


async def test_a_stream_gives_its_parts_and_can_be_left_early(transport: str) -> None:
    async with Engine() as engine:
        await engine.load("count", config(transport), target=count_up)
        assert [part async for part in engine.stream("count", 3)] == [0, 1, 2]
        async for part in engine.stream("count", 100):
            if part == 2:
                break
        assert [part async for part in engine.stream("count", 2)] == [0, 1]


async def test_a_failed_load_raises_and_leaves_nothing_behind(transport: str) -> None:
    async with Engine() as engine:
        with pytest.raises(LoadFailed):
            await engine.load("never", config(transport), target=NeverLoads)
        with pytest.raises(ModelNotFound):
            await engine.infer("never", 1)


async def test_versions_stand_side_by_side_and_the_newest_answers_requests_without_one() -> None:
    async with Engine() as engine:
        await engine.load("m", config(version="10"), target=lambda items: [-x for x in items])
        await engine.load("m", config(version="9"), target=double)
        assert await engine.infer("m", 1) == -1
        assert await engine.infer("m", 1, version="9") == 2
        assert engine.metadata("m", None)[1] == ["9", "10"]
        await engine.unload("m", "10")
        assert await engine.infer("m", 1) == 2
        assert engine.metadata("m", None)[1] == ["9"]


async def test_a_configured_default_answers_until_another_configuration_replaces_it() -> None:
    async with Engine() as engine:
        await engine.load("m", config(version="1", default=True), target=double)
        await engine.put(engine.prepare("m", config(version="2"), target=lambda items: [-x for x in items]))
        assert await engine.infer("m", 1) == 2
        await engine.put(engine.prepare("m", config(version="1"), target=double))
        assert await engine.infer("m", 1) == -1


async def test_while_the_newest_version_does_not_load_another_one_answers() -> None:
    def broken() -> None:
        raise RuntimeError("no weights")

    async with Engine() as engine:
        await engine.load("m", config(version="1"), target=double)

        class Broken:
            def __init__(self) -> None:
                broken()

        await engine.put(engine.prepare("m", config(version="2"), target=Broken), keep=True)
        assert engine.handle("m", "2").state == "FAILED"
        assert await engine.infer("m", 1) == 2
        assert engine.model_ready("m", None)
        assert not engine.model_ready("m", "2")


async def test_ready_only_while_every_model_is_up_and_nothing_drains() -> None:
    engine = Engine()
    assert not engine.ready()
    await engine.load("m", config(), target=double)
    assert engine.ready()
    assert engine.model_ready("m", None)
    assert [s.state for s in engine.statuses()] == ["READY"]
    engine.drain()
    assert not engine.ready()
    assert await engine.infer("m", 1) == 2
    await engine.close()


async def test_close_answers_accepted_requests() -> None:
    engine = Engine()
    await engine.load("m", config(), target=double)
    answers = [asyncio.ensure_future(engine.infer("m", i)) for i in range(5)]
    await asyncio.sleep(0)
    await engine.close()
    assert await asyncio.gather(*answers) == [0, 2, 4, 6, 8]


async def test_a_past_deadline_and_an_unknown_model_are_refused_at_once() -> None:
    async with Engine() as engine:
        await engine.load("m", config(), target=double)
        with pytest.raises(DeadlineExceeded):
            await engine.infer("m", 1, budget_s=0)
        with pytest.raises(DeadlineExceeded):
            await engine.infer_many("m", [1, 2], budget_s=0)
        with pytest.raises(DeadlineExceeded):
            await anext(engine.stream("m", 1, budget_s=0))
        with pytest.raises(ModelNotFound):
            await engine.infer("n", 1)
        with pytest.raises(ModelNotFound):
            await engine.infer("m", 1, version="9")
        engine.expect(["n"])
        with pytest.raises(ModelNotReady, match="model 'n' is about to be loaded"):
            await engine.infer("n", 1)
        engine.expect(())
        with pytest.raises(ModelNotFound):
            await engine.infer("n", 1)


async def test_a_cancelled_caller_frees_its_place() -> None:
    async with Engine() as engine:
        await engine.load("m", config("inline", max_batch_size=1), target=double)
        task = asyncio.ensure_future(engine.infer("m", 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await engine.infer("m", 2) == 4


async def test_observers_hear_of_batches() -> None:
    records: list[BatchRecord] = []
    latencies: list[float] = []

    class Records(Observer):
        def on_complete(self, record: BatchRecord) -> None:
            records.append(record)

        def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
            latencies.extend(latencies_s)

    async with Engine(observers=[Records()]) as engine:
        await engine.load("m", config(), target=double)
        await asyncio.gather(*(engine.infer("m", i) for i in range(8)))
    assert sum(r.rows for r in records) == 8
    assert len(records) < 8
    assert all(r.waits_s[0] >= 0 for r in records)
    assert len(latencies) == 8
    assert max(latencies) >= max(w for r in records for w in r.waits_s)


async def test_a_draining_model_refuses_new_requests() -> None:
    async with Engine() as engine:
        await engine.load("m", config(), target=double)
        handle = engine.handle("m", None)
        await handle.close(1)
        with pytest.raises(ModelNotReady):
            await engine.infer("m", 1)


async def test_the_models_own_rows_and_bucket_rules_hold(transport: str) -> None:
    seen: list[int] = []

    @penstock.model(rows="header:x-rows", bucket="content-type", max_batch_size=8)
    def sized(items: list[Any]) -> list[Any]:
        seen.append(len(items))
        return items

    def item(rows: bytes, kind: str) -> Item:
        return Item(b"[1]", codec="native", content_type=kind, headers=[(b"X-Rows", rows)])

    async with Engine() as engine:
        await engine.load("sized", config(transport, max_hold_s=0.0), target=sized)
        answers: asyncio.Queue[ItemResult] = asyncio.Queue()
        for rows, kind in ((b"8", "text/plain"), (b"8", "text/plain"), (b"1", "text/a"), (b"1", "text/b")):
            engine.submit("sized", None, item(rows, kind), answers.put_nowait)
        for _ in range(4):
            assert (await answers.get()).error is None
    assert seen == [1, 1, 1, 1]


@pytest.mark.parametrize("option", [{"policy": "adaptiv"}, {"rows": "columns"}, {"bucket": "size"}])
async def test_an_option_that_does_not_exist_is_named_and_nothing_hangs(transport: str, option: dict[str, str]) -> None:
    @penstock.model(**option)
    def echo(items: list[Any]) -> list[Any]:
        return items

    def plain(items: list[Any]) -> list[Any]:
        return items

    async with Engine() as engine, asyncio.timeout(5):
        with pytest.raises(ConfigError, match=next(iter(option.values()))):
            await engine.load("echo", config(transport), target=echo)
        with pytest.raises(ConfigError, match=next(iter(option.values()))):
            await engine.load("plain", config(transport, **option), target=plain)
        assert engine.statuses() == []


class NoPolicy:
    def __init__(self) -> None:
        raise ValueError("a bug")


async def test_a_failing_policy_constructor_raises_without_a_hang(transport: str) -> None:
    @penstock.model(policy=f"{__name__}:NoPolicy")
    def echo(items: list[Any]) -> list[Any]:
        return items

    async with Engine() as engine, asyncio.timeout(5):
        for keys, target in (({}, echo), ({"policy": f"{__name__}:NoPolicy"}, double)):
            with pytest.raises(ConfigError, match="NoPolicy raised ValueError: a bug"):
                await engine.load("m", config(transport, **keys), target=target)
        assert engine.statuses() == []


async def test_invalid_priorities_are_refused_without_a_hang(transport: str) -> None:
    with pytest.raises(ConfigError, match="priority"):
        penstock.model(priority=[])(double)
    async with Engine() as engine, asyncio.timeout(5):
        with pytest.raises(ConfigError, match="priority"):
            await engine.load("m", config(transport, priority=()), target=double)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"transport": "inline", "instances": 2}, "inline transport runs one instance"),
        ({"devices": ("cuda:x",)}, "found 'cuda:x'"),
        ({"version": "scale"}, "version: found 'scale', expected"),
    ],
)
async def test_a_configuration_made_in_python_is_checked_too(keys: dict[str, Any], words: str) -> None:
    async with Engine() as engine:
        with pytest.raises(ConfigError, match=words):
            await engine.load("m", config(**keys), target=double)


async def test_a_hanging_load_times_out() -> None:
    gate = threading.Event()

    class Hangs:
        def load(self, device: str) -> None:
            gate.wait(10)

        def predict(self, items: list[Any]) -> list[Any]:
            return items

    async with Engine() as engine, asyncio.timeout(5):
        with pytest.raises(LoadFailed, match=r"loading exceeded load_timeout_s=0\.05"):
            await engine.load("m", config(load_timeout_s=0.05), target=Hangs)
    gate.set()


async def test_an_unload_is_reported_after_the_last_handle_of_a_version(transport: str) -> None:
    heard: list[tuple[str, ...]] = []

    class Ear(Observer):
        def on_unload(self, model: str, version: str) -> None:
            heard.append(("unload", model, version))

        def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
            heard.append((state, model, version))

    async with Engine(observers=[Ear()]) as engine:
        await engine.load("m", config(transport), target=double)
        await engine.load("m", config(transport, version="2"), target=double)
        await engine.put(engine.prepare("m", config(transport), target=double))
        with pytest.raises(ConfigError, match="already loaded"):
            await engine.load("m", config(transport), target=double)
        assert ("unload", "m", "1") not in heard
        heard.clear()
        await engine.unload("m", "1")
        assert heard == [("removed", "m", "1"), ("unload", "m", "1")]
        heard.clear()
        with pytest.raises(LoadFailed):
            await engine.load("never", config(transport), target=NeverLoads)
        assert heard[-2:] == [("removed", "never", "1"), ("unload", "never", "1")]


async def test_a_version_that_cannot_be_closed_is_forgotten_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine() as engine:
        await engine.load("m", config(), target=double)
        handle = engine.handle("m", None)
        close = handle.close

        async def fail(drain_s: float) -> None:
            await close(drain_s)
            raise RuntimeError("a bug")

        monkeypatch.setattr(handle, "close", fail)
        with pytest.raises(RuntimeError, match="a bug"):
            await engine.unload("m")
        assert engine.all_statuses() == []


async def test_a_policy_can_be_a_user_class(transport: str) -> None:
    async with Engine() as engine:
        keys = {"policy": "penstock.core.batching.policies.fixed:Unbatched"}
        await engine.load("double", config(transport, **keys), target=double)
        assert await engine.infer("double", 4) == 8


async def test_close_ends_a_load_that_hangs() -> None:
    at_gate, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Hangs:
        def load(self, device: str) -> None:
            loop.call_soon_threadsafe(at_gate.set)
            gate.wait(10)

        def predict(self, items: list[Any]) -> list[Any]:
            return items

    engine = Engine()
    loading = asyncio.create_task(engine.load("hangs", config(), target=Hangs))
    async with asyncio.timeout(5):
        await at_gate.wait()
        await engine.close(0.0)
        with pytest.raises(ModelNotReady, match="hangs"):
            await loading
    gate.set()
    with pytest.raises(ModelNotReady, match="closed"):
        await engine.load("late", config(), target=double)


async def test_unloading_under_load_answers_every_request_once(transport: str) -> None:
    async with Engine() as engine:
        await engine.load("double", config(transport, max_batch_size=4, max_queue=1000), target=double)
        accepted = [asyncio.create_task(engine.infer("double", i)) for i in range(100)]
        await asyncio.sleep(0)
        unloading = asyncio.create_task(engine.unload("double"))
        await asyncio.sleep(0)
        with pytest.raises(ModelNotFound):
            await engine.infer("double", 1)
        assert await asyncio.gather(*accepted) == [2 * i for i in range(100)]
        await unloading


async def test_a_model_with_a_broken_scheduler_is_not_ready(transport: str, caplog: Any) -> None:
    async with Engine() as engine:
        await engine.load("double", config(transport), target=double)
        engine.handle("double", None).batcher.scheduler.poll = None  # type: ignore[union-attr,assignment]
        with pytest.raises(PenstockError, match="internal error"):
            await engine.infer("double", 1)
        assert not engine.ready()
        with pytest.raises(ModelNotReady):
            await engine.infer("double", 1)


async def test_a_raising_observer_loses_no_answer(transport: str, caplog: Any) -> None:
    def raises(*arguments: Any) -> None:
        raise RuntimeError("a bug in an observer")

    Broken = type("Broken", (Observer,), {hook: raises for hook in vars(Observer) if hook.startswith("on_")})

    async with Engine(observers=[Broken()]) as engine, asyncio.timeout(5):
        await engine.load("double", config(transport, max_batch_size=1, max_queue=2), target=double)
        for _ in range(3):
            assert await engine.infer("double", 2) == 4
        assert isinstance((await engine.infer_many("double", [-1]))[0], Exception)
        with pytest.raises(DeadlineExceeded):
            await engine.infer("double", 1, budget_s=0)
    assert "on_complete" in caplog.text


async def test_a_stream_that_everybody_has_left_ends_and_frees_its_worker(transport: str) -> None:
    ended = threading.Event()

    def endless(items: list[Any]) -> Any:
        try:
            while True:
                yield [1 for _ in items]
                if transport == "thread":
                    time.sleep(0.001)
        finally:
            ended.set()

    async with Engine() as engine, asyncio.timeout(10):
        await engine.load("endless", config(transport), target=endless)
        calls: list[Any] = []

        def leave(result: ItemResult) -> None:
            calls.pop().cancel()

        for _ in range(2):  # the second shows that the worker is free
            ended.clear()
            calls.append(engine.submit("endless", None, Item(1), leave))
            while not ended.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


class LoadsTheSecondTime:
    tries = 0

    def load(self, device: str) -> None:
        type(self).tries += 1
        if self.tries == 1:
            raise RuntimeError("no weights yet")

    def predict(self, items: list[Any]) -> list[Any]:
        return items


async def test_a_version_that_fails_to_load_can_stay_and_is_retried(
    transport: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadsTheSecondTime, "tries", 0)
    up = asyncio.Event()

    class Watcher(Observer):
        def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
            if state == "ready":
                up.set()

    async with Engine(observers=[Watcher()]) as engine:
        handle = engine.prepare("m", config(transport), target=LoadsTheSecondTime)
        await engine.put(handle, keep=True)
        assert "no weights yet" in caplog.text
        assert [(s.state, s.ready_instances) for s in engine.statuses()] == [("FAILED", 0)]
        assert [(w.slot, w.up) for w in handle.instances.workers()] == [(0, False)]
        with pytest.raises(ModelNotReady):
            await engine.infer("m", 1)
        await asyncio.wait_for(up.wait(), 10)
        assert await engine.infer("m", 1) == 1


async def test_a_version_that_fails_to_load_is_removed_by_default(transport: str) -> None:
    async with Engine() as engine:
        with pytest.raises(LoadFailed):
            await engine.put(engine.prepare("m", config(transport), target=NeverLoads))
        assert engine.all_statuses() == []


async def test_a_handle_is_retired_by_itself_though_another_has_its_number(transport: str) -> None:
    async with Engine() as engine:
        old = engine.prepare("m", config(transport), target=double)
        await engine.put(old)
        retiring = asyncio.create_task(engine.retire(old, 5.0))
        await asyncio.sleep(0)
        new = engine.prepare("m", config(transport), target=double)
        await engine.put(new)
        await retiring
        assert await engine.infer("m", 2) == 4
        assert (old.ready, new.ready, new.instances.up, new.pending) == (False, True, 1, 0)


async def test_worker_snapshots_include_the_start_time() -> None:
    before_s = time.time()
    async with Engine() as engine:
        handle = engine.prepare("m", config(instances=2), target=double)
        await engine.put(handle)
        found = handle.instances.workers()
        assert [(w.slot, w.device, w.up, w.pid) for w in found] == [(0, "cpu", True, 0), (1, "cpu", True, 0)]
        assert all(before_s <= w.since_s <= time.time() for w in found)
        await handle.scale(1, 5.0)
        assert [w.slot for w in handle.instances.workers()] == [0]
