"""A step model for tests, whose items say what each does, and checks that every transport passes."""

import os
import threading
import time
from typing import Any

from penstock import Step, metrics
from penstock.errors import BadOutput, DeadlineExceeded, ItemFailed, RunTimeout
from penstock.types import Item
from support.transports import WAIT_S, MakeTransport, TransportHarness


class Countdown:
    """Items are the number of steps, or (verb, number); every step gives the number that is left.

    Verbs: "raise" at its second step, "refuse", "die" at its second step, "hang" at its second step, "slow" (1 ms a
    step), "few" (one result too few), "endless" (1 ms a step, no parts and no end), "object" (parts that cannot be
    sent), "evicted" (the evicted items so far).
    """

    max_active = 4

    def load(self, device: str) -> None:
        self.evicted: list[Any] = []
        self.thread = threading.get_ident()

    def admit(self, item: Any) -> dict[str, Any]:
        verb, left = item if isinstance(item, (tuple, list)) else ("", item)
        if verb == "refuse":
            raise ValueError(item)
        return {"item": item, "verb": verb, "left": left, "steps": 0}

    def step(self, states: list[dict[str, Any]]) -> list[Step]:
        assert threading.get_ident() == self.thread
        verbs = {state["verb"] for state in states if state["steps"] == 1}
        if "raise" in verbs:
            raise ValueError("a bad state")
        if "die" in verbs:
            os._exit(3)
        if "hang" in verbs:
            time.sleep(60)
        if any(state["verb"] in ("slow", "endless") for state in states):
            time.sleep(0.001)
        metrics.counter("stepped", len(states))
        steps = []
        for state in states:
            state["left"], state["steps"] = state["left"] - 1, state["steps"] + 1
            parts = {"evicted": list(self.evicted), "object": object(), "endless": None}
            steps.append(Step(parts.get(state["verb"], state["left"]), done=state["left"] <= 0))
        return steps[1:] if "few" in verbs else steps

    def evict(self, state: dict[str, Any]) -> None:
        self.evicted.append(state["item"])


TARGET = "support.stepped:Countdown"


def streamed(harness: TransportHarness, number: int, place: int = 0) -> list[Any]:
    """The parts of an item's stream so far, and the class of the error that ended it."""
    results = [
        result
        for part in harness.parts[number]
        for at, result in zip(part.at or range(len(part.results)), part.results, strict=True)
        if at == place and result is not None
    ]
    return [type(r.error) if r.error else r.body for r in results if r.error or r.body is not None]


async def check_every_item_has_its_parts_and_one_end(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(n) for n in (3, 1, 6, 2, 4, 5)])
        await harness.final(number)
        found = [streamed(harness, number, place) for place in range(6)]
        assert found == [list(range(n))[::-1] for n in (3, 1, 6, 2, 4, 5)]


async def check_a_bad_item_fails_alone(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(3), Item(("raise", 4)), Item(("refuse", 1)), Item(2)])
        await harness.final(number)
        found = [streamed(harness, number, place) for place in range(4)]
        assert found == [[2, 1, 0], [3, ItemFailed], [ItemFailed], [1, 0]]


async def check_several_items_in_one_request(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item([1, ("raise", 3), 2], many=True, rows=3)])
        final = await harness.final(number)
        parts = [part.results[0].body for part in harness.parts[number][:-1] if part.results[0] is not None]
        for place, expected in enumerate(([0], [2], [1, 0])):
            assert [body[place] for body in parts if body[place] is not None] == expected
        (result,) = final.results
        assert result is not None
        assert [type(value) for value in result.body] == [type(None), ItemFailed, type(None)]


async def check_a_part_that_cannot_be_sent_ends_its_item(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(b'["object", 3]', "native", "application/json"), Item(2)])
        await harness.until(lambda: BadOutput in streamed(harness, number))
        await harness.until(lambda: streamed(harness, number, 1)[:2] == [1, 0])
        harness.transport.abandon(0, number)
        await harness.final(number)


STEP_CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


async def check_an_item_joins_while_others_are_active(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        assert harness.ready is not None
        assert (harness.ready.mode, harness.ready.concurrency) == ("continuous", 4)
        long = harness.post([Item(("slow", 5_000))])
        await harness.until(lambda: harness.parts[long])
        short = harness.post([Item(2)])
        await harness.final(short)
        assert streamed(harness, short) == [1, 0]
        assert not harness.parts[long][-1].final
        harness.transport.abandon(0, long)
        await harness.final(long)
        assert len(streamed(harness, long)) < 5_000


async def check_an_abandoned_item_is_evicted_and_frees_its_place(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        numbers = [harness.post([Item(("slow", 10**6 + n))]) for n in range(4)]
        await harness.until(lambda: all(harness.parts[number] for number in numbers))
        waiting = harness.post([Item(("evicted", 1))])
        harness.transport.abandon(0, numbers[2])
        await harness.final(waiting)
        assert streamed(harness, waiting) == [[("slow", 10**6 + 2)]]
        for number in numbers:
            harness.transport.abandon(0, number)


async def check_an_item_ends_at_its_deadline(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(("slow", 10**6), budget_s=0.05)])
        await harness.final(number)
        assert streamed(harness, number)[-1] is DeadlineExceeded


async def check_a_step_that_hangs_costs_its_worker(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET, run_timeout_s=0.3) as harness:
        await harness.up()
        number = harness.post([Item(("hang", 3))])
        part = await harness.final(number)
        assert type(part.error) is RunTimeout
        await harness.up()


async def check_a_worker_with_silent_items_lives_while_it_steps(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET, run_timeout_s=0.2) as harness:
        await harness.up()
        number = harness.post([Item(("endless", 10**6), budget_s=1.0)])
        await harness.final(number)
        assert not harness.downs


async def check_close_waits_for_active_items(make: MakeTransport) -> None:
    async with TransportHarness(make, TARGET) as harness:
        await harness.up()
        number = harness.post([Item(("slow", 50))])
        await harness.until(lambda: harness.parts[number])
        await harness.transport.close(WAIT_S)
        assert streamed(harness, number) == list(range(50))[::-1]


CONTINUOUS_CHECKS = [
    check for name, check in list(globals().items()) if name.startswith("check_") and check not in STEP_CHECKS
]
