"""Signals under load: workers killed, the server killed or asked to end. Nobody is forgotten, nothing is left."""

import asyncio
import math
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

SOURCE = """
    import ctypes
    import os
    import time
    from pathlib import Path

    LOG = os.open(Path(__file__).parent / "ran", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def echo(items):
        time.sleep(0.002)
        return items

    def sizes(items):
        return [len(item) for item in items]

    def noted(items):
        os.write(LOG, "".join(f"{item}\\n" for item in items).encode())
        time.sleep(0.1)
        return items

    def stuck(items):
        ctypes.PyDLL(None).sleep(3600)
"""


async def large(chaos: SimpleNamespace, server: Any, size: int) -> tuple[int, bytes]:
    async with chaos.Client(server) as client:
        answer = await client.ask("/predictions/sizes", bytes(size), content_type="application/octet-stream")
        return answer.status, answer.body


async def test_workers_killed_under_load_cost_no_request_and_leave_nothing(
    guarded: Callable[..., Any], chaos: SimpleNamespace
) -> None:
    server = guarded(SOURCE, "echo", "sizes", "--instances", "2")
    # what is opened once and for all: by the first scrape, the first large body, the first worker that comes back
    await chaos.kill_one(server, 4)
    assert await large(chaos, server, 200_000) == (200, b"200000")
    await asyncio.sleep(1.0)
    before = chaos.descriptors(server)
    seen = set(chaos.workers(server))
    going = True

    async def bodies() -> int:
        answered = 0
        while going:
            assert await large(chaos, server, 5_000_000) == (200, b"5000000")
            answered += 1
        return answered

    kills = chaos.count(8, 100)
    async with chaos.Crowd(server, "echo", 16) as crowd:
        posting = [asyncio.create_task(bodies()) for _ in range(2)]
        for _ in range(kills):
            await chaos.kill_one(server, 4)
            await crowd.answered(100)
            seen |= set(chaos.workers(server))
        going = False
        answered = await asyncio.gather(*posting)
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert set(crowd.statuses) == {200}
    assert crowd.statuses.total() == len(crowd.asked)
    assert min(answered) > 0
    assert server.metric("penstock_worker_events_total", state="died") == kills + 1
    now = chaos.workers(server)
    assert len(now) == 4
    assert not [p for p in seen if p not in now and chaos.alive(p)]
    await chaos.until(lambda: chaos.descriptors(server) <= before)
    await chaos.until(lambda: server.metric("penstock_pool_used_bytes") == 0)


@pytest.mark.parametrize("busy", [False, True], ids=["under load", "while a worker holds the GIL"])
async def test_no_worker_outlives_a_server_that_is_killed(
    serve: Callable[..., Any], chaos: SimpleNamespace, busy: bool
) -> None:
    server = serve(SOURCE, "echo", "stuck", "--instances", "2")
    workers = chaos.workers(server)
    assert len(workers) == 4
    async with chaos.Crowd(server, "echo", 8) as crowd, chaos.Client(server) as client:
        if busy:
            client.send("/predictions/stuck", b"1", content_type="application/json")
            await chaos.until(lambda: server.metric("penstock_requests_total", model="stuck") == 1)
        await crowd.answered(20)
        server.process.kill()
        server.process.wait()
        gone, left = await asyncio.to_thread(psutil.wait_procs, workers, 20)
        crowd.dismiss()
    assert (len(gone), left) == (4, [])
    assert set(crowd.statuses) == {200}


async def test_sigterm_under_load_loses_no_request(
    serve: Callable[..., Any], chaos: SimpleNamespace, tmp_path: Path
) -> None:
    for _ in range(chaos.count(3, 50)):
        (tmp_path / "ran").write_bytes(b"")
        server = serve(SOURCE, "noted", "--instances", "2", "--set", "models.noted.batching.max_batch_size=2")
        workers = chaos.workers(server)
        crowd = chaos.Crowd(server, "noted", 32)
        async with crowd:  # 40 requests in a second are run: most of the 32 wait when the signal comes
            await crowd.answered(random.randrange(1, 40))
            await asyncio.sleep(0.15)
            signalled = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            status, _, said = await asyncio.to_thread(server.stop, 0)
            crowd.dismiss()
        assert status == 0, said
        assert crowd.wrong == []
        early = {number for number, at in crowd.asked.items() if at < signalled - 0.1}
        assert sum(crowd.told.get(number, math.inf) > signalled for number in early) > 16, "nobody waited"
        assert early <= crowd.told.keys(), early - crowd.told.keys()
        ran = list(map(int, (tmp_path / "ran").read_text().split()))
        assert len(ran) == len(set(ran)) == crowd.statuses[200]
        assert set(crowd.statuses) <= {200, 503}
        # a later one may cross with the end of its idle connection: it was not read, and its client may ask again
        assert not crowd.unanswered & set(ran)
        assert not psutil.wait_procs(workers, timeout=10)[1]
