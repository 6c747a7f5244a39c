from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.contracts import BatchRecord, ServerSnapshot
from penstock.serving.observe import prometheus
from penstock.torchserve.metrics import observer
from penstock.torchserve.metrics.families import MetricDefinition, MetricsConfig, default_config
from penstock.torchserve.metrics.observer import FrontendCounts, MetricsOptions, TorchServeMetrics
from penstock.torchserve.metrics.system import SystemMetric
from penstock.tracing import SPAN
from penstock.types import MetricDelta

LABEL = re.compile(r'="((?:[^"\\]|\\.)*)"')
HANDLER = MetricDelta("gauge", "HandlerTime", 1.5, {"ModelName": "m", "Level": "Model"}, "Milliseconds", "r-1")


class Files(logging.Handler):
    """Collects the lines of both log files, while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.server: list[str] = []
        self.models: list[str] = []
        self.console: list[tuple[str, ...]] = []  # thread, logger, line

    def emit(self, record: logging.LogRecord) -> None:
        self.gate.wait(10)
        if record.name == "METRICS_CONSOLE":
            extra = record.__dict__
            self.console += [(extra["worker"], extra["metrics"], line) for line in record.getMessage().split("\n")]
            return
        (self.server if record.name == "TS_METRICS" else self.models).extend(record.getMessage().split("\n"))


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    handler = Files()
    loggers = (observer.SERVER_LOG, observer.MODEL_LOG, observer.CONSOLE_LOG)
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        monkeypatch.setattr(logger, "propagate", False)
        logger.setLevel(logging.INFO)  # not by setattr: a logger remembers what it is enabled for
        logger.addHandler(handler)
    yield handler
    for logger, level in before:
        logger.setLevel(level)
        logger.removeHandler(handler)


def make(
    config: MetricsConfig | None = None, counts: Callable[[], FrontendCounts] = FrontendCounts, **settings: Any
) -> TorchServeMetrics:
    config = config or default_config()
    return TorchServeMetrics(MetricsOptions(config=config, host="h", clock=lambda: 1700000000.9, **settings), counts)


async def values(metrics: TorchServeMetrics, *names: str) -> dict[str, float]:
    page = (await metrics.scrape(names)).decode()
    assert list(text_string_to_metric_families(page)) or not page  # it is read
    samples = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {re.sub(r"{.*", "", name) + f"[{','.join(LABEL.findall(name))}]": float(value) for name, _, value in samples}


async def test_served_requests_are_counted_by_the_requested_version(files: Files) -> None:
    metrics = make()
    metrics.on_served("m", "1.0", ["default", "1.0", "default"], [0.001, 0.002, 0.004], [0.01, 0.02, 0.04])
    metrics.on_served("m", "1.0", [""], [0.0005], [0.001])
    found = await values(metrics, "ts_inference_latency_microseconds", "ts_queue_latency_microseconds", "QueueTime")
    assert found == pytest.approx(
        {
            "ts_inference_latency_microseconds[m,default,h]": 50000,
            "ts_inference_latency_microseconds[m,1.0,h]": 21000,
            "ts_queue_latency_microseconds[m,default,h]": 5000,
            "ts_queue_latency_microseconds[m,1.0,h]": 2500,
            "QueueTime[Host,h]": 0.5,
        }
    )
    assert files.server == [
        "ts_inference_latency_microseconds.Microseconds:50000.0|#model_name:m,model_version:default|#hostname:h,"
        "timestamp:1700000000",
        "ts_queue_latency_microseconds.Microseconds:5000.0|#model_name:m,model_version:default|#hostname:h,"
        "timestamp:1700000000",
        "QueueTime.Milliseconds:0.5|#Level:Host|#hostname:h,timestamp:1700000000",
        "ts_inference_latency_microseconds.Microseconds:21000.0|#model_name:m,model_version:1.0|#hostname:h,"
        "timestamp:1700000000",
        "ts_queue_latency_microseconds.Microseconds:2500.0|#model_name:m,model_version:1.0|#hostname:h,"
        "timestamp:1700000000",
    ]


async def test_the_console_has_a_line_for_each_value(files: Files) -> None:
    metrics = make(first_worker=9500, counts=lambda: FrontendCounts({2: 2}, {("m", "default"): 2}))
    metrics.on_served("m", "1.0", ["default", "default"], [0.001, 0.0004567], [0.01, 0.02])
    metrics.on_model_metrics("m", "1.0", 1, [HANDLER])
    await metrics.close()
    of_m, of_host = "|#model_name:m,model_version:default|#hostname:h,", "|#Level:Host|#hostname:h,"
    assert files.console.pop() == ("W-9501-m_1.0-stdout", "MODEL_METRICS", files.models[0])
    assert sorted(files.console) == sorted(
        ("main", "TS_METRICS", f"{name}:{value}{labels}timestamp:1700000000")
        for name, labels, found in (
            ("Requests2XX.Count", of_host, (1.0, 1.0)),
            ("ts_inference_requests_total.Count", of_m, (1.0, 1.0)),
            ("ts_inference_latency_microseconds.Microseconds", of_m, (10000.0, 20000.0)),
            ("ts_queue_latency_microseconds.Microseconds", of_m, (1000.0, 456.7)),
            ("QueueTime.Milliseconds", of_host, (1.0, 0.457)),
        )
        for value in found
    )


async def test_counters_are_logged_as_growth(files: Files) -> None:
    counts = FrontendCounts({2: 3, 4: 1}, {("m", "default"): 2})
    metrics = make(counts=lambda: counts)
    await values(metrics)
    counts = FrontendCounts({2: 5, 4: 1, 5: 1}, {("m", "2"): 1})
    found = await values(metrics, "Requests2XX", "Requests4XX", "Requests5XX", "ts_inference_requests_total")
    assert found == {
        "Requests2XX[Host,h]": 5,
        "Requests4XX[Host,h]": 1,
        "Requests5XX[Host,h]": 1,
        "ts_inference_requests_total[m,default,h]": 2,
        "ts_inference_requests_total[m,2,h]": 1,
    }
    message = [line.partition("|")[0] for line in files.server]
    assert message == [
        "Requests2XX.Count:3.0", "Requests4XX.Count:1.0", "ts_inference_requests_total.Count:2.0",
        "Requests2XX.Count:2.0", "Requests5XX.Count:1.0", "ts_inference_requests_total.Count:1.0",
    ]  # fmt: skip


async def test_workers_and_system_metrics_are_logged(files: Files, record: Callable[..., BatchRecord]) -> None:
    metrics = make(first_worker=9500)
    metrics.on_load("m", "1.0", 2, 1.25)
    batch = record(rows=1, seconds=0.5)
    batch.run_s = 0.498
    metrics.on_complete(batch)
    metrics.measured(
        [SystemMetric("CPUUtilization", ("Host",), 12.5), SystemMetric("GPUUtilization", ("Host", "1"), 50.0)]
    )
    metrics.measured([SystemMetric("Nobody", ("Host",), 1.0), SystemMetric("MemoryUsed", (), 1.0)])
    await metrics.close()
    assert [line.partition("|#hostname")[0] for line in files.server] == [
        "WorkerLoadTime.Milliseconds:1250.0|#WorkerName:W-9502-m_1.0,Level:Host",
        "WorkerThreadTime.Milliseconds:2.0|#Level:Host",
        "CPUUtilization.Percent:12.5|#Level:Host",
        "GPUUtilization.Percent:50.0|#Level:Host,DeviceId:1",
    ]


async def test_every_value_of_a_defined_model_metric_is_a_line(files: Files) -> None:
    metrics = make()
    metrics.on_model_metrics("m", "1.0", 0, [HANDLER, MetricDelta("counter", "Faces", 3.0, {}, "Count", "r-1")])
    metrics.on_model_metrics("m", "1.0", 0, [MetricDelta("gauge", "HandlerTime", 2.5, HANDLER.labels, "Seconds")])
    assert await values(metrics, "HandlerTime", "Faces") == {"HandlerTime[m,Model,h]": 2.5}
    assert files.models == [
        "HandlerTime.ms:1.5|#ModelName:m,Level:Model|#hostname:h,requestID:r-1,timestamp:1700000000",
        "HandlerTime.ms:2.5|#ModelName:m,Level:Model|#hostname:h,requestID:null,timestamp:1700000000",
    ]


async def test_auto_detect_adds_metrics_without_a_definition(files: Files) -> None:
    metrics = make(auto_detect=True)
    for value in (3.0, 4.0):
        span = MetricDelta(SPAN, "Seen", value, {}, "{}")
        faces = MetricDelta("counter", "Faces", value, {"camera": "a\nb"}, "Count")
        metrics.on_model_metrics("m", "1.0", 0, [faces, span])
    assert await values(metrics, "Seen") == {}
    page = await metrics.scrape(["Faces"])
    assert b'Faces{camera="a\\nb",Hostname="h",} 7.0\n' in page
    assert files.models[0] == "Faces.Count:3.0|#camera:a b|#hostname:h,requestID:null,timestamp:1700000000"
    metrics.on_unload("m", "1.0")
    assert await values(metrics, "Faces") == {}


async def test_the_file_determines_metrics_and_kinds(files: Files) -> None:
    latency = MetricDefinition("ts_inference_latency_microseconds", "histogram", "us", ("name", "version", "host"))
    metrics = make(MetricsConfig({latency.name: latency}, {}), counts=lambda: FrontendCounts({2: 1}))
    metrics.on_served("m", "1", ["1", "1"], [0.0, 0.0], [0.001, 0.002])
    metrics.on_model_metrics("m", "1", 0, [HANDLER])
    page = (await metrics.scrape()).decode()
    assert 'ts_inference_latency_microseconds_bucket{name="m",version="1",host="h",le="1000.0",} 1\n' in page
    assert 'ts_inference_latency_microseconds_count{name="m",version="1",host="h",} 2\n' in page
    assert not any(name in page for name in ("Requests2XX", "QueueTime", "HandlerTime"))
    assert (len(files.server), files.models) == (1, [])


@pytest.mark.parametrize(
    ("mode", "server", "models"),
    [("log", ["ts_inference_requests_total", "Requests2XX"], 1), ("legacy", ["Requests2XX"], 1), ("prometheus", [], 0)],
)
async def test_the_page_exists_in_every_mode_and_the_mode_controls_the_files(
    files: Files, mode: str, server: list[str], models: int
) -> None:
    metrics = make(mode=mode, counts=lambda: FrontendCounts({2: 1}, {("m", "default"): 1}))
    metrics.on_model_metrics("m", "1", 0, [HANDLER])
    assert set(await values(metrics, "Requests2XX", "HandlerTime")) == {"Requests2XX[Host,h]", "HandlerTime[m,Model,h]"}
    assert sorted(line.partition(".")[0] for line in files.server) == sorted(server)
    assert len(files.models) == models


async def test_the_page_includes_penstocks_own_metrics(
    reading: Callable[..., ServerSnapshot], record: Callable[..., BatchRecord], files: Files
) -> None:
    metrics = make()
    metrics.penstock.read = reading
    metrics.penstock.on_complete(record(rows=5))
    deltas = [HANDLER, MetricDelta("timer", "resize", 0.2), MetricDelta("counter", "cats", 2.0)]
    for each in (metrics, metrics.penstock):
        each.on_model_metrics("m", "1", 0, deltas)
    found = await values(metrics)
    assert found["penstock_batch_rows_sum[m,1]"] == 5
    assert (found["resize_seconds_count[m,1]"], found["cats_total[m,1]"]) == (1, 2)
    assert "penstock_http_connections[]" in found
    assert [name for name in found if name.startswith("HandlerTime")] == ["HandlerTime[m,Model,h]"]
    assert len(files.models) == 1


async def test_a_flush_is_skipped_while_the_last_one_runs_and_loses_nothing(files: Files) -> None:
    metrics = make()
    files.gate.clear()
    flushed = []
    for _ in range(3):
        metrics.on_model_metrics("m", "1", 0, [HANDLER])
        flushed.append(metrics.flush_if_idle())
    assert flushed == [True, False, False]
    files.gate.set()
    await metrics.close()
    assert len(files.models) == 3


async def test_excess_model_metrics_are_dropped_and_counted(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer, "MAX_BATCHES", 2)
    metrics = make()
    for _ in range(5):
        metrics.on_model_metrics("m", "1", 0, [HANDLER, HANDLER])
    await metrics.close()
    assert len(files.models) == 4
    assert "model_metrics_lost values=6" in caplog.text


async def test_many_batches_are_counted_in_chunks(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    breaths: list[float] = []
    monkeypatch.setattr(observer.time, "sleep", breaths.append)
    metrics = make()
    for _ in range(200):
        metrics.on_model_metrics("m", "1", 0, [HANDLER] * 5)
    await metrics.close()
    assert len(files.models) == 1000
    assert len(breaths) == 3


async def test_an_error_in_counting_is_logged_and_the_next_flush_works(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = make()
    metrics.on_model_metrics("m", "1", 0, [None])  # type: ignore[list-item]
    metrics.flush_if_idle()
    await values(metrics)
    assert "metrics_not_counted" in caplog.text
    metrics.on_model_metrics("m", "1", 0, [HANDLER])
    assert await values(metrics, "HandlerTime") == {"HandlerTime[m,Model,h]": 1.5}


async def test_server_metrics_of_an_unloaded_version_stay_for_a_while(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "MAX_GONE", 2)
    metrics = make()

    def come(version: str, label: str) -> None:
        metrics.on_load("m", version, 0, 1.0)
        metrics.on_served("m", version, [label], [0.0], [1e-6])

    async def shown() -> set[str]:
        names = await values(metrics, "ts_inference_latency_microseconds", "WorkerLoadTime")
        return {re.sub(r"\w+\[|,Host|,h]|W-9000-", "", name) for name in names}

    for version in ("1", "2"):
        come(version, version)
    come("2", "default")
    metrics.on_unload("m", "1")
    assert await shown() == {"m,1", "m,2", "m,default", "m_1", "m_2"}
    come("1", "1")
    for version in ("1", "2"):  # with the last version goes what names none
        metrics.on_unload("m", version)
    assert await shown() == {"m,2", "m,default", "m_2"}
    come("3", "3")
    metrics.on_unload("m", "3")
    assert await shown() == {"m,3", "m,default", "m_3"}


async def test_a_failed_flush_is_not_the_last(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = make()
    monkeypatch.setattr(observer, "FLUSH_S", 0.0)
    again = asyncio.Event()

    def fail() -> FrontendCounts:
        if "metrics_not_counted" in caplog.text:
            again.set()
        raise RuntimeError("no")

    metrics.counts = fail
    running = asyncio.create_task(metrics.run())
    await asyncio.wait_for(again.wait(), 10)
    running.cancel()


async def test_without_events_nothing_is_flushed(files: Files) -> None:
    counts = FrontendCounts({2: 1})
    metrics = make(counts=lambda: counts)
    assert metrics.flush_if_idle()
    await metrics.scrape()  # the thread is done with it
    assert not metrics.flush_if_idle()
    counts = FrontendCounts({2: 2})
    assert metrics.flush_if_idle()
    await metrics.close()
    assert [line.partition("|")[0] for line in files.server] == ["Requests2XX.Count:1.0"] * 2
