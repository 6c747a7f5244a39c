from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client.endpoint import parse_url
from penstock.client.errors import Unreachable
from penstock.perf.bench import probe as module
from penstock.perf.bench.ask import Reply
from penstock.perf.bench.probe import Probe
from penstock.perf.bench.target import Target
from penstock.serving.observe.system import GpuReading

HERE = parse_url("http://127.0.0.1:8080")


def target(**more: Any) -> Target:
    return Target(text="t", endpoint=HERE, model="m", path="/predictions/m", **more)


class FakeGpus:
    """A GPU that is ever busier."""

    def __init__(self) -> None:
        self.looks = 0

    def read(self) -> list[GpuReading]:
        self.looks += 1
        return [(("0", "H"), self.looks / 10, self.looks * 1000, 9000)]


async def watched(probe: Probe) -> Any:
    await probe.start()
    for _ in range(3):  # as its timer would
        if probe._looking is not None:
            await asyncio.wait([probe._looking])
        probe._look()
    return await probe.stop()


def test_processes_and_gpus_are_looked_at_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Gpus", FakeGpus)
    used_s = iter([10.0, 12.0])  # the kernel counts in hundredths, and this run is shorter
    monkeypatch.setattr(module, "_cpu_s", lambda processes: next(used_s) if processes else 0.0)
    clock = iter(range(50, 100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    probe = Probe(target(pids=(os.getpid(),)))
    side = asyncio.run(watched(probe))
    assert side.cpu == pytest.approx(2 / 6)  # started, four looks, stopped
    assert len(probe.memory) >= 3
    assert side.memory_bytes == max(held for _, held in probe.memory) > 2**20
    assert [at for at, _ in probe.memory] == sorted(at for at, _ in probe.memory)
    (gpu,) = side.gpus
    assert (gpu.name, gpu.memory_bytes, gpu.total_bytes) == (
        "0 H",
        5000,
        9000,
    )  # the last of five looks, one of them before the run
    assert gpu.utilization == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5)


class Process:
    """A server that had used 10 s, and has one worker more at each look; all of them grow by 1000 bytes a look."""

    looks = 0

    def __init__(self, pid: int) -> None:
        self.times = SimpleNamespace(user=6.0, system=3.0, children_user=0.7, children_system=0.3)

    def children(self, *, recursive: bool) -> list[Process]:
        assert recursive
        Process.looks += 1
        return [Process(n) for n in range(Process.looks)]

    def memory_info(self) -> Any:
        return SimpleNamespace(rss=Process.looks * 1000)

    def cpu_times(self) -> Any:
        return self.times


def test_workers_count_with_their_server_also_those_that_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Gpus", FakeGpus)
    monkeypatch.setattr(module.psutil, "Process", Process)
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    side = asyncio.run(watched(Probe(target(pids=(7,)))))
    assert side.cpu == pytest.approx((3 - 2) * 10 / 6)
    assert side.memory_bytes == 2 * 1000


def test_what_the_page_of_metrics_tells_of_the_run_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter(
        f'penstock_queue_seconds_sum{{model="m"}} {total}\npenstock_queue_seconds_count{{model="m"}} {count}\n'
        for total, count in [(1.0, 10), (3.0, 20)]
    )

    def ask(endpoint: Any, method: str, path: str, *, token: str, timeout_s: float) -> Reply:
        assert (endpoint, method, path, token) == (HERE, "GET", "/metrics", "t0k3n")
        return Reply(200, next(pages).encode())

    monkeypatch.setattr(module, "ask", ask)
    side = asyncio.run(watched(Probe(target(metrics=HERE, token="t0k3n"))))
    assert side.queue_s == pytest.approx(0.2)
    assert (side.cpu, side.memory_bytes, side.gpus) == (None, None, [])


def test_a_server_that_shows_nothing_is_no_server_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> Reply:
        raise Unreachable("gone")

    monkeypatch.setattr(module, "ask", gone)
    monkeypatch.setattr(module, "Gpus", FakeGpus)
    assert asyncio.run(watched(Probe(target()))) is None
    assert asyncio.run(watched(Probe(target(metrics=HERE)))) is None
    none_such = 2**22 + 1  # beyond what Linux gives
    side = asyncio.run(watched(Probe(target(metrics=HERE, pids=(none_such,)))))
    assert (side.cpu, side.memory_bytes, len(side.gpus)) == (None, None, 1)


def test_a_page_that_is_there_only_once_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"penstock_queue_seconds_sum 1\npenstock_queue_seconds_count 2\n"
    for statuses in ((503, 200), (200, 503)):
        replies = iter(statuses)
        monkeypatch.setattr(module, "ask", lambda *_, replies=replies, **__: Reply(next(replies), page))
        assert asyncio.run(watched(Probe(target(metrics=HERE)))) is None


def test_a_probe_that_was_not_started_or_was_stopped_sees_nothing() -> None:
    async def twice() -> None:
        probe = Probe(target(pids=(os.getpid(),)))
        assert await probe.stop() is None
        await probe.start()
        assert await probe.stop() is not None
        assert await probe.stop() is None

    asyncio.run(twice())
