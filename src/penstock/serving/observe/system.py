"""CPU, memory and GPU metrics of the machine and of each worker process, read on request.

A GPU driver may take long to start and to answer, so a separate thread reads it.
"""

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from penstock.core.contracts import ModelSnapshot
from penstock.serving.observe.text import Family, Page

log = logging.getLogger("penstock.observe")

GpuReading = tuple[tuple[str, str], float, int, int]

_WORKER = ("model", "version", "instance")
_GPU = ("gpu", "name")
WORKER_MEMORY = Family("penstock_worker_resident_bytes", "gauge", _WORKER, "Resident memory of a worker process.")
WORKER_CPU = Family("penstock_worker_cpu_seconds_total", "counter", _WORKER, "CPU time of a worker process.")
SYSTEM_CPU = Family("penstock_system_cpu_seconds_total", "counter", ("state",), "CPU time of the machine, all cores.")
SYSTEM_CPUS = Family("penstock_system_cpus", "gauge", (), "Cores of the machine.")
SYSTEM_MEMORY = Family("penstock_system_memory_bytes", "gauge", ("kind",), "Memory of the machine.")
GPU_BUSY = Family("penstock_gpu_utilization_ratio", "gauge", _GPU, "Fraction of recent time in which a GPU was busy.")
GPU_USED = Family("penstock_gpu_memory_used_bytes", "gauge", _GPU, "Memory of a GPU in use by any process.")
GPU_MEMORY = Family("penstock_gpu_memory_bytes", "gauge", _GPU, "Total memory of a GPU.")


class SystemMetrics:
    """Reads the metrics. Keeps the process handles and the GPU library open, because opening them is slow."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._gpus: Gpus | None = None
        self._own = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._own)
        self._thread = ThreadPoolExecutor(1, "penstock-system-metrics")

    async def on_thread(self, models: Iterable[ModelSnapshot]) -> bytes:
        """Calls `text` on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.text, models)

    def text(self, models: Iterable[ModelSnapshot]) -> bytes:
        """This part of the page: all of `write`, and the `process_*` metrics of the server process."""
        page = Page()
        self.write(page, models)
        return page.encode() + generate_latest(self._own)

    def write(self, page: Page, models: Iterable[ModelSnapshot]) -> None:
        workers = list(self._workers(models))
        page.write(WORKER_MEMORY, ((labels, memory) for labels, memory, _ in workers))
        page.write(WORKER_CPU, ((labels, cpu) for labels, _, cpu in workers))
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        named = times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        busy = named + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)
        page.write(SYSTEM_CPU, [(("busy",), busy), (("idle",), idle)])
        page.write(SYSTEM_CPUS, [((), psutil.cpu_count() or 1)])
        memory = psutil.virtual_memory()
        page.write(SYSTEM_MEMORY, [(("total",), memory.total), (("available",), memory.available)])
        if self._gpus is None:
            self._gpus = Gpus()
        gpus = self._gpus.read()
        if gpus:
            page.write(GPU_BUSY, [(labels, busy) for labels, busy, _, _ in gpus])
            page.write(GPU_USED, [(labels, used) for labels, _, used, _ in gpus])
            page.write(GPU_MEMORY, [(labels, total) for labels, _, _, total in gpus])

    def _workers(self, models: Iterable[ModelSnapshot]) -> Iterator[tuple[tuple[str, str, str], int, float]]:
        """(labels, resident bytes, CPU seconds) of every worker process."""
        found: dict[int, psutil.Process] = {}
        for m in models:
            for slot, pid in sorted(m.pids.items()):
                with suppress(psutil.Error):  # the process has just ended
                    process = self._processes.get(pid) or psutil.Process(pid)
                    found[pid] = process
                    cpu = process.cpu_times()
                    yield (m.status.name, m.status.version, str(slot)), process.memory_info().rss, cpu.user + cpu.system
        self._processes = found


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

    def read(self) -> list[GpuReading]:
        """((index, name), utilization, used bytes, total bytes) of each GPU; empty while the driver hangs."""
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
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                yield labels, busy, int(memory.used), int(memory.total)
