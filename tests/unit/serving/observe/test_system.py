from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

from prometheus_client.parser import text_string_to_metric_families

from penstock.core.contracts import ServerSnapshot
from penstock.serving.observe.system import SystemMetrics
from penstock.serving.observe.text import Page


def shown(system: SystemMetrics, reading: ServerSnapshot) -> dict[str, list[tuple[dict[str, str], float]]]:
    page = Page()
    system.write(page, reading.models)
    families = text_string_to_metric_families(page.encode().decode())
    return {f.name: [(s.labels, s.value) for s in f.samples] for f in families}


def test_a_worker_process_has_its_memory_and_cpu_time(reading: Callable[..., ServerSnapshot]) -> None:
    found = shown(SystemMetrics(), reading(pids={3: os.getpid()}))
    ((labels, resident),) = found["penstock_worker_resident_bytes"]
    assert labels == {"model": "m", "version": "1", "instance": "3"}
    assert 2**20 < resident < 2**37
    ((_, cpu),) = found["penstock_worker_cpu_seconds"]
    assert 0 < cpu <= sum(os.times()[:2]) + 0.1


def test_a_worker_that_has_ended_is_left_out(reading: Callable[..., ServerSnapshot]) -> None:
    system = SystemMetrics()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert len(shown(system, reading(pids={0: child.pid}))["penstock_worker_resident_bytes"]) == 1
        child.kill()
        child.wait()
        found = shown(system, reading(pids={0: child.pid, 1: os.getpid()}))
    assert [labels["instance"] for labels, _ in found["penstock_worker_resident_bytes"]] == ["1"]


def test_the_machine_is_shown(reading: Callable[..., ServerSnapshot]) -> None:
    found = shown(SystemMetrics(), reading())
    memory = {labels["kind"]: value for labels, value in found["penstock_system_memory_bytes"]}
    assert 0 < memory["available"] <= memory["total"]
    assert {labels["state"] for labels, _ in found["penstock_system_cpu_seconds"]} == {"busy", "idle"}
    assert found["penstock_system_cpus"][0][1] == os.cpu_count()


def test_a_gpu_is_shown(one_gpu: ModuleType, reading: Callable[..., ServerSnapshot]) -> None:
    found = shown(SystemMetrics(), reading())
    labels = {"gpu": "0", "name": "Card 9000"}
    assert found["penstock_gpu_utilization_ratio"] == [(labels, 0.25)]
    assert found["penstock_gpu_memory_used_bytes"] == [(labels, 3)]
    assert found["penstock_gpu_memory_bytes"] == [(labels, 8)]
