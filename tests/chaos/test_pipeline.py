"""Pipelines in worker processes: killed, poisoned, hung, flooded. Every item is answered, and memory is constant."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

STEPS = """
import os
import time

import numpy as np


def work(data):
    time.sleep(0.002)
    return data


def last(data):
    if data == "poison":
        os._exit(3)
    if data == "hang":
        time.sleep(3600)
    if data == "bad":
        raise ValueError("this one")
    return data


def slow(data):
    time.sleep(0.02)
    return len(data)


def nap(data):
    time.sleep(data)
    return data


def split(data):
    return [np.full(20_000, data + i, np.int64) for i in range(4)]


def part(data):
    time.sleep(0.001)
    return data + 1


def total(data):
    return [int(part[0] if (part == part[0]).all() else -1) for part in data]
"""

NAPS = """
[nap]
backend = "Python[steps.py:nap]"
instance_num = 2
"""

CHAIN = """
[first]
backend = "Python[steps.py:work]"
instance_num = 2
next = "second"
[second]
backend = "Identity"
next = "third"
[third]
backend = "Python[steps.py:last]"
instance_num = 2
run_timeout_s = 0.5
"""

PARTS = """
[split]
backend = "Python[steps.py:split]"
processes = 2
next = "each"
[each]
backend = "Identity"
each = "result"
body = "part"
next = "sum"
[part]
backend = "Python[steps.py:part]"
processes = 2
[sum]
backend = "Python[steps.py:total]"
processes = 2
"""

SLOW_END = """
[pipeline]
in_flight = 16
[first]
backend = "Identity"
next = "end"
[end]
backend = "Python[steps.py:slow]"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "chain.toml").write_text(CHAIN)
    (tmp_path / "end.toml").write_text(SLOW_END)
    (tmp_path / "parts.toml").write_text(PARTS)
    (tmp_path / "naps.toml").write_text(NAPS)
    return tmp_path


async def ask(chaos: SimpleNamespace, server: Any, value: Any, model: str = "chain") -> tuple[int, Any]:
    async with chaos.Client(server) as client:
        answer = await client.ask(f"/predictions/{model}", json.dumps(value).encode(), content_type="application/json")
        return answer.status, json.loads(answer.body)


async def test_killed_workers_lose_no_request(
    guarded: Callable[..., Any], chaos: SimpleNamespace, folder: Path
) -> None:
    server = guarded(None, "chain.toml", "--workers", "2")
    kills = chaos.count(4, 50)
    async with chaos.Crowd(server, "chain", 24) as crowd:
        for _ in range(kills):
            await crowd.answered(100)
            await chaos.kill_one(server, 2)
            await crowd.answered(20)
    assert crowd.wrong == []
    assert not crowd.unanswered
    assert set(crowd.statuses) == {200}
    assert crowd.statuses.total() == len(crowd.asked)
    assert server.metric("penstock_worker_events_total", state="died") == kills


async def test_processes_of_nodes_that_are_killed_under_fan_out_lose_and_mix_nothing(
    guarded: Callable[..., Any], chaos: SimpleNamespace, folder: Path
) -> None:
    server = guarded(None, "parts.toml")
    (worker,) = psutil.Process(server.process.pid).children()
    killed: set[int] = set()
    wrong: list[Any] = []
    died = 0  # items that were in two deaths

    async def client(first: int) -> None:
        nonlocal died
        value = first
        while len(killed) < kills or value < first + 500:
            found = await ask(chaos, server, value, "parts")
            if found[0] != 200 and found[1]["error"]["code"] == "worker_died":
                died += 1
            elif found != (200, [value + i + 1 for i in range(4)]):
                wrong.append((value, found))
            value += 10

    async def kill() -> None:
        while len(killed) < kills:
            await asyncio.sleep(0.3)
            pid = random.choice([p.pid for p in worker.children() if p.pid not in killed])
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)

    kills = chaos.count(6, 60)
    await asyncio.gather(kill(), *(client(1000 * i) for i in range(8)))
    assert wrong == []
    assert died < kills / 2
    assert worker.is_running()
    await chaos.until(lambda: len(worker.children()) == 6)


