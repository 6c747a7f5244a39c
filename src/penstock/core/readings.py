"""Readings of processes and GPUs: memory, CPU time, utilization.

Metrics pages, upkeep, TorchServe's descriptions and the bench share them. Only server processes load this module,
because it loads psutil.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import psutil

log = logging.getLogger("penstock.core")

GpuReading = tuple[tuple[str, str], float, int, int]


class GpuPower(NamedTuple):
    """Power draw and limit of a GPU in watts, and its energy in joules since the first query; None if not reported."""

    uuid: str
    draw_w: float | None
    limit_w: float | None
    energy_j: float | None


def resident_bytes(process: int | psutil.Process) -> int:
    """Resident memory of a process; 0 once it has ended."""
    try:
        return int((psutil.Process(process) if isinstance(process, int) else process).memory_info().rss)
    except psutil.Error:
        return 0


def private_bytes(pid: int) -> int:
    """Memory that a process shares with no other; 0 once it has ended."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def cpu_s(process: psutil.Process, children: bool = False) -> float:
    """CPU time of a process, with `children` also of those that have ended; 0.0 once it has ended itself."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    own = times.user + times.system
    return float(own + times.children_user + times.children_system if children else own)


def thread_times(pid: int) -> dict[int, tuple[float, float]]:
    """(CPU time, time of waiting for a core) of each thread of a process; empty once it has ended, or where the system
    does not count."""
    found = {}
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                ran_ns, waited_ns, _ = map(int, file.read().split())
                found[int(thread)] = (ran_ns / 1e9, waited_ns / 1e9)
    return found


class Gpus:
    """The NVIDIA GPUs of this machine; none without nvidia-ml-py.

    A driver may hang, so a daemon thread queries it. A reader waits at most `limit_s` for it, and no new query starts
    before the last one has ended.
    """

    def __init__(self, limit_s: float = 5.0) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._handles: list[tuple[tuple[str, str], Any]] = []
        self._opened = False
        self._query: threading.Thread | None = None
        self._result: list[GpuReading] = []
        self._first_mj: dict[str, int] = {}  # energy at the first query, by index
        self._seen_us: dict[str, int] = {}  # time of the newest sample of utilization, by index
        self.power: dict[str, GpuPower] = {}  # by index, of the last query

    def read(self) -> list[GpuReading]:
        """((index, name), utilization, used bytes, total bytes) of each GPU; empty while the driver hangs.

        The utilization is the fraction of the time since the last query, at most since the driver's oldest sample.
        """
        with self._lock:
            if self._query is not None and self._query.is_alive():
                return []
            self._query = threading.Thread(target=self._run_query, name="penstock-gpus", daemon=True)
            self._query.start()
            self._query.join(self._limit_s)
            if not self._query.is_alive():
                return self._result
        log.warning("gpus=silent limit_s=%g consequence=no_metrics_of_gpus_until_the_driver_answers", self._limit_s)
        return []

    def _run_query(self) -> None:
        if not self._opened:
            self._open()
            self._opened = True
        self._result = list(self._read())

    def _open(self) -> None:
        with suppress(Exception):  # the library, the driver or the GPU is missing
            pynvml = import_module("pynvml")
            self._nvml = pynvml
            pynvml.nvmlInit()
            for i in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(i)
                name = pynvml.nvmlDeviceGetName(handle)
                self._handles.append(((str(i), name.decode() if isinstance(name, bytes) else name), handle))

    def _read(self) -> Iterator[GpuReading]:
        for labels, handle in self._handles:
            with suppress(Exception):  # a failed GPU must not hide the others
                busy = self._read_utilization(labels[0], handle)
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                self.power[labels[0]] = self._read_power(labels[0], handle)
                yield labels, busy, int(memory.used), int(memory.total)

    def _read_utilization(self, index: str, handle: Any) -> float:
        """The average of the driver's samples since the last query; its present reading without one.

        The present reading alone covers a sixth of a second to a second: it says nothing of a load before.
        """
        seen_us = self._seen_us.get(index, 0)
        with suppress(Exception):  # a GPU or a driver may keep none, or there is no new one
            _, samples = self._nvml.nvmlDeviceGetSamples(handle, self._nvml.NVML_GPU_UTILIZATION_SAMPLES, seen_us)
            new = [(sample.timeStamp, sample.sampleValue.uiVal) for sample in samples if sample.timeStamp > seen_us]
            self._seen_us[index] = max(new)[0]
            return float(sum(percent for _, percent in new) / len(new) / 100)
        return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    def _read_power(self, index: str, handle: Any) -> GpuPower:
        found: list[Any] = [None] * 4
        for i, name in enumerate(("UUID", "PowerUsage", "PowerManagementLimit", "TotalEnergyConsumption")):
            with suppress(Exception):  # a GPU or a driver may lack one
                found[i] = getattr(self._nvml, f"nvmlDeviceGet{name}")(handle)
        uuid, draw_mw, limit_mw, energy_mj = found
        if energy_mj is not None:
            energy_mj -= self._first_mj.setdefault(index, energy_mj)
        text = uuid.decode() if isinstance(uuid, bytes) else uuid or index
        return GpuPower(text, *(None if value is None else value / 1e3 for value in (draw_mw, limit_mw, energy_mj)))
