import os
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from penstock.core.readings import GpuPower, Gpus, cpu_s, private_bytes, resident_bytes
from support.waiting import wait_for


def test_a_process_has_memory_and_cpu_time_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert resident_bytes(child.pid) > 0
        assert 2**20 < private_bytes(os.getpid()) < resident_bytes(os.getpid())
        child.kill()
        child.wait()
        assert resident_bytes(process) == resident_bytes(child.pid) == private_bytes(child.pid) == cpu_s(process) == 0
    assert 0 < cpu_s(psutil.Process()) <= cpu_s(psutil.Process(), children=True)


def test_without_library_or_driver_there_are_no_gpus(one_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(one_gpu, "nvmlInit", fail)
    assert Gpus().read() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().read() == []


def test_the_power_of_a_gpu_is_in_watts_and_its_energy_counts_from_the_first_query(one_gpu: ModuleType) -> None:
    gpus = Gpus()
    gpus.read()
    assert gpus.power == {"0": GpuPower("GPU-9a", 20.085, 60.0, 0.0)}
    gpus.read()
    assert gpus.power["0"].energy_j == 0.5


def test_the_utilization_is_the_average_since_the_last_query(
    one_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [(0, 99), (1_000, 80), (1_200, 40)]  # (microseconds, percent); an unused place of the buffer has the time 0

    def samples(handle: int, kind: int, since_us: int) -> tuple[int, list[SimpleNamespace]]:
        assert kind == 1
        new = [sample for sample in kept if sample[0] > since_us or not sample[0]]
        if not new:
            raise RuntimeError("not found")
        values = [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=percent)) for at, percent in new]
        return 1, values

    monkeypatch.setattr(one_gpu, "NVML_GPU_UTILIZATION_SAMPLES", 1, raising=False)
    monkeypatch.setattr(one_gpu, "nvmlDeviceGetSamples", samples, raising=False)
    gpus = Gpus()
    found = []
    for new in ([], [(1_400, 100), (1_600, 0), (1_800, 50)], [], [(2_000, 10)]):
        kept += new
        [(_, busy, *_)] = gpus.read()
        found.append(busy)
    assert found == [pytest.approx(x) for x in (0.6, 0.5, 0.25, 0.1)], "0.25: the present reading, without a sample"
    kept.clear()
    assert [busy for _, busy, *_ in gpus.read()] == [0.25]


def test_what_a_driver_does_not_tell_is_none_and_hides_nothing(
    one_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UUID", "PowerUsage", "TotalEnergyConsumption"):
        monkeypatch.delattr(one_gpu, f"nvmlDeviceGet{name}")
    gpus = Gpus()
    assert gpus.read() == [(("0", "Card 9000"), 0.25, 3, 8)]
    assert gpus.power == {"0": GpuPower("0", None, 60.0, None)}


def test_a_driver_that_hangs_is_waited_for_once_and_not_for_long(
    one_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    rates = one_gpu.nvmlDeviceGetUtilizationRates

    def hang(handle: int) -> object:
        answers.wait(30)
        return rates(handle)

    monkeypatch.setattr(one_gpu, "nvmlDeviceGetUtilizationRates", hang)
    gpus = Gpus(limit_s=0.05)
    assert gpus.read() == gpus.read() == []
    assert caplog.text.count("gpus=silent") == 1
    answers.set()
    assert [labels for labels, *_ in wait_for(gpus.read)] == [("0", "Card 9000")]
