"""Instances behind a transport whose workers come and go as the test says."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.contracts import Observer, OnPart, TransportListener
from penstock.core.engine.handle import ModelHandle
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError, Conflict, LoadFailed, LoadOutOfMemory, ModelNotReady, PenstockError, WorkerDied
from penstock.types import Batch, BatchPart, Item, ItemResult, ModelMetadata, Ready


class Stage:
    """A handle over a transport of the test's own, and what both were told."""

    depth = 1

    def __init__(self, instances: int = 1, **keys: Any) -> None:
        batching = BatchingConfig(**{"max_batch_size": 1, **keys.pop("batching", {})})
        policy = keys.pop("policy", None)
        config = ModelConfig(target="a:b", instances=instances, batching=batching, **keys)
        self.spec = WorkerSpec("m", "1", config, "a:b", instances=instances)
        self.shares: list[int] = []  # how many share the machine, for each worker that starts
        self.slots: set[int] = set(range(instances))
        self.removed: list[tuple[int, float]] = []
        self.may_end = asyncio.Event()  # what is removed has nothing more to answer
        self.may_end.set()
        self.sent: list[tuple[Batch, OnPart]] = []
        self.heard: list[tuple[int, str]] = []
        self.loads: list[tuple[int, float]] = []
        self.listener: TransportListener
        stage = self

        class Ear(Observer):
            def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
                stage.heard.append((slot, state))

            def on_load(self, model: str, version: str, slot: int, seconds: float) -> None:
                stage.loads.append((slot, seconds))

        devices = ["cpu"] * instances
        self.handle = ModelHandle(self.spec, self, devices, 2**20, [Ear()], policy)

    # ---- the transport

    async def start(self, listener: TransportListener) -> None:
        self.listener = listener

    def add_slot(self, slot: int, device: str) -> None:
        assert slot not in self.slots
        self.slots.add(slot)
        self.shares.append(self.spec.instances)

    async def remove_slot(self, slot: int, drain_s: float) -> None:
        self.removed.append((slot, drain_s))
        await self.may_end.wait()
        self.slots.discard(slot)

    def send(self, batch: Batch, on_part: OnPart) -> None:
        self.sent.append((batch, on_part))

    def abandon(self, slot: int, batch_id: int) -> None: ...

    async def close(self, drain_s: float) -> None:
        self.may_end.set()
        self.slots.clear()

    def forget(self) -> None: ...

    # ---- what the test does

    def up(self, *slots: int, **options: Any) -> None:
        for slot in slots:
            self.listener.slot_up(slot, Ready(ModelMetadata("m", "1"), options=options))

    def down(self, slot: int, error: PenstockError | None = None, retry_in_s: float | None = 0.1) -> None:
        self.listener.slot_down(slot, error or LoadFailed("no weights"), retry_in_s)

    async def begin(self, coroutine: Any) -> asyncio.Task[Any]:
        """A task that has come as far as it can without a worker's word."""
        task = asyncio.ensure_future(coroutine)
        for _ in range(20):
            await asyncio.sleep(0)
        return task

    async def load(self, *slots: int) -> None:
        loading = await self.begin(self.handle.load())
        self.up(*slots)
        await loading

    def ask(self) -> list[ItemResult]:
        """Submits a request; its answer comes into the list."""
        answer: list[ItemResult] = []
        self.handle.submit(Item(1), answer.append)
        return answer

    def answer(self) -> int:
        """Answers the oldest batch: its slot."""
        batch, on_part = self.sent.pop(0)
        on_part(BatchPart(batch.id, [ItemResult(body=item.payload) for item in batch.items]))
        return batch.slot

    @property
    def seen(self) -> tuple[str, int, int]:
        status = self.handle.status()
        return status.state, status.instances, status.ready_instances


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """One instance, up."""
    stage = Stage()
    await stage.load(0)
    yield stage
    await stage.handle.close(0)


# ---- a scale that fails


async def test_a_failed_scale_lets_a_new_instance_answer_its_batch(stage: Stage) -> None:
    scaling = await stage.begin(stage.handle.scale(3, drain_s=7.0))
    answers = [stage.ask(), stage.ask()]
    stage.up(1)
    await asyncio.sleep(0)
    assert {batch.slot for batch, _ in stage.sent} == {0, 1}
    stage.may_end.clear()
    stage.down(2)
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(stage.removed) == [(1, 7.0), (2, 7.0)], "with time to answer"
    assert not scaling.done()
    stage.answer()
    stage.answer()
    stage.may_end.set()
    with pytest.raises(LoadFailed, match="no weights"):
        await scaling
    assert [a[0].error for a in answers] == [None, None]
    assert stage.seen == ("READY", 1, 1)
    assert stage.slots == {0}


