"""Helper processes that die under load: nobody is forgotten, the worker stays, and nothing is left."""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

SOURCE = """
    import os
    import time

    class Batches:
        def preprocess(self, item):
            if item == "die":
                os._exit(3)
            time.sleep(0.001)
            return item, os.getpid()

        def predict(self, items):
            assert all(helper != os.getpid() for _, helper in items)
            return [item for item, _ in items]

    class Calls(Batches):
        async def predict(self, items):
            return super().predict(items)
"""


def helpers(server: Any) -> list[psutil.Process]:
    """The helper processes that live now, of all workers."""
    own = psutil.Process(server.process.pid)
    return [each for each in own.children(recursive=True) if each not in own.children() and each.is_running()]


@pytest.mark.parametrize("model", ["batches", "calls"])
async def test_helpers_killed_under_load_cost_no_request(
    guarded: Callable[..., Any], chaos: SimpleNamespace, model: str
) -> None:
    server = guarded(SOURCE, model.capitalize(), "--set", f"models.{model}.preprocess_processes=2")
    (worker,) = psutil.Process(server.process.pid).children()
    async with chaos.Crowd(server, model, 16) as crowd, chaos.Client(server) as client:
        for kill in range(chaos.count(4, 60)):
            await chaos.until(lambda: len(helpers(server)) == 2)
            await crowd.answered(50)
            if kill % 2:
                answer = await client.ask(f"/predictions/{model}", b'"die"', content_type="application/json")
                assert (answer.status, b"preprocess helper" in answer.body) == (503, True)
            else:
                random.choice(helpers(server)).kill()
        await crowd.answered(50)
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert set(crowd.statuses) == {200}
    assert psutil.Process(server.process.pid).children() == [worker]
    await chaos.until(lambda: server.metric("preprocess_deaths_total") >= chaos.count(4, 60))


async def test_a_worker_that_is_killed_takes_its_helpers_along(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "Batches", "--set", "models.batches.preprocess_processes=2")
    async with chaos.Crowd(server, "batches", 8) as crowd:
        for _ in range(chaos.count(2, 20)):
            await chaos.until(lambda: len(helpers(server)) == 2)
            await crowd.answered(20)
            old = helpers(server)
            psutil.Process(server.process.pid).children()[0].kill()
            assert not (await asyncio.to_thread(psutil.wait_procs, old, 10))[1]
        await crowd.answered(20)
    assert (crowd.wrong, set(crowd.statuses)) == ([], {200})


async def test_no_helper_outlives_a_server_that_is_killed(serve: Callable[..., Any], chaos: SimpleNamespace) -> None:
    server = serve(SOURCE, "Batches", "--set", "models.batches.preprocess_processes=3")
    left = chaos.workers(server)
    assert len(left) == 4
    server.process.kill()
    server.process.wait()
    assert not (await asyncio.to_thread(psutil.wait_procs, left, 20))[1]
