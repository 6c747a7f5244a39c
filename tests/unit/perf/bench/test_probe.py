from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client.endpoint import Unreachable, parse_url
from penstock.client.response import HttpResponse
from penstock.core.contracts import BatchRecord
from penstock.core.readings import GpuReading
from penstock.perf.bench import probe as module
from penstock.perf.bench.measurement import Gpu
from penstock.perf.bench.probe import MetricsPage, ServerProbe, between, read_page
from penstock.perf.bench.target import Target
from penstock.serving.observe.prometheus import PrometheusObserver


def shown(observer: PrometheusObserver, model: str = "m") -> MetricsPage:
    return read_page(observer.render().decode(), model)


def batch(
    rows: int, stages_s: tuple[float, float, float] | None, *, model: str = "m", version: str = "1"
) -> BatchRecord:
    return BatchRecord(
        model=model, version=version, slot=0, rows=rows, max_batch_size=64, reason="full", ahead=False,
        run_s=0.2, seconds=0.3, waits_s=[0.004] * rows, failed=0, stages_s=stages_s,
    )  # fmt: skip


def test_stats_cover_one_model_in_all_versions_between_two_pages() -> None:
    observer = PrometheusObserver()
    observer.on_complete(batch(64, (5.0, 5.0, 5.0)))
    before = shown(observer)
    observer.on_complete(batch(3, (0.01, 0.1, 0.02)))
    observer.on_complete(batch(1, (0.03, 0.3, 0.02), version="2"))
    observer.on_complete(batch(9, (9.0, 9.0, 9.0), model="other"))
    stats = between(before, shown(observer))
    assert stats["queue_s"] == pytest.approx(0.004)
    assert (stats["preprocess_s"], stats["run_s"], stats["postprocess_s"]) == pytest.approx((0.02, 0.2, 0.02))
    assert stats["mean_batch"] == 2
    assert stats["batches"] == {"4": 1, "1": 1}
    assert list(stats["batches"]) == ["1", "4"]


def test_percentiles_lie_between_the_bounds_of_their_bucket() -> None:
    observer = PrometheusObserver()
    before = shown(observer)
    for _ in range(100):
        observer.on_complete(batch(1, None))
    stats = between(before, shown(observer))
    assert stats["worker_at_s"] == pytest.approx({"p50": 0.175, "p90": 0.235, "p99": 0.2485})  # from 0.1 to 0.25
    assert stats["queue_at_s"] == pytest.approx(
        {"p50": 0.00375, "p90": 0.00475, "p99": 0.004975}
    )  # from 0.0025 to 0.005


def test_quantiles_use_all_buckets_in_any_order() -> None:
    counts = {"4": 200, "2": 100, "1": 100, "+Inf": 200}
    page = read_page("".join(f'penstock_run_seconds_bucket{{le="{le}"}} {n}\n' for le, n in counts.items()), "m")
    assert between(MetricsPage(), page)["worker_at_s"] == pytest.approx({"p50": 1.0, "p90": 3.6, "p99": 3.96})


def test_a_model_without_stages_is_timed_as_a_whole_and_large_batches_stand_at_the_last_bound() -> None:
    observer = PrometheusObserver()
    before = shown(observer)
    observer.on_complete(batch(5000, None))
    stats = between(before, shown(observer))
    assert stats["run_s"] == pytest.approx(0.2)
    assert not stats.keys() & {"preprocess_s", "postprocess_s"}
    assert stats["batches"] == {"2048": 1}
    inf = 'penstock_run_seconds_bucket{model="m",le="1"} 0\npenstock_run_seconds_bucket{le="+Inf"} 100\n'
    assert between(MetricsPage(), read_page(inf, "m"))["worker_at_s"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}


@pytest.mark.parametrize(("count", "expected"), [(1, []), (2, ["p50"]), (10, ["p50", "p90"]), (99, ["p50", "p90"])])
def test_a_quantile_needs_enough_values(count: int, expected: list[str]) -> None:
    page = read_page(f'penstock_queue_seconds_bucket{{le="1"}} {count}\n', "m")
    assert list(between(MetricsPage(), page).get("queue_at_s", {})) == expected


def test_a_server_that_restarted_or_ran_no_batch_yields_nothing() -> None:
    observer, fresh = PrometheusObserver(), PrometheusObserver()
    for each in (observer, observer, fresh):
        each.on_complete(batch(8, None))
    assert between(shown(observer), shown(fresh)) == {}
    assert between(shown(observer), shown(observer)) == {}


TORCHSERVE = """# TYPE ts_queue_latency_microseconds counter
ts_queue_latency_microseconds{uuid="a",model_name="m",model_version="default",hostname="h",} %s
ts_queue_latency_microseconds{uuid="a",model_name="n",model_version="default",hostname="h",} 1.0E9
ts_inference_requests_total{uuid="a",model_name="m",model_version="default",hostname="h",} %s
ts_inference_requests_total{uuid="a",model_name="m",model_version="2.0",hostname="h",} %s
PredictionTime{ModelName="m",ModelVersion="1.0",Level="Model",Hostname="h",} 99
PredictionTime{ModelName="m",ModelVersion="2.0",Level="Model",Hostname="h",} 12.5
PredictionTime{ModelName="n",Level="Model",Hostname="h",} 99
QueueTime{Level="Host",Hostname="h",} 7.0 1767225600000
"""