async def test_a_scale_fails_with_its_first_failed_instance(stage: Stage) -> None:
    scaling = await stage.begin(stage.handle.scale(4, 0))
    stage.down(2)
    with pytest.raises(LoadFailed):
        await scaling
    assert stage.seen == ("READY", 1, 1)


async def test_a_new_instance_that_dies_at_once_counts_as_not_loaded(stage: Stage) -> None:
    scaling = await stage.begin(stage.handle.scale(3, 0))
    stage.down(0, LoadFailed("the reason of another"))
    stage.up(1)
    stage.down(1, WorkerDied("killed by SIGSEGV"))
    with pytest.raises(LoadFailed, match="a new instance of model 'm' did not load: killed by SIGSEGV"):
        await scaling


async def test_a_model_whose_workers_die_during_loading_fails_to_load() -> None:
    stage = Stage(2)
    loading = await stage.begin(stage.handle.load())
    stage.up(0)
    stage.down(0, WorkerDied("killed by SIGSEGV"))
    stage.down(1, WorkerDied("killed by SIGSEGV"))
    with pytest.raises(LoadFailed, match="did not load: killed by SIGSEGV"):
        await loading
    assert stage.seen[0] == "FAILED"
    await stage.handle.close(0)


async def test_a_model_that_has_no_worker_after_a_failed_scale_is_not_ready(stage: Stage) -> None:
    scaling = await stage.begin(stage.handle.scale(3, 0))
    stage.down(0)
    stage.up(1)
    assert stage.seen[0] == "READY"
    stage.down(2)
    with pytest.raises(LoadFailed):
        await scaling
    assert stage.seen == ("FAILED", 1, 0)
    assert not stage.handle.ready


async def test_a_transport_that_refuses_to_scale_changes_nothing(stage: Stage, monkeypatch: Any) -> None:
    def refuse(slot: int, device: str) -> None:
        raise ConfigError("no more")

    monkeypatch.setattr(stage, "add_slot", refuse)
    with pytest.raises(ConfigError, match="no more"):
        await stage.handle.scale(3, 0)
    assert stage.seen == ("READY", 1, 1)
    assert stage.spec.instances == 1


# ---- scales that meet


async def test_concurrent_scales_run_in_sequence(stage: Stage) -> None:
    first = await stage.begin(stage.handle.scale(3, 0))
    second = await stage.begin(stage.handle.scale(1, 0))
    assert stage.slots == {0, 1, 2}
    stage.up(1, 2)
    await first
    await second
    assert stage.seen == ("READY", 1, 1)
    assert stage.slots == {0}


async def test_an_aborted_scale_ends_at_once_and_removes_its_instances(stage: Stage) -> None:
    scaling = await stage.begin(stage.handle.scale(3, 0))
    stage.up(1)
    assert stage.handle.instances.abort() is False, "it was no load"
    with pytest.raises(Conflict, match="unloaded while it was scaled"):
        await scaling
    assert stage.slots == {0}
    assert stage.seen == ("READY", 1, 1)


async def test_an_abort_without_a_scale_changes_nothing(stage: Stage) -> None:
    assert stage.handle.instances.abort() is False
    scaling = await stage.begin(stage.handle.scale(2, 0))
    stage.up(1)
    await scaling
    assert stage.seen == ("READY", 2, 2)


async def test_an_aborted_load_raises_conflict() -> None:
    stage = Stage()
    loading = await stage.begin(stage.handle.load())
    assert stage.handle.instances.abort() is True
    with pytest.raises(Conflict, match="unloaded while it was loading"):
        await loading
    await stage.handle.close(0)


async def test_closing_does_not_wait_for_a_scale(stage: Stage) -> None:
    scaling = await stage.begin(stage.handle.scale(3, 0))
    waiting = await stage.begin(stage.handle.scale(2, 0))
    await stage.handle.close(0)
    for task in (scaling, waiting):
        with pytest.raises(ModelNotReady, match="stopped while it was scaled"):
            await task


