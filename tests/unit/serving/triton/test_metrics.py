"""Triton's metrics on the metrics page: the names, types, labels and help texts of a real Triton, and safe labels."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.contracts import BatchRecord, ServerSnapshot
from penstock.errors import ItemFailed
from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.serving.triton.metrics import TritonMetrics
from penstock.serving.triton.statistics import ModelStatistics

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"
# as printed by Triton 2.51; the metrics of GPUs are from its sources
TRITON = """
nv_inference_request_success|counter|model version|Number of successful inference requests, all batch sizes
nv_inference_request_failure|counter|model reason version|Number of failed inference requests, all batch sizes
nv_inference_count|counter|model version|Number of inferences performed (does not include cached requests)
nv_inference_exec_count|counter|model version|Number of model executions performed (does not include cached requests)
nv_inference_request_duration_us|counter|model version|Cumulative inference request duration in microseconds (includes cached requests)
nv_inference_queue_duration_us|counter|model version|Cumulative inference queuing duration in microseconds (includes cached requests)
nv_inference_compute_input_duration_us|counter|model version|Cumulative compute input duration in microseconds (does not include cached requests)
nv_inference_compute_infer_duration_us|counter|model version|Cumulative compute inference duration in microseconds (does not include cached requests)
nv_inference_compute_output_duration_us|counter|model version|Cumulative inference compute output duration in microseconds (does not include cached requests)
nv_inference_pending_request_count|gauge|model version|Instantaneous number of pending requests awaiting execution per-model.
nv_cpu_utilization|gauge||CPU utilization rate [0.0 - 1.0]
nv_cpu_memory_total_bytes|gauge||CPU total memory (RAM), in bytes
nv_cpu_memory_used_bytes|gauge||CPU used memory (RAM), in bytes
nv_gpu_utilization|gauge|gpu_uuid|GPU utilization rate [0.0 - 1.0)
nv_gpu_memory_total_bytes|gauge|gpu_uuid|GPU total memory, in bytes
nv_gpu_memory_used_bytes|gauge|gpu_uuid|GPU used memory, in bytes
nv_gpu_power_usage|gauge|gpu_uuid|GPU power usage in watts
nv_gpu_power_limit|gauge|gpu_uuid|GPU power management limit in watts
nv_energy_consumption|counter|gpu_uuid|GPU energy consumption in joules since the Triton Server started
"""  # noqa: E501
EXPECTED = [tuple(line.split("|")) for line in TRITON.strip().splitlines()]
HOSTILE = ['a"b', "a\\", 'a\\"', "a\nnv_inference_count 7", "ä 模型 🚰", "{}", 'x",version="2', "", " ", "#"]


def families(observer: PrometheusObserver) -> dict[str, Metric]:
    """The families whose names are Triton's; the parser removes no suffix from these."""
    found = {f.name: f for f in text_string_to_metric_families(observer.render().decode())}
    return {name: family for name, family in found.items() if name.startswith("nv_")}


@pytest.fixture
def observers(reading: Callable[..., ServerSnapshot]) -> Callable[..., tuple[PrometheusObserver, ModelStatistics]]:
    def make(model: str = "m") -> tuple[PrometheusObserver, ModelStatistics]:
        statistics = ModelStatistics()
        return PrometheusObserver(lambda: reading(model), further=TritonMetrics(statistics)), statistics

    return make


def test_every_metric_is_that_of_triton(
    observers: Callable[..., tuple[PrometheusObserver, ModelStatistics]], one_gpu: ModuleType
) -> None:
    observer = observers()[0]
    found = [
        (name, f.type, " ".join(sorted(f.samples[0].labels)), f.documentation) for name, f in families(observer).items()
    ]
    assert sorted(found) == sorted(EXPECTED)
    samples = re.findall(r"^(nv_\w+)[{ ]", observer.render().decode(), flags=re.M)
    assert set(samples) == {name for name, *_ in EXPECTED}, "the parser hides a suffix _total"


