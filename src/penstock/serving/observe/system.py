"""CPU, memory and GPUs: of the machine, and of each worker process. Looked at when somebody asks, never before.

On a thread of its own: the driver of a GPU may take long to start and to answer, and requests are not to wait for that.
"""

from __future__ import annotations

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
    """Holds what would be costly to open for each look: the processes, and the GPU's library."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._gpus: Gpus | None = None
        self._own = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._own)
        self._thread = ThreadPoolExecutor(1, "penstock-system-metrics")

    async def on_thread(self, models: Iterable[ModelSnapshot]) -> bytes:
        """What `text` gives; the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.text, models)

    def text(self, models: Iterable[ModelSnapshot]) -> bytes:
        """This part of the page: all of `write`, and the `process_*` metrics of this process."""
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
        """(labels, resident bytes, CPU seconds) of every worker that is a process of its own."""
        seen: dict[int, psutil.Process] = {}
        for m in models:
            for slot, pid in sorted(m.pids.items()):
                with suppress(psutil.Error):  # it has just ended
                    process = self._processes.get(pid) or psutil.Process(pid)
                    seen[pid] = process
                    cpu = process.cpu_times()
                    yield (m.status.name, m.status.version, str(slot)), process.memory_info().rss, cpu.user + cpu.system
        self._processes = seen


class Gpus:
    """The NVIDIA GPUs of this machine, if nvidia-ml-py is installed and there are any.

    A driver may hang for ever: it is asked on a thread of its own that nobody waits for longer than `limit_s`, and not
    asked again before it has answered.
    """

    def __init__(self, limit_s: float = 5.0) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._handles: list[tuple[tuple[str, str], Any]] = []
        self._opened = False
        self._asked: threading.Thread | None = None
        self._answer: list[GpuReading] = []

    def read(self) -> list[GpuReading]:
        """((index, name), busy share, used bytes, bytes) of each; none while the driver does not answer."""
        with self._lock:
            if self._asked is not None and self._asked.is_alive():
                return []
            self._asked = threading.Thread(target=self._ask, name="penstock-gpus", daemon=True)
            self._asked.start()
            self._asked.join(self._limit_s)
            if not self._asked.is_alive():
                return self._answer
        log.warning("gpus=silent limit_s=%g consequence=no_metrics_of_gpus_until_the_driver_answers", self._limit_s)
        return []

    def _ask(self) -> None:
        if not self._opened:
            self._open()
            self._opened = True
        self._answer = list(self._read())

    def _open(self) -> None:
        with suppress(Exception):  # no library, no driver, no GPU: all the same
            pynvml = import_module("pynvml")
            self._nvml = pynvml
            pynvml.nvmlInit()
            for i in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(i)
                name = pynvml.nvmlDeviceGetName(handle)
                self._handles.append(((str(i), name.decode() if isinstance(name, bytes) else name), handle))

    def _read(self) -> Iterator[GpuReading]:
        for labels, handle in self._handles:
            with suppress(Exception):  # it fell off the bus: the others are still there
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                yield labels, busy, int(memory.used), int(memory.total)