async def test_a_caller_that_leaves_a_scale_down_does_not_leave_a_worker_behind(stage: Stage) -> None:
    growing = await stage.begin(stage.handle.scale(2, 0))
    stage.up(1)
    await growing
    stage.may_end.clear()
    shrinking = await stage.begin(stage.handle.scale(1, 5.0))
    shrinking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shrinking
    assert stage.seen == ("READY", 1, 1)
    stage.may_end.set()
    again = await stage.begin(stage.handle.scale(2, 0))
    assert stage.slots == {0, 1}, "the number of the one that went is free again"
    stage.up(1)
    await again


async def test_starting_instances_share_the_cores_of_the_final_number(stage: Stage) -> None:
    growing = await stage.begin(stage.handle.scale(4, 0))
    assert stage.shares == [4, 4, 4]
    stage.up(1, 2, 3)
    await growing
    await stage.handle.scale(2, 0)
    assert stage.spec.instances == 2


# ---- slots


async def test_a_removed_slot_is_reported(stage: Stage) -> None:
    growing = await stage.begin(stage.handle.scale(2, 0))
    stage.up(1)
    await growing
    await stage.handle.scale(1, 0)
    assert stage.heard == [(0, "ready"), (1, "ready"), (1, "removed")]
    failing = await stage.begin(stage.handle.scale(2, 0))
    stage.down(1)
    with pytest.raises(LoadFailed):
        await failing
    assert stage.heard[3:] == [(1, "failed"), (1, "removed")]
    await stage.handle.close(0)
    await stage.handle.close(0)
    assert stage.heard[5:] == [(0, "removed")]


@pytest.mark.parametrize("error", [ValueError("a bug"), WorkerDied("odd")])
async def test_an_unusable_first_worker_fails_the_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    stage = Stage()

    def fail(ready: Ready) -> Any:
        raise error

    monkeypatch.setattr(stage.handle, "_make_batcher", fail)
    loading = await stage.begin(stage.handle.load())
    stage.up(0)
    with pytest.raises(LoadFailed, match="could not be made"):
        await loading
    assert stage.seen == ("FAILED", 1, 0)
    await stage.handle.close(0)


async def test_slots_can_change_after_the_scheduler_broke(stage: Stage, caplog: Any) -> None:
    answer = stage.ask()
    await asyncio.sleep(0)
    assert stage.handle.batcher is not None
    stage.handle.batcher._break()
    assert str(answer[0].error) == "internal error"
    for _ in range(2):  # the scheduler still believes in the batch, and would raise
        stage.down(0, WorkerDied("killed"))
        stage.up(0)
    assert stage.seen == ("FAILED", 1, 1)
    with pytest.raises(ModelNotReady):
        stage.ask()


# ---- who may wait for a worker


async def test_requests_wait_for_a_worker_that_will_be_back_soon(stage: Stage) -> None:
    stage.down(0, WorkerDied("killed"), retry_in_s=0.1)
    answer = stage.ask()
    stage.up(0)
    await asyncio.sleep(0)
    stage.answer()
    assert answer[0].error is None


async def test_requests_do_not_wait_for_a_late_restart(stage: Stage) -> None:
    stage.down(0, WorkerDied("killed"), retry_in_s=20.0)
    with pytest.raises(ModelNotReady) as refused:
        stage.ask()
    assert 19 < (refused.value.retry_after_s or 0) <= 20
    assert refused.value.detail.endswith("killed")


async def test_after_two_failures_requests_do_not_wait_for_a_restart(stage: Stage) -> None:
    stage.down(0, WorkerDied("killed"), retry_in_s=0.0)
    stage.ask()
    stage.down(0, retry_in_s=0.0)  # from now on it is loading again
    with pytest.raises(ModelNotReady, match="no running worker"):
        stage.ask()
    stage.up(0)
    stage.down(0, WorkerDied("killed"), retry_in_s=0.0)
    stage.ask()  # what came up is counted anew


async def test_a_slot_that_goes_down_is_logged_unless_the_load_raises_it(caplog: Any) -> None:
    stage = Stage(2)
    loading = await stage.begin(stage.handle.load())
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        stage.down(0, LoadFailed("first"))
        stage.down(1, LoadFailed("second"))
        with pytest.raises(LoadFailed, match="first"):
            await loading
    assert [r.getMessage().rpartition("=")[2] for r in caplog.records] == ["first"]
    await stage.handle.close(0)


async def test_a_worker_s_load_is_timed_from_its_own_start() -> None:
    stage = Stage()
    loading = asyncio.create_task(stage.handle.load())
    await asyncio.sleep(0)
    stage.handle.instances._slots[0].since_s -= 7.0
    stage.up(0)
    await loading
    stage.down(0, retry_in_s=3.0)
    stage.handle.instances._slots[0].retry_at -= 5.0  # type: ignore[operator]
    stage.up(0)
    (_, first_s), (_, second_s) = stage.loads
    assert 7.0 <= first_s < 8.0
    assert 2.0 <= second_s < 3.0


