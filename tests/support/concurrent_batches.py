"""The contract of worker processes that run batches concurrently, as checks, and models for it."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

from penstock import metrics
from penstock.errors import BadRequest, Cancelled, ItemFailed, QueueFull, WorkerDied
from penstock.types import Item
from support.transports import LARGE, WAIT_S, MakeTransport, TransportHarness, values

WIDTH = 64
TARGET = "support.concurrent_batches:ConcurrentModel"

Answer = Callable[[list[tuple[int, Any]]], None]


class ConcurrentModel:
    """Items are `(verb, argument)`; most verbs return the argument. Any other item is echoed.

    One thread produces all results, each as its own part; `predict` waits for the results of its batch.
    """

    __penstock_concurrency__ = WIDTH

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[int, Any, float | None, Answer]] = SimpleQueue()
        self._gates: dict[Any, list[tuple[int, Any, Answer]]] = {}
        self._kept: list[Any] = []
        self.cancelled = 0

    def load(self, device: str) -> None:
        self.__penstock_options__ = {"run_timeout_s": 150.0}
        threading.Thread(target=self._answer, name="penstock-testing", daemon=True).start()

    def predict(self, items: list[Any]) -> list[Any]:
        found: dict[int, Any] = {}
        done = threading.Event()

        def answer(pairs: list[tuple[int, Any]]) -> None:
            found.update(pairs)
            if len(found) == len(items):
                done.set()

        self.__penstock_submit__(items, [None] * len(items), answer)
        done.wait(WAIT_S)
        return [found[i] for i in range(len(items))]

    def __penstock_submit__(
        self, values: list[Any], budgets_s: list[float | None], answer: Answer
    ) -> Callable[[], None]:
        if values[0] == ("refuse", None):
            raise QueueFull("no room")
        for place, (value, budget) in enumerate(zip(values, budgets_s, strict=True)):
            self._work.put((place, value, budget, answer))
        return self._cancel

    def unload(self) -> None:
        metrics.counter("ended")

    def _cancel(self) -> None:
        self.cancelled += 1

    def _answer(self) -> None:
        while True:
            place, value, budget, answer = self._work.get()
            verb, argument = value if isinstance(value, tuple) else ("echo", value)
            if verb == "gate":  # answered when a later item opens the gate
                self._gates.setdefault(argument, []).append((place, argument, answer))
                continue
            found = self._do(verb, argument, budget)
            del value, verb, argument
            answer([(place, found)])
            if isinstance(found, OpenedGate):
                for waiting, name, respond in self._gates.pop(found.gate, []):
                    respond([(waiting, name)])
            del found, answer

    def _do(self, verb: str, argument: Any, budget: float | None) -> Any:
        if verb == "exit":
            os._exit(argument)
        if verb == "raise":
            return ValueError(argument)
        if verb == "open":
            return OpenedGate(argument)
        if verb == "budget":
            return budget
        if verb == "count":
            metrics.counter("counted", argument)
        if verb == "cancelled":
            return self.cancelled
        if verb == "keep":
            self._kept.append(argument)
            return len(argument)
        if verb == "release":
            self._kept.clear()
        return argument


class LoopModel(ConcurrentModel):
    """Answers from a thread with a loop: a queue of calls."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def load(self, device: str) -> None:
        threading.Thread(target=self._loop, name="penstock-testing", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._calls.get()()

    def __penstock_submit__(
        self, values: list[Any], budgets_s: list[float | None], answer: Answer
    ) -> Callable[[], None]:
        def each() -> None:
            for pair in enumerate(values):
                answer([pair])

        self._calls.put(each)
        return self._cancel

    def __penstock_soon__(self, call: Callable[[], None]) -> None:
        self._calls.put(call)


class ClosedLoopModel(LoopModel):
    """A LoopModel whose loop accepts no calls any more."""

    def __penstock_soon__(self, call: Callable[[], None]) -> None:
        raise RuntimeError("the loop is closed")


class OpenedGate(str):
    """The result of the item that opens a gate; it precedes the results of the items that wait at the gate."""

    gate: Any

    def __new__(cls, gate: Any) -> OpenedGate:
        opened = super().__new__(cls, "opened")
        opened.gate = gate
        return opened

    def __reduce__(self) -> Any:
        return str, (str(self),)


class RepeatingModel(ConcurrentModel):
    """Answers every item twice, with different results."""

    def _do(self, verb: str, argument: Any, budget: float | None) -> Any:
        return argument

    def __penstock_submit__(
        self, values: list[Any], budgets_s: list[float | None], answer: Answer
    ) -> Callable[[], None]:
        answer([(place, value) for place, value in enumerate(values)] * 2)
        answer([(0, "again")])
        return self._cancel


async def check_a_later_batch_is_answered_while_an_earlier_one_waits(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        assert harness.ready is not None
        assert harness.ready.concurrency == WIDTH
        assert harness.ready.options == {"run_timeout_s": 150.0}
        first, second = harness.post([Item(("gate", "a"))]), harness.post([Item(2)])
        assert values(await harness.final(second)) == [2]
        assert not harness.parts[first]
        third = harness.post([Item(("open", "a"))])
        assert values(await harness.final(first)) == ["a"]
        assert values(await harness.final(third)) == ["opened"]


async def check_a_result_is_sent_before_the_others_of_its_batch(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(("gate", "a")), Item(2), Item(("raise", "no"))])
        await harness.until(lambda: len(harness.parts[number]) == 2)
        second, third = harness.parts[number]
        assert (second.at, values(second), second.final) == ([1], [2], False)
        assert (third.at, third.final) == ([2], False)
        assert [type(e) for e in values(third)] == [ItemFailed]
        await harness.final(harness.post([Item(("open", "a"))]))
        last = await harness.final(number)
        assert (last.at, values(last)) == ([0], ["a"])
        assert last.run_s > 0


async def check_each_item_is_answered_once_by_a_model_that_answers_twice(make: MakeTransport) -> None:
    async with TransportHarness(make, "support.concurrent_batches:RepeatingModel") as harness:
        for n in range(3):
            part = await harness.run(n, n + 1)
            assert (part.at, values(part)) == ([0, 1], [n, n + 1])


async def check_results_of_one_pass_of_the_models_loop_are_sent_together(make: MakeTransport) -> None:
    async with TransportHarness(make, "support.concurrent_batches:LoopModel") as harness:
        await harness.up()
        number = harness.post([Item(n) for n in range(5)])
        part = await harness.final(number)
        assert (part.at, values(part)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
        assert len(harness.parts[number]) == 1
    async with TransportHarness(make, "support.concurrent_batches:ClosedLoopModel") as harness:
        assert await harness.values(7) == [7]


async def check_an_error_of_submit_is_the_answer(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        part = await harness.run(("refuse", None), 2)
        assert [type(e) for e in values(part)] == [QueueFull, QueueFull]
        assert (await harness.values(1)) == [1]


async def check_items_that_do_not_reach_the_model(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(b"{", "native", "application/json"), Item(b"2", "native", "application/json")])
        await harness.final(number)
        bad, good = harness.parts[number]
        assert (bad.at, [type(e) for e in values(bad)], bad.final) == ([0], [BadRequest], False)
        assert (good.at, values(good), good.final) == ([1], [b"2"], True)
        assert values(await harness.final(harness.post([Item([], many=True)]))) == [[]]


async def check_the_items_of_one_request_are_answered_together(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        first = harness.post([Item([1, ("gate", "a"), ("raise", "no")], many=True, rows=3), Item([4], many=True)])
        await harness.until(lambda: harness.parts[first])
        assert [part.at for part in harness.parts[first]] == [[1]]
        await harness.final(harness.post([Item([("open", "a")], many=True)]))
        (found,) = values(await harness.final(first))
        assert found[:2] == [1, "a"]
        assert type(found[2]) is ItemFailed


async def check_the_model_receives_the_remaining_budget(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(("budget", None), budget_s=0.25), Item(("budget", None))])
        await harness.final(number)
        assert [values(part) for part in harness.parts[number]] == [[0.25], [None]]


async def check_an_abandoned_batch_is_cancelled_and_ends(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number, other = harness.post([Item(("gate", "a")), Item(("gate", "b"))]), harness.post([Item(("gate", "a"))])
        harness.transport.abandon(0, number)
        assert [type(e) for e in values(await harness.final(number))] == [Cancelled, Cancelled]
        assert await harness.values(("cancelled", None)) == [1]
        assert await harness.values(("open", "a")) == ["opened"]  # late results of the model are not sent
        assert values(await harness.final(other)) == ["a"]
        harness.transport.abandon(0, number)
        assert await harness.values(1) == [1]


async def until_free(harness: TransportHarness) -> None:
    """Waits until the pool is not in use."""
    freed = asyncio.Event()
    harness.pool.when_free(freed.set)
    while harness.pool.in_use_bytes:
        async with asyncio.timeout(WAIT_S):
            await freed.wait()
        freed.clear()
        harness.pool.when_free(freed.set)


async def check_a_slab_is_released_with_its_batch(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        slab = harness.pool.allocate(LARGE)
        assert slab is not None
        slab.view[:] = b"s" * LARGE
        gate, large = harness.post([Item(("gate", "a"))]), harness.post([Item(slab, "native")])
        (found,) = values(await harness.final(large))
        assert bytes(found) == b"s" * LARGE
        del found
        slab.release()
        await until_free(harness)
        assert not harness.parts[gate]
        await harness.values(("open", "a"))


async def check_a_slab_is_not_reused_while_the_model_keeps_it(make: MakeTransport) -> None:
    import numpy as np

    async with TransportHarness(make, TARGET) as harness:
        assert await harness.values(("keep", np.zeros(LARGE, np.uint8))) == [LARGE]
        for n in range(3):
            assert await harness.values(n) == [n]
        assert harness.pool.in_use_bytes > 0
        await harness.values(("release", None))
        await until_free(harness)


async def check_metrics_are_reported_until_the_end(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        for _ in range(5):
            part = await harness.run(("count", 2), ("count", 3))
            assert part.metrics is None
        await harness.transport.close(WAIT_S)
        assert sum(d.value for d in harness.metrics if d.name == "counted") == 25
        assert [(d.kind, d.name, d.value) for d in harness.metrics][-1] == ("counter", "ended", 1)


async def check_batches_in_flight_are_answered_before_the_end(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        numbers = [harness.post([Item(("gate", "a"))]) for _ in range(10)]
        numbers.append(harness.post([Item(("open", "a"))]))
        await harness.transport.close(WAIT_S)
        assert [values(harness.parts[number][-1]) for number in numbers] == [["a"]] * 10 + [["opened"]]
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        numbers = [harness.post([Item(("gate", "a"))]), harness.post([Item(("open", "a"))])]
        await harness.transport.remove_slot(0, WAIT_S)
        assert [values(harness.parts[number][-1]) for number in numbers] == [["a"], ["opened"]]
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(1), Item(("gate", "a"))])
        await harness.until(lambda: harness.parts[number])
        await harness.transport.close(0.05)  # too short for the item at the gate
        assert type(harness.parts[number][-1].error) is WorkerDied


async def check_a_death_fails_all_batches_in_flight(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        numbers = [harness.post([Item(("gate", "a")), Item(n)]) for n in range(5)]
        await harness.until(lambda: all(harness.parts[number] for number in numbers))
        harness.post([Item(("exit", 3))])
        parts = [await harness.final(number) for number in numbers]
        assert all(type(part.error) is WorkerDied and part.started for part in parts)
        await harness.until(lambda: harness.downs)
        await harness.until(lambda: harness.ready is not None)
        assert await harness.values(5) == [5]


CONCURRENCY_CHECKS: list[Callable[[MakeTransport], Awaitable[None]]] = [
    check for name, check in list(globals().items()) if name.startswith("check_") and inspect.iscoroutinefunction(check)
]
