"""The server's side of a run: its page of metrics before and after, its processes and the GPUs meanwhile.

What is done during the run takes well under a millisecond of the generator's thread, twice a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import psutil

from penstock.errors import PenstockError
from penstock.perf.bench.ask import ask
from penstock.perf.bench.measurement import Gpu, ServerSide
from penstock.perf.bench.page import Page, between, read_page
from penstock.perf.bench.target import Target
from penstock.serving.observe.system import GpuReading, Gpus

EVERY_S: Final = 0.5
ASK_S: Final = 5.0


class Probe:
    """Looks at the server of a target from `start` to `stop`; whatever cannot be seen is left out.

    `memory` is what its processes held together, as (seconds since the start, bytes), twice a second.
    """

    def __init__(self, target: Target) -> None:
        self.memory: list[tuple[float, int]] = []
        self._target = target
        self._gpus = Gpus()
        self._seen: list[list[GpuReading]] = []
        self._looking: asyncio.Future[list[GpuReading]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._before: Page | None = None
        self._processes: list[psutil.Process] = []
        self._cpu_s = self._start_s = 0.0

    async def start(self) -> None:
        """Takes the first look. Nothing raises."""
        self._before = await asyncio.to_thread(self._page)
        if self._target.pids:
            await asyncio.to_thread(self._find)
            first = await asyncio.to_thread(self._gpus.read)
            self._seen = [first] if first else []
        self._cpu_s, self._start_s = _cpu_s(self._processes), time.perf_counter()
        self._look()

    async def stop(self) -> ServerSide | None:
        """What was seen since `start`; None when that is nothing. Only the first call looks."""
        if self._timer is None:
            return None
        self._timer.cancel()
        self._timer = None
        self._note_memory()
        seconds = time.perf_counter() - self._start_s
        if self._looking is not None:
            with suppress(Exception):
                self._seen.append(await self._looking)
        after = await asyncio.to_thread(self._page)
        found = between(self._before, after) if self._before is not None and after is not None else {}
        if self._target.pids:
            await asyncio.to_thread(self._find)
        if self._processes and seconds > 0:
            found["cpu"] = max(0.0, _cpu_s(self._processes) - self._cpu_s) / seconds
        if self.memory:
            found["memory_bytes"] = max(held for _, held in self.memory)
        if self._seen:
            found["gpus"] = _joined(self._seen)
        return ServerSide(**found) if found else None

    # ---- what is looked at

    def _page(self) -> Page | None:
        metrics = self._target.metrics
        if metrics is None:
            return None
        try:
            reply = ask(metrics, "GET", "/metrics", token=self._target.token, timeout_s=ASK_S)
        except PenstockError:
            return None
        return read_page(reply.body.decode(errors="replace"), self._target.model) if reply.ok else None

    def _find(self) -> None:
        """Finds the server's processes. On a thread: it looks at all of the machine's."""
        found = []
        for pid in self._target.pids:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                found += [process, *process.children(recursive=True)]
        self._processes = found

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(EVERY_S, self._look)
        self._note_memory()
        if self._seen and self._looking is None:  # one at a time: a driver may be slow
            self._looking = loop.run_in_executor(None, self._gpus.read)
            self._looking.add_done_callback(self._looked)

    def _looked(self, looking: asyncio.Future[list[GpuReading]]) -> None:
        if self._timer is not None:
            self._looking = None
            if not looking.cancelled() and looking.exception() is None:
                self._seen.append(looking.result())

    def _note_memory(self) -> None:
        held = 0
        for process in self._processes:
            with suppress(psutil.Error):  # it has just ended
                held += process.memory_info().rss
        if held:
            self.memory.append((time.perf_counter() - self._start_s, held))


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Of all of them so far, with what they have outlived: a worker that died counts under its parent."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _joined(seen: list[list[GpuReading]]) -> list[Gpu]:
    """The looks at each GPU as one."""
    by_gpu: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for readings in seen:
        for labels, busy, used, total in readings:
            by_gpu.setdefault(labels, []).append((busy, used, total))
    return [
        Gpu(
            name=f"{index} {name}",
            utilization=sum(busy for busy, _, _ in looks) / len(looks),
            memory_bytes=max(used for _, used, _ in looks),
            total_bytes=looks[-1][2],
        )
        for (index, name), looks in by_gpu.items()
    ]