def test_every_metric_is_documented() -> None:
    """Each has a row of the table, with its type."""
    rows = re.findall(r"^\| `(nv_\w+)` \| (\w+) \|", PAGE.read_text(), flags=re.M)
    assert sorted(rows) == sorted((name, kind) for name, kind, _, _ in EXPECTED)


def test_the_numbers_are_those_of_the_statistics(
    observers: Callable[..., tuple[PrometheusObserver, ModelStatistics]], record: Callable[..., BatchRecord]
) -> None:
    observer, statistics = observers()
    statistics.on_error("m", "1", ItemFailed("no"))
    statistics.on_answer("m", "1", [0.25, 0.5, 4.0], 1)
    failed = [(0.5, 1, False)]
    stages_s = (0.001, 0.002, 0.003)
    statistics.on_complete(record(rows=5, waits_s=(0.125, 0.25, 0.5), failed_requests=failed, stages_s=stages_s))
    statistics.on_reject("m", "1", "queue_full")
    found = families(observer)
    values = {
        name.removeprefix("nv_inference_"): f.samples[0].value
        for name, f in found.items()
        if name.startswith("nv_inference_") and name != "nv_inference_request_failure"
    }
    assert values == {
        "request_success": 2,
        "count": 4,
        "exec_count": 1,
        "request_duration_us": 750_000,
        "queue_duration_us": 375_000,
        "compute_input_duration_us": 2_000,
        "compute_infer_duration_us": 4_000,
        "compute_output_duration_us": 6_000,
        "pending_request_count": 3,
    }
    failures = {s.labels["reason"]: s.value for s in found["nv_inference_request_failure"].samples}
    assert failures == {"REJECTED": 1, "CANCELED": 0, "BACKEND": 1, "OTHER": 0}


def test_a_gpu_has_its_readings(
    observers: Callable[..., tuple[PrometheusObserver, ModelStatistics]], one_gpu: ModuleType
) -> None:
    observer, _ = observers()
    families(observer)
    found = families(observer)
    gpus = {name: f.samples for name, f in found.items() if "gpu_uuid" in f.samples[0].labels}
    assert {name: (s.labels["gpu_uuid"], s.value) for name, (s,) in gpus.items()} == {
        "nv_gpu_utilization": ("GPU-9a", 0.25),
        "nv_gpu_memory_total_bytes": ("GPU-9a", 8),
        "nv_gpu_memory_used_bytes": ("GPU-9a", 3),
        "nv_gpu_power_usage": ("GPU-9a", 20.085),
        "nv_gpu_power_limit": ("GPU-9a", 60),
        "nv_energy_consumption": ("GPU-9a", 0.5),
    }
    assert 0 <= found["nv_cpu_utilization"].samples[0].value <= 1
    total, used = (found[f"nv_cpu_memory_{kind}_bytes"].samples[0].value for kind in ("total", "used"))
    assert 0 < used < total


def test_what_a_gpu_does_not_tell_is_left_out(
    observers: Callable[..., tuple[PrometheusObserver, ModelStatistics]],
    one_gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(one_gpu, "nvmlDeviceGetPowerUsage")
    found = families(observers()[0])
    assert found["nv_gpu_power_usage"].samples == []
    assert found["nv_gpu_power_limit"].samples[0].value == 60


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_in_its_label(
    observers: Callable[..., tuple[PrometheusObserver, ModelStatistics]], name: str
) -> None:
    observer, statistics = observers(name)
    statistics.on_answer(name, "1", [1.0], 0)
    found = families(observer)
    (sample,) = found["nv_inference_request_success"].samples
    assert (sample.labels, sample.value) == ({"model": name, "version": "1"}, 1)
    assert [s.labels["model"] for s in found["nv_inference_request_failure"].samples] == [name] * 4
    assert found["nv_inference_count"].samples[0].value == 0


def test_without_the_key_there_are_none(reading: Callable[..., ServerSnapshot]) -> None:
    assert families(PrometheusObserver(lambda: reading())) == {}
