"""LocalBackend on a loop, with models in threads that load when the test lets them."""

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, LimitsConfig, ModelConfig
from penstock.errors import DeadlineExceeded, LoadFailed, ModelNotReady, PayloadTooLarge, QueueFull
from penstock.streamer import local as module
from penstock.streamer.local import LocalBackend
from penstock.types import Item, ItemResult


class Gated:
    """Loads when `gate` is set; fails while `broken`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.broken = False
        self.loads = 0

    def load(self, device: str) -> None:
        self.loads += 1
        assert self.gate.wait(20)
        if self.broken:
            raise ValueError("no weights")

    def predict(self, items: list[Any]) -> list[Any]:
        return [2 * x for x in items]


@pytest.fixture
def model() -> Gated:
    return Gated()


def loading(model: Gated) -> LocalBackend:
    config = ModelConfig(target="here", transport="thread", batching=BatchingConfig(max_batch_size=4, max_queue=8))
    return LocalBackend("m", config, model, [], 8, LimitsConfig())


@pytest.fixture
async def backend(model: Gated) -> Any:
    backend = loading(model)
    yield backend
    model.gate.set()
    await backend.close(5)


class Caller:
    """A sink that can be awaited."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()

    def __call__(self, result: ItemResult) -> None:
        self.answer.set_result(result)

    async def body(self) -> Any:
        result = await asyncio.wait_for(self.answer, 20)
        if result.error is not None:
            raise result.error
        return result.body


def many(*values: int, budget_s: float | None = None) -> Item:
    return Item(list(values), rows=len(values), many=True, budget_s=budget_s)


async def test_requests_wait_for_the_model_and_run_in_order(backend: LocalBackend, model: Gated) -> None:
    callers = [Caller() for _ in range(3)]
    tickets = [backend.submit("m", None, many(i), caller) for i, caller in enumerate(callers)]
    assert backend.statistics("m") == {}
    tickets[1].cancel()
    model.gate.set()
    await backend.ready()
    assert await callers[0].body() == [0]
    assert await callers[2].body() == [4]
    assert not callers[1].answer.done()
    assert backend.statistics("m")["slots"] == 1


async def test_watching_the_workers_costs_a_request_nothing(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("an observer of requests")

    monkeypatch.setattr("penstock.core.engine.batcher.Notifier", refuse)
    backend, caller = loading(model), Caller()
    backend.submit("m", None, many(1), caller)
    model.gate.set()
    assert await caller.body() == [2]
    await backend.close(5)


async def test_requests_that_wait_for_the_model_are_bounded_and_keep_their_deadline(
    backend: LocalBackend, model: Gated
) -> None:
    first, late, gone = Caller(), Caller(), Caller()
    backend.submit("m", None, many(1, 2, 3, 4), first)
    backend.submit("m", None, many(5, 6, budget_s=0.01), late)
    leaving = backend.submit("m", None, many(7, 8), gone)
    with pytest.raises(QueueFull, match="8 of 8 items, 0 of "):
        backend.submit("m", None, many(9), Caller())
    with pytest.raises(DeadlineExceeded, match="too long for its model to load"):
        await late.body()
    leaving.cancel()
    again = Caller()
    backend.submit("m", None, many(10, 11, 12, 13, budget_s=10), again)
    model.gate.set()
    assert await first.body() == [2, 4, 6, 8]
    assert await again.body() == [20, 22, 24, 26]
    await asyncio.sleep(0)
    assert not gone.answer.done()


async def test_bytes_that_wait_are_bounded_before_and_after_the_load_and_a_larger_call_is_sent_in_chunks(
    model: Gated,
) -> None:
    config = ModelConfig(target="here", transport="thread", batching=BatchingConfig(max_batch_size=4))
    backend = LocalBackend("m", config, model, [], 1000, LimitsConfig(max_queue_bytes=1000))
    try:
        first, chunked, whole = Caller(), Caller(), Caller()
        backend.submit("m", None, many(b"1" * 600), first)
        with pytest.raises(QueueFull, match="1 of 1000 items, 600 of 1000 bytes wait for the model to load"):
            backend.submit("m", None, many(b"2" * 600), Caller())
        model.gate.set()
        assert await first.body() == [b"1" * 1200]
        with pytest.raises(PayloadTooLarge, match="1001 bytes"):
            backend.submit("m", None, many(b"3" * 1001), Caller())
        backend.submit("m", None, many(*[b"4" * 100] * 40), chunked)
        assert await chunked.body() == [b"4" * 200] * 40
        backend.submit("m", None, many(*[b"5" * 100] * 10), whole)
        with pytest.raises(QueueFull, match="1000 of 1000 bytes"):
            backend.submit("m", None, many(b"6"), Caller())
        assert await whole.body() == [b"5" * 200] * 10
    finally:
        await backend.close(5)


async def test_a_call_larger_than_the_queue_is_sent_in_chunks(backend: LocalBackend, model: Gated) -> None:
    caller = Caller()
    backend.submit("m", None, many(*range(50)), caller)
    model.gate.set()
    assert await caller.body() == [2 * i for i in range(50)]


async def test_a_failed_load_fails_all_waiting_requests_and_a_later_request_retries_it(
    backend: LocalBackend, model: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.broken = True
    callers = [Caller(), Caller()]
    for caller in callers:
        backend.submit("m", None, many(1), caller)
    model.gate.set()
    for caller in callers:
        with pytest.raises(LoadFailed, match="ValueError: no weights"):
            await caller.body()
    assert model.loads == 1
    with pytest.raises(LoadFailed, match="no weights") as caught:  # at once
        backend.submit("m", None, many(1), Caller())
    with pytest.raises(LoadFailed, match="no weights") as again:
        backend.submit("m", None, many(1), Caller())
    assert len(again.traceback) == len(caught.traceback), "an error raised repeatedly does not grow"
    assert model.loads == 1
    model.broken = False
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.FIRST_RETRY_S)
    caller = Caller()
    backend.submit("m", None, many(3), caller)
    assert await caller.body() == [6]
    assert model.loads == 2


async def test_ready_raises_why_loading_failed(backend: LocalBackend, model: Gated) -> None:
    model.broken = True
    model.gate.set()
    with pytest.raises(LoadFailed, match="no weights"):
        await backend.ready()


async def test_closing_while_the_model_loads_answers_waiting_requests(
    backend: LocalBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caller = Caller()
    backend.submit("m", None, many(1), caller)
    await backend.close(0.01)
    with pytest.raises(ModelNotReady):
        await caller.body()
    assert not caplog.records, "a destroyed streamer has no callers to warn about"


async def test_the_first_worker_that_is_ready_answers_while_others_load(model: Gated) -> None:
    class Uneven(Gated):
        first = itertools.count()

        def load(self, device: str) -> None:
            if not next(self.first):
                super().load(device)

    uneven = Uneven()
    config = ModelConfig(target="here", transport="thread", instances=2, batching=BatchingConfig())
    backend = LocalBackend("m", config, uneven, [], 8, LimitsConfig())
    waiting = Caller()
    backend.submit("m", None, many(1), waiting)
    assert await waiting.body() == [2]
    assert backend.loading
    assert backend.statistics("m")["slots"] == 1
    uneven.gate.set()
    await backend.ready()
    assert backend.statistics("m")["slots"] == 2
    await backend.close(5)
