"""Requests that kill every worker that runs them, among requests that do not."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = """
    import os
    import signal
    import time

    import penstock

    def echo(items):
        if any(isinstance(item, str) for item in items):
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(0.002)
        return items

    @penstock.model(idempotent=False, max_batch_size=1)
    class Once:
        predict = staticmethod(echo)
"""


async def test_poison_from_one_client_costs_its_neighbours_no_answer(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "echo", "--instances", "2")
    async with chaos.Crowd(server, "echo", 12) as crowd, chaos.Client(server) as client:
        for number in range(chaos.count(2, 20)):
            poison = b'"poison %d"' % number
            statuses = [
                (await client.ask("/predictions/echo", poison, content_type="application/json")).status
                for _ in range(10)
            ]
            assert statuses == [503] + [422] * 9  # it is refused once it has killed two workers
            await crowd.answered(200)
    assert set(crowd.statuses) == {200}
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert server.metric("penstock_worker_events_total", state="died") <= 3 * chaos.count(2, 20)


@pytest.mark.parametrize("instances", [1, 3])
async def test_poison_that_differs_each_time_costs_its_neighbours_no_answer(
    guarded: Callable[..., Any], chaos: SimpleNamespace, instances: int
) -> None:
    server = guarded(SOURCE, "echo", "--instances", str(instances), "--set", "models.echo.restart.deaths=2")
    poisons = chaos.count(10, 100)

    async def poison(client: int) -> set[int]:
        async with chaos.Client(server) as one:
            bodies = [b'"poison %d of %d"' % (number, client) for number in range(poisons)]
            return {(await one.ask("/predictions/echo", b, content_type="application/json")).status for b in bodies}

    async with chaos.Crowd(server, "echo", 12) as crowd:
        await crowd.answered(100)
        assert await asyncio.gather(poison(1), poison(2)) == [{503}, {503}]
        await crowd.answered(200)
    assert set(crowd.statuses) == {200}
    assert crowd.wrong == []
    assert not crowd.unanswered


async def test_poison_that_waits_when_its_payload_is_refused_kills_no_more_workers(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "echo", "--instances", "1")

    async def ask(number: int) -> int:
        body = b'"poison"' if number % 2 else b"%d" % number
        async with chaos.Client(server) as client:
            answer = await client.ask("/predictions/echo", body, content_type="application/json")
            assert answer.status != 200 or answer.body == body
            return int(answer.status)

    statuses = await asyncio.gather(*map(ask, range(40)))
    assert set(statuses[::2]) == {200}
    assert set(statuses[1::2]) == {503, 422}
    assert (
        server.metric("penstock_worker_events_total", state="died") <= 5
    )  # three, unless the first requests came in two batches


@pytest.mark.parametrize("quarantine_s", [0.0, 1.0])
async def test_a_request_that_may_run_only_once_is_refused_after_two_deaths_unless_switched_off(
    guarded: Callable[..., Any], chaos: SimpleNamespace, quarantine_s: float
) -> None:
    server = guarded(SOURCE, "Once", "--set", f"models.once.restart.quarantine_s={quarantine_s}")
    async with chaos.Client(server) as client:

        async def ask(body: bytes) -> int:
            answer = await client.ask("/predictions/once", body, content_type="application/json")
            return int(answer.status)

        assert await ask(b"1") == 200
        assert [await ask(b'"poison"') for _ in range(4)] == ([503] * 2 + [422] * 2 if quarantine_s else [503] * 4)
        if quarantine_s:
            await asyncio.sleep(quarantine_s)
            assert await ask(b'"poison"') == 503
        assert await ask(b"2") == 200
