"""The loop that runs the batches of a model side by side in a worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.worker.call_loop import CallLoop
from penstock.errors import BadOutput, RunTimeout
from penstock.types import Step

WAIT_S = 20.0


class Caller:
    """Submits batches to a loop that runs in a thread, and records what they receive."""

    def __init__(self, predict: Callable[[list[Any]], Any], **batching: Any) -> None:
        self.loop = CallLoop(predict, BatchingConfig(**batching))
        self.found: dict[Any, list[Any]] = {}
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def begin(self, *values: Any) -> Callable[[], None]:
        """Submits a batch; outcomes are found under the values."""

        def answer(pairs: list[tuple[int, Any]]) -> None:
            with self._changed:
                for place, outcome in pairs:
                    self.found.setdefault(values[place], []).append(outcome)
                self._changed.notify_all()

        return self.loop.submit(list(values), [None] * len(values), answer)

    def until(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)

    def end(self) -> None:
        self.loop.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.loop.loop.close()


@pytest.fixture
def begin() -> Iterator[Callable[..., Caller]]:
    callers: list[Caller] = []

    def made(predict: Callable[[list[Any]], Any], **batching: Any) -> Caller:
        callers.append(Caller(predict, **batching))
        return callers[-1]

    yield made
    for caller in callers:
        caller.end()


def test_coroutines_overlap(begin: Callable[..., Caller]) -> None:
    inside: list[int] = []
    together = asyncio.Event()

    async def predict(items: list[int]) -> list[int]:
        inside.extend(items)
        if len(inside) == 4:
            together.set()
        await together.wait()
        return [-item for item in items]

    caller = begin(predict)
    for batch in ((1,), (2, 3), (4,)):
        caller.begin(*batch)
    caller.until(lambda: len(caller.found) == 4)
    assert caller.found == {n: [-n] for n in (1, 2, 3, 4)}


def test_without_rows_each_item_is_a_call(begin: Callable[..., Caller]) -> None:
    sizes: list[int] = []

    async def predict(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if items == [2]:
            raise ValueError
        return items

    caller = begin(predict)
    caller.loop.alone = True
    caller.begin(1, 2, 3)
    caller.until(lambda: len(caller.found) == 3)
    assert ([caller.found[n] for n in (1, 3)], sizes) == ([[1], [3]], [1, 1, 1])
    assert isinstance(caller.found[2][0], ValueError)


def counted(items: list[int]) -> Iterator[list[int | None]]:
    for n in range(1, max(items) + 1):
        yield [n if n <= item else None for item in items]


async def counted_async(items: list[int]) -> AsyncIterator[list[int | None]]:
    for step in counted(items):
        await asyncio.sleep(0)
        yield step


@pytest.mark.parametrize("predict", [counted, counted_async])
def test_generators_stream_side_by_side(begin: Callable[..., Caller], predict: Any) -> None:
    caller = begin(predict)
    end = caller.begin(10**9)
    caller.until(lambda: caller.found)
    caller.begin(2, 3)
    ended = Step(done=True)
    expected = {2: [Step(1), Step(2), ended], 3: [Step(1), Step(2), Step(3), ended]}
    caller.until(lambda: {n: found for n, found in caller.found.items() if n < 10} == expected)
    end()


def test_a_generator_is_closed_when_its_callers_leave(begin: Callable[..., Caller]) -> None:
    closed: list[str] = []

    def turns(items: list[str]) -> Iterator[list[int]]:
        try:
            while True:
                yield [0] * len(items)
        finally:
            closed.extend(items)

    async def waits(items: list[str]) -> AsyncIterator[list[int]]:
        try:
            yield [0] * len(items)
            await asyncio.Event().wait()
        finally:
            closed.extend(items)

    caller = begin(lambda items: turns(items) if items == ["turns"] else waits(items))
    for name in ("turns", "waits"):
        end = caller.begin(name)
        caller.until(lambda name=name: name in caller.found)
        end()
    caller.begin("turns")
    caller.until(lambda: closed == ["turns", "waits"])


def test_a_batch_that_raises_runs_again_in_halves_until_the_failing_item_is_alone(
    begin: Callable[..., Caller],
) -> None:
    async def predict(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        if 3 in items:
            raise ValueError("three")
        return items

    caller = begin(predict)
    caller.begin(1, 2, 3, 4, 5)
    caller.until(lambda: len(caller.found) == 5)
    assert [type(caller.found[n][0]) for n in (1, 2, 3, 4, 5)] == [int, int, ValueError, int, int]

    whole = begin(predict, idempotent=False)
    whole.begin(1, 2, 3)
    whole.until(lambda: len(whole.found) == 3)
    assert {type(found[0]) for found in whole.found.values()} == {ValueError}


def test_a_stream_that_raises_after_a_part_fails_all_its_items(begin: Callable[..., Caller]) -> None:
    calls: list[int] = []

    async def predict(items: list[int]) -> AsyncIterator[list[int]]:
        calls.append(len(items))
        yield items
        raise ValueError("later")

    caller = begin(predict)
    caller.begin(1, 2)
    caller.until(lambda: all(len(caller.found.get(n, ())) == 2 for n in (1, 2)))
    assert calls == [2]
    assert [type(outcome) for outcome in caller.found[1]] == [Step, ValueError]


def test_an_exception_in_a_step_fails_its_item_only(begin: Callable[..., Caller]) -> None:
    async def predict(items: list[int]) -> AsyncIterator[list[Any]]:
        yield [ValueError("first"), "second"]

    caller = begin(predict)
    caller.begin(1, 2)
    caller.until(lambda: len(caller.found.get(2, ())) == 2)
    assert type(caller.found[1][0]) is ValueError
    assert caller.found[2] == [Step("second"), Step(done=True)]


def test_a_batch_that_hangs_is_cancelled_alone(begin: Callable[..., Caller]) -> None:
    async def predict(items: list[str]) -> AsyncIterator[list[int]]:
        while items != ["hangs"]:
            await asyncio.sleep(0.05)
            yield [0]
        await asyncio.Event().wait()

    caller = begin(predict, run_timeout_s=0.4)
    end = caller.begin("slow")
    caller.begin("hangs")
    caller.until(lambda: "hangs" in caller.found)
    assert [type(outcome) for outcome in caller.found["hangs"]] == [RunTimeout]
    parts = len(caller.found["slow"])
    caller.until(lambda: len(caller.found["slow"]) > parts)
    assert all(type(outcome) is Step for outcome in caller.found["slow"])
    end()


@pytest.mark.parametrize(
    ("outcome", "error"),
    [([1], BadOutput), (None, BadOutput), (asyncio.CancelledError(), RuntimeError)],
    ids=["too few results", "no results", "cancelled from inside"],
)
def test_a_wrong_outcome_is_an_error_of_each_item(
    begin: Callable[..., Caller], outcome: Any, error: type[Exception]
) -> None:
    async def predict(items: list[int]) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    caller = begin(predict, idempotent=False)
    caller.begin(1, 2)
    caller.until(lambda: len(caller.found) == 2)
    assert all(isinstance(found[0], error) for found in caller.found.values())


def test_batches_in_progress_are_cancelled_at_the_end() -> None:
    began, ended = threading.Event(), threading.Event()

    async def predict(items: list[int]) -> list[int]:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return items

    caller = Caller(predict)
    caller.begin(1)
    assert began.wait(WAIT_S)
    caller.loop.stop()
    caller.thread.join(WAIT_S)
    assert ended.is_set()
    caller.loop.loop.close()
