"""Workers that have many requests in flight at once, and die under them."""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

SOURCE = """
    import asyncio
    import os
    import random
    import threading

    import penstock

    @penstock.model(policy="fixed", max_hold_s=0)
    class Slow:
        __penstock_concurrency__ = 128

        def load(self, device):
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()

        def predict(self, items):
            return items

        def __penstock_soon__(self, call):
            self.loop.call_soon(call)

        def __penstock_submit__(self, values, budgets_s, answer):
            self.loop.call_soon_threadsafe(self.begin, values, answer)
            return lambda: None

        def begin(self, values, answer):
            for place, value in enumerate(values):
                self.loop.call_later(random.uniform(0.005, 0.05), self.end, answer, place, value)

        def end(self, answer, place, value):
            if value == "poison":
                os._exit(1)
            answer([(place, len(value) if isinstance(value, memoryview) else value)])
"""


async def test_workers_killed_with_100_requests_in_flight_side_by_side_cost_no_request(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "Slow", "--instances", "2")
    going = True

    async def bodies() -> int:
        answered = 0
        async with chaos.Client(server) as client:
            while going:
                answer = await client.ask("/predictions/slow", bytes(200_000), content_type="application/octet-stream")
                assert (answer.status, answer.body) == (200, b"200000")
                answered += 1
        return answered

    kills = chaos.count(6, 60)
    async with chaos.Crowd(server, "slow", 96) as crowd:
        posting = [asyncio.create_task(bodies()) for _ in range(4)]
        for _ in range(kills):
            await crowd.answered(300)
            await chaos.kill_one(server, 2)
            in_flight = set(crowd.asked) - set(crowd.told)  # includes all that were in the death
            await chaos.until(lambda asked=in_flight: asked <= crowd.told.keys())  # who is in two deaths would fail
        going = False
        answered = await asyncio.gather(*posting)
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert set(crowd.statuses) == {200}
    assert crowd.statuses.total() == len(crowd.asked)
    assert min(answered) > 0
    assert server.metric("penstock_worker_events_total", state="died") == kills
    await chaos.until(lambda: server.metric("penstock_pool_used_bytes") == 0)


async def test_an_item_that_ends_its_worker_fails_alone(guarded: Callable[..., Any], chaos: SimpleNamespace) -> None:
    server = guarded(SOURCE, "Slow", "--instances", "2")
    poisons = chaos.count(2, 20)
    async with chaos.Crowd(server, "slow", 96) as crowd, chaos.Client(server) as client:
        for number in range(poisons):
            await crowd.answered(300)
            poison = b'"poison"' + b" " * number  # the same payload would be refused
            answer = await client.ask("/predictions/slow", poison, content_type="application/json")
            assert answer.status == 503
            await chaos.until(lambda: server.metric("penstock_workers_up") == 2)
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert set(crowd.statuses) == {200}
    deaths = server.metric("penstock_worker_events_total", state="died")
    assert 2 * poisons <= deaths <= 3 * poisons, "with others, perhaps in a smaller piece, and alone"


async def test_callers_that_hang_up_cost_nobody_an_answer_and_leave_nothing(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "Slow")

    async def leaves() -> None:
        async with chaos.Client(server) as client:
            for body in (b'"a"', bytes(200_000), b'"b"'):
                kind = "application/json" if len(body) < 9 else "application/octet-stream"
                client.send("/predictions/slow", body, content_type=kind)
            await asyncio.sleep(random.uniform(0.0, 0.04))

    async with chaos.Crowd(server, "slow", 16) as crowd:
        for _ in range(chaos.count(20, 500)):
            await asyncio.gather(*(leaves() for _ in range(8)))
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert set(crowd.statuses) == {200}
    await chaos.until(lambda: server.metric("penstock_requests_in_flight") == 0)
    await chaos.until(lambda: server.metric("penstock_pool_used_bytes") == 0)
    assert server.metric("penstock_worker_events_total", state="died") == 0
