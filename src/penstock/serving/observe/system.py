"""CPU, memory and GPU metrics of the machine and of each worker process, read on request in a thread."""

import asyncio
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import psutil
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_of

from penstock.core.contracts import ModelSnapshot
from penstock.core.os_threads import usable_cores
from penstock.core.readings import GpuPower, GpuReading, Gpus, cpu_s, resident_bytes, thread_times
from penstock.serving.observe.readings import Machine
from penstock.serving.observe.text import Family, Page

_WORKER = ("model", "version", "instance")
_GPU = ("gpu", "name")
WORKER_MEMORY = Family("penstock_worker_resident_bytes", "gauge", _WORKER, "Resident memory of a worker process.")
WORKER_CPU = Family("penstock_worker_cpu_seconds_total", "counter", _WORKER, "CPU time of a worker process.")
SYSTEM_CPU = Family("penstock_system_cpu_seconds_total", "counter", ("state",), "CPU time of the machine, all cores.")
SYSTEM_CPUS = Family("penstock_system_cpus", "gauge", (), "Cores of the machine.")
SYSTEM_MEMORY = Family("penstock_system_memory_bytes", "gauge", ("kind",), "Memory of the machine.")
GPU_BUSY = Family(
    "penstock_gpu_utilization_ratio",
    "gauge",
    _GPU,
    "Fraction of the time since the last scrape in which a GPU was busy.",
)
GPU_USED = Family("penstock_gpu_memory_used_bytes", "gauge", _GPU, "Memory of a GPU in use by any process.")
GPU_MEMORY = Family("penstock_gpu_memory_bytes", "gauge", _GPU, "Total memory of a GPU.")


class FurtherMetrics(Protocol):
    """The metrics that a page has in addition, under the names of another server."""

    def write_models(self, page: Page, models: Iterable[ModelSnapshot]) -> None: ...

    def write_machine(self, page: Page, gpus: Sequence[tuple[GpuReading, GpuPower]]) -> None:
        """Runs on the thread that reads the machine."""


class SystemMetrics:
    """Reads the metrics. Keeps the process handles and the GPU library open, because opening them is slow."""

    def __init__(self, further: FurtherMetrics | None = None) -> None:
        self._further = further
        self._processes: dict[int, psutil.Process] = {}
        self._gpus = Gpus()
        self._own = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._own)
        self._thread = ThreadPoolExecutor(1, "penstock-system-metrics")

    async def on_thread(self, models: Iterable[ModelSnapshot], openmetrics: bool = False) -> bytes:
        """Calls `text` on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.text, models, openmetrics)

    def text(self, models: Iterable[ModelSnapshot], openmetrics: bool = False) -> bytes:
        """This part of the page, its end: all of `write`, and the `process_*` metrics of the server process."""
        page = Page(openmetrics=openmetrics)
        self.write(page, models)
        own = openmetrics_of if openmetrics else generate_latest
        return page.encode() + own(self._own)

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
        gpus = self._gpus.read()
        if gpus:
            page.write(GPU_BUSY, [(labels, busy) for labels, busy, _, _ in gpus])
            page.write(GPU_USED, [(labels, used) for labels, _, used, _ in gpus])
            page.write(GPU_MEMORY, [(labels, total) for labels, _, _, total in gpus])
        if self._further is not None:
            self._further.write_machine(page, [(gpu, self._gpus.power[gpu[0][0]]) for gpu in gpus])

    def _workers(self, models: Iterable[ModelSnapshot]) -> Iterator[tuple[tuple[str, str, str], int, float]]:
        """(labels, resident bytes, CPU seconds) of every worker process."""
        found: dict[int, psutil.Process] = {}
        for m in models:
            for slot, pid in sorted(m.pids.items()):
                with suppress(psutil.Error):  # the process has just ended
                    process = self._processes.get(pid) or psutil.Process(pid)
                    found[pid] = process
                    if memory := resident_bytes(process):
                        yield (*m.key, str(slot)), memory, cpu_s(process)
        self._processes = found


class MachineReader:
    """Reads what the machine does for the processes of a server. Made on the thread of the event loop."""

    def __init__(self) -> None:
        self._loop = threading.get_native_id()
        self._gpus = Gpus()

    def read(self, pids: Collection[int], gpus: bool = False) -> Machine:
        """The machine now. Blocks: for milliseconds, with `gpus` as long as the driver."""
        times = psutil.cpu_times()
        own = thread_times(os.getpid())
        return Machine(
            cores=usable_cores(),
            idle_s=times.idle + getattr(times, "iowait", 0.0),
            threads={pid: own if pid == os.getpid() else thread_times(pid) for pid in pids},
            loop=own.get(self._loop, (0.0, 0.0)),
            gpus={index: busy for (index, _), busy, _, _ in self._gpus.read()} if gpus else {},
        )