async def test_a_batch_is_limited_by_the_concurrency_of_the_worker() -> None:
    stage = Stage(batching={"max_batch_size": "auto"})
    loading = await stage.begin(stage.handle.load())
    stage.listener.slot_up(0, Ready(ModelMetadata("m", "1"), concurrency=8))
    await loading
    assert stage.handle.batcher is not None
    assert stage.handle.batcher.scheduler.max_batch_size == 8
    await stage.handle.close(0)


async def test_a_policy_that_is_handed_over_stands_in_place_of_the_configured_one() -> None:
    stage = Stage(policy=lambda: Fixed(0.25))
    assert stage.handle.batcher is None
    await stage.load(0)
    assert stage.handle.statistics()["policy"] == "fixed"
    assert stage.handle.batcher is not None
    assert stage.handle.batcher.scheduler.queued == 0
    await stage.handle.close(0.0)


# ---- replacement


async def test_a_worker_is_replaced_without_losing_a_request_and_its_batches_have_time(stage: Stage) -> None:
    answer = stage.ask()
    stage.may_end.clear()
    stage.handle.instances.replace(0, "requests=1")
    stage.handle.instances.replace(0, "requests=2")
    await stage.begin(asyncio.sleep(0))
    assert stage.slots == {0, 1}, "the new one starts beside the old one"
    assert stage.shares == [1], "and shares the cores as if it were gone"
    assert stage.handle.instances.pid(0) is None
    stage.up(1)
    await stage.begin(asyncio.sleep(0))
    ((removed, drain_s),) = stage.removed
    assert removed == 0
    assert drain_s > 1e9
    later = stage.ask()
    stage.answer()
    stage.may_end.set()
    await asyncio.sleep(0)
    assert stage.answer() == 1
    await stage.begin(asyncio.sleep(0))
    assert [a[0].error for a in (answer, later)] == [None, None]
    assert stage.seen == ("READY", 1, 1)
    assert stage.heard == [(0, "ready"), (0, "replaced"), (1, "ready"), (0, "removed")]


async def test_a_worker_stays_if_the_new_one_does_not_load(stage: Stage, caplog: Any) -> None:
    stage.handle.instances.replace(0, "requests=1")
    await stage.begin(asyncio.sleep(0))
    stage.down(1)
    await stage.begin(asyncio.sleep(0))
    assert stage.slots == {0}
    assert stage.seen == ("READY", 1, 1)
    assert stage.handle.instances.pid(0) == 0, "it can be replaced later"
    assert "worker_not_replaced model=m version=1 slot=0 error=no weights" in caplog.text


async def test_the_old_worker_ends_first_where_memory_has_no_room_for_two(stage: Stage) -> None:
    stage.handle.instances.replace(0, "requests=1")
    await stage.begin(asyncio.sleep(0))
    stage.down(1, LoadOutOfMemory("no room"))
    await stage.begin(asyncio.sleep(0))
    assert [slot for slot, _ in stage.removed] == [1, 0]
    assert stage.slots == {1}
    assert stage.seen == ("FAILED", 1, 0)
    answer = stage.ask()  # waits for the new worker
    stage.up(1)
    await asyncio.sleep(0)
    assert stage.answer() == 1
    assert answer[0].error is None
    assert stage.seen == ("READY", 1, 1)


async def test_a_stop_ends_a_replacement(stage: Stage) -> None:
    stage.handle.instances.replace(0, "requests=1")
    await stage.begin(asyncio.sleep(0))
    await asyncio.wait_for(stage.handle.close(0), 5)
    assert not stage.slots


async def test_a_worker_that_died_meanwhile_is_not_replaced(stage: Stage) -> None:
    stage.handle.instances.replace(0, "requests=1")
    stage.down(0, WorkerDied("killed by SIGKILL"))
    await stage.begin(asyncio.sleep(0))
    assert stage.slots == {0}


async def test_a_load_that_takes_long_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.core.engine.instances.LOADING_S", 0.001)
    stage = Stage(2)
    loading = asyncio.ensure_future(stage.handle.load())
    with caplog.at_level(logging.INFO):
        while "event=loading model=m version=1 seconds=0 instances_up=0 of=2" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    stage.up(0, 1)
    await loading
    await stage.handle.close(0.0)