async def test_an_item_that_kills_its_process_fails_alone(
    guarded: Callable[..., Any], chaos: SimpleNamespace, folder: Path
) -> None:
    server = guarded(None, "chain.toml", "--workers", "2")
    for _ in range(chaos.count(1, 10)):
        asked = [*range(40), "poison", *range(40, 80)]
        answers = await asyncio.gather(*(ask(chaos, server, value) for value in asked))
        failed = [(value, body) for value, (status, body) in zip(asked, answers, strict=True) if status != 200]
        assert [(value, body["error"]["code"]) for value, body in failed] == [("poison", "worker_died")]
        assert all(
            (status, body) in ((200, value), (503, body)) for value, (status, body) in zip(asked, answers, strict=True)
        )
        await chaos.until(lambda: server.metric("penstock_workers_up") == 2)
    assert await ask(chaos, server, 1) == (200, 1)


async def test_an_op_that_hangs_blocks_no_other_and_fails_few_items(
    guarded: Callable[..., Any], chaos: SimpleNamespace, folder: Path
) -> None:
    server = guarded(None, "chain.toml")
    worker = chaos.workers(server)[0].pid
    for _ in range(chaos.count(1, 10)):
        async with chaos.Crowd(server, "chain", 8) as crowd:
            hung = asyncio.gather(*(ask(chaos, server, "hang") for _ in range(2)))
            await crowd.answered(50)
            told = await hung
            await crowd.answered(50)
        assert [status for status, _ in told] == [504, 504], told
        assert set(crowd.statuses) <= {200, 504}
        assert crowd.statuses[504] <= 8, "those that were in a batch with it, and in the half of it that hung again"
        assert crowd.wrong == []
        assert crowd.longest_s < 10
    assert [p.pid for p in chaos.workers(server)] == [worker], "its threads were replaced, not the process"


async def test_bad_items_fail_alone_among_many(
    guarded: Callable[..., Any], chaos: SimpleNamespace, folder: Path
) -> None:
    server = guarded(None, "chain.toml", "--workers", "2")
    asked = [random.choice(["bad", i]) for i in range(chaos.count(200, 5000))]
    for start in range(0, len(asked), 50):
        part = asked[start : start + 50]
        answers = await asyncio.gather(*(ask(chaos, server, value) for value in part))
        for value, (status, body) in zip(part, answers, strict=True):
            assert (status, body) == (200, value) if value != "bad" else status == 500, (value, status, body)


async def test_a_flood_before_a_slow_node_is_rejected_and_memory_stays_constant(
    guarded: Callable[..., Any], chaos: SimpleNamespace, folder: Path
) -> None:
    server = guarded(None, "end.toml", "--set=models.end.batching.max_queue=16")
    (worker,) = chaos.workers(server)
    body = bytes(200_000)
    statuses: Counter[int] = Counter()

    async def client(leaves: bool, rounds: int) -> None:
        for _ in range(rounds):
            async with chaos.Client(server) as one:
                if leaves:
                    one.send("/predictions/end", body, content_type="application/octet-stream")
                    await asyncio.sleep(0.01)
                    continue
                answer = await one.ask("/predictions/end", body, content_type="application/octet-stream")
                statuses[answer.status] += 1
                assert answer.status == 429 or json.loads(answer.body) == len(body)
                if answer.status == 429:
                    await asyncio.sleep(0.02)

    async def flood(rounds: int) -> None:
        await asyncio.gather(*(client(i % 4 == 0, rounds) for i in range(64)))

    await flood(2)
    before = chaos.anonymous_bytes(server), memory(worker)
    await flood(chaos.count(8, 200))
    assert set(statuses) == {200, 429}, statuses
    assert statuses[200] >= 20
    await chaos.until(lambda: server.metric("penstock_pool_used_bytes") == 0)
    after = chaos.anonymous_bytes(server), memory(worker)
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert max(grown) < 8 * 2**20, grown
    assert await ask(chaos, server, "xyz", "end") == (200, 3)


def memory(process: psutil.Process) -> int:
    return int(process.memory_full_info().uss)


async def test_items_of_clients_that_left_are_not_run(
    guarded: Callable[..., Any], chaos: SimpleNamespace, folder: Path
) -> None:
    server = guarded(None, "naps.toml")
    for _ in range(chaos.count(1, 5)):
        before = server.metric("penstock_requests_total")
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(40):
                client = await stack.enter_async_context(chaos.Client(server))
                client.send("/predictions/naps", b"0.5", content_type="application/json")
            await chaos.until(lambda at=before: server.metric("penstock_requests_total") == at + 40)
        asked = time.monotonic()
        assert await ask(chaos, server, 0, "naps") == (200, 0)
        assert time.monotonic() - asked < 5, "40 naps are 10 s of two instances"