def test_torchserve_stats_use_its_counters_and_its_last_batch() -> None:
    before, after = (read_page(TORCHSERVE % values, "m") for values in (("1000.0", 4, 9), ("1.0E4", 6, 10)))
    assert between(before, after) == pytest.approx({"queue_s": 0.003, "run_s": 0.0125})
    assert between(after, after)["queue_s"] == pytest.approx(0.007)  # without counters the last request is used
    requests = [read_page(f"ts_inference_requests_total {count}\n", "m") for count in (1, 2)]
    assert between(*requests) == {}  # an unknown wait is not 0


@pytest.mark.parametrize(
    "text",
    ["", "<html>\n", 'penstock_run_seconds_sum{model="m"} many\n', "penstock_run_seconds_count 3", "\x00\xff"],
)
def test_an_invalid_metrics_page_yields_nothing(text: str) -> None:
    assert between(MetricsPage(), read_page(text, "m")) == {}


HERE = parse_url("http://127.0.0.1:8080")


def target(**more: Any) -> Target:
    return Target(text="t", endpoint=HERE, model="m", path="/predictions/m", **more)


class FakeGpus:
    """A GPU with increasing load."""

    def __init__(self) -> None:
        self.looks = 0

    def read(self) -> list[GpuReading]:
        self.looks += 1
        return [(("0", "H"), self.looks / 10, self.looks * 1000, 9000)]


async def watched(probe: ServerProbe) -> Any:
    await probe.start()
    for _ in range(3):  # as its timer would
        if probe._reading is not None:
            await asyncio.wait([probe._reading])
        probe._sample()
    return await probe.stop()


def test_processes_and_gpus_are_sampled_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Gpus", FakeGpus)
    used_s = iter([10.0, 12.0])  # the kernel counts in hundredths of a second; this run is shorter
    monkeypatch.setattr(module, "_cpu_s", lambda processes: next(used_s) if processes else 0.0)
    clock = iter(range(50, 100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    probe = ServerProbe(target(pids=(os.getpid(),)))
    side = asyncio.run(watched(probe))
    assert side.cpu == pytest.approx(2 / 6)  # start, four samples, stop
    assert len(probe.memory) >= 3
    assert side.memory_bytes == max(held for _, held in probe.memory) > 2**20
    assert [at for at, _ in probe.memory] == sorted(at for at, _ in probe.memory)
    # the last of five samples, one of them before the run, and their mean
    assert side.gpus == [Gpu(name="0 H", memory_bytes=5000, total_bytes=9000, utilization=pytest.approx(0.3))]


class Process:
    """A server with 10 s of CPU time that gains a worker per sample; each process grows by 1000 bytes per sample."""

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


def test_workers_count_with_their_server_even_if_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Gpus", FakeGpus)
    monkeypatch.setattr(module.psutil, "Process", Process)
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    side = asyncio.run(watched(ServerProbe(target(pids=(7,)))))
    assert side.cpu == pytest.approx((3 - 2) * 10 / 6)
    assert side.memory_bytes == 2 * 1000


def test_stats_include_the_metrics_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter(
        f'penstock_queue_seconds_sum{{model="m"}} {total}\npenstock_queue_seconds_count{{model="m"}} {count}\n'
        for total, count in [(1.0, 10), (3.0, 20)]
    )

    def fetch(endpoint: Any, method: str, path: str, *, token: str, timeout_s: float) -> HttpResponse:
        assert (endpoint, method, path, token) == (HERE, "GET", "/metrics", "t0k3n")
        return HttpResponse(200, {}, next(pages).encode())

    monkeypatch.setattr(module, "fetch", fetch)
    side = asyncio.run(watched(ServerProbe(target(metrics=HERE, token="t0k3n"))))
    assert side.queue_s == pytest.approx(0.2)
    assert (side.cpu, side.memory_bytes, side.gpus) == (None, None, [])


def test_a_server_without_visible_data_has_no_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> HttpResponse:
        raise Unreachable("gone")

    monkeypatch.setattr(module, "fetch", gone)
    monkeypatch.setattr(module, "Gpus", FakeGpus)
    assert asyncio.run(watched(ServerProbe(target()))) is None
    assert asyncio.run(watched(ServerProbe(target(metrics=HERE)))) is None
    none_such = 2**22 + 1  # above the highest pid of Linux
    side = asyncio.run(watched(ServerProbe(target(metrics=HERE, pids=(none_such,)))))
    assert (side.cpu, side.memory_bytes, len(side.gpus)) == (None, None, 1)


def test_a_page_available_only_once_yields_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"penstock_queue_seconds_sum 1\npenstock_queue_seconds_count 2\n"
    for statuses in ((503, 200), (200, 503)):
        replies = iter(statuses)
        monkeypatch.setattr(module, "fetch", lambda *_, replies=replies, **__: HttpResponse(next(replies), {}, page))
        assert asyncio.run(watched(ServerProbe(target(metrics=HERE)))) is None


def test_a_probe_that_was_not_started_or_was_stopped_sees_nothing() -> None:
    async def twice() -> None:
        probe = ServerProbe(target(pids=(os.getpid(),)))
        assert await probe.stop() is None
        await probe.start()
        assert await probe.stop() is not None
        assert await probe.stop() is None

    asyncio.run(twice())
