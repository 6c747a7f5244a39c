"""The server's side of a run: its metrics page before and after, its processes and the GPUs during the run.

Sampling during the run takes well under a millisecond of the generator's thread, twice a second.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import psutil
from msgspec import Struct, field

from penstock.core.readings import GpuReading, Gpus, cpu_s, resident_bytes
from penstock.errors import PenstockError
from penstock.perf.bench.figures import enough
from penstock.perf.bench.measurement import Gpu, ServerStats
from penstock.perf.bench.server import fetch
from penstock.perf.bench.target import Target
from penstock.serving.observe.text import samples

EVERY_S: Final = 0.5  # a sample costs well under a millisecond; a short run still gets several
FETCH_S: Final = 5.0  # before and after the run, so it may take its time

Buckets = dict[float, float]

_HISTOGRAMS: Final = {
    "penstock_queue_seconds": "queue",
    "penstock_run_seconds": "worker",
    "penstock_preprocess_seconds": "preprocess",
    "penstock_predict_seconds": "predict",
    "penstock_postprocess_seconds": "postprocess",
    "penstock_batch_rows": "rows",
}
_PLAIN: Final = {
    "ts_queue_latency_microseconds": "ts_queue_us",
    "ts_inference_requests_total": "ts_requests",
    "QueueTime": "ts_last_queue_ms",
    "PredictionTime": "ts_last_run_ms",
}
# TorchServe reports the last value of these, not a sum.
_GAUGES: Final = ("ts_last_queue_ms", "ts_last_run_ms")
_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


# ---- metrics pages of Penstock and TorchServe


class MetricsPage(Struct, frozen=True):
    """Sums over a model's versions: `sums` by name ("queue_sum", "queue_count"), buckets by upper bound."""

    sums: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)


def read_page(text: str, model: str) -> MetricsPage:
    """The page's samples for `model`, or for all models if that is ""; other lines are ignored."""
    sums: dict[str, float] = defaultdict(float)
    buckets: dict[str, Buckets] = defaultdict(lambda: defaultdict(float))
    for name, labels, number in samples(text, model):
        base, _, kind = name.rpartition("_")
        histogram, plain = _HISTOGRAMS.get(base), _PLAIN.get(name)
        if histogram is None and plain is None:
            continue
        if plain is not None:
            sums[plain] = number if plain in _GAUGES else sums[plain] + number
        elif kind == "bucket":
            buckets[str(histogram)][float(labels.get("le", "inf"))] += number
        else:
            sums[f"{histogram}_{kind}"] += number
    return MetricsPage(dict(sums), {name: dict(found) for name, found in buckets.items()})


def between(before: MetricsPage, after: MetricsPage) -> dict[str, Any]:
    """The fields of ServerStats for the time between two pages; empty if the server restarted in between."""
    change = {name: value - before.sums.get(name, 0.0) for name, value in after.sums.items() if name not in _GAUGES}
    if any(value < 0 for value in change.values()):
        return {}
    found: dict[str, Any] = {
        "queue_s": _mean(change, "queue"),
        "preprocess_s": _mean(change, "preprocess"),
        "run_s": _mean(change, "predict"),
        "postprocess_s": _mean(change, "postprocess"),
        "mean_batch": _mean(change, "rows"),
        "queue_at_s": _quantiles(_new(before, after, "queue")),
        "worker_at_s": _quantiles(_new(before, after, "worker")),
        "batches": _by_rows(_new(before, after, "rows")),
    }
    if found["run_s"] is None:  # the model does not report its stages
        found["run_s"] = _mean(change, "worker")
    return _torchserve(change, after.sums) | {name: value for name, value in found.items() if value not in (None, {})}


def _torchserve(change: dict[str, float], last: dict[str, float]) -> dict[str, Any]:
    """TorchServe sums queue times in one metrics mode only, and reports the handler time of the last batch only."""
    found = {}
    if change.get("ts_requests") and "ts_queue_us" in change:
        found["queue_s"] = change["ts_queue_us"] / change["ts_requests"] / 1e6
    elif "ts_last_queue_ms" in last:
        found["queue_s"] = last["ts_last_queue_ms"] / 1e3
    if "ts_last_run_ms" in last:
        found["run_s"] = last["ts_last_run_ms"] / 1e3
    return found


def _mean(change: dict[str, float], name: str) -> float | None:
    total, count = change.get(f"{name}_sum"), change.get(f"{name}_count")
    return total / count if total is not None and count else None


def _new(before: MetricsPage, after: MetricsPage, name: str) -> Buckets:
    """The number of new values in each bucket, by ascending upper bound."""
    old = before.buckets.get(name, {})
    up_to = sorted((bound, count - old.get(bound, 0.0)) for bound, count in after.buckets.get(name, {}).items())
    return {bound: count - less for (_, less), (bound, count) in pairwise([(0.0, 0.0), *up_to])}


def _quantiles(new: Buckets) -> dict[str, float]:
    """The quantiles with enough values."""
    total = sum(new.values())
    return {name: _quantile(new, q * total) for name, q in _QUANTILES.items() if enough(int(total), q)}


def _quantile(new: Buckets, rank: float) -> float:
    """Linear interpolation within the bucket; the last finite bound for the bucket without an upper one."""
    low = below = 0.0
    for bound, count in new.items():
        if count and below + count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / count
        below += count
        low = bound
    return low


def _by_rows(new: Buckets) -> dict[str, int]:
    """Rows -> batches; batches above the last finite bound are listed under twice that bound."""
    largest = max((bound for bound in new if not math.isinf(bound)), default=0.0)
    return {f"{2 * largest if math.isinf(bound) else bound:g}": int(count) for bound, count in new.items() if count}


# ---- the probe


class ServerProbe:
    """Observes a target's server from `start` to `stop`; whatever is not visible is left out.

    `memory` is the sum over its processes, as (seconds since the start, bytes), twice a second.
    """

    def __init__(self, target: Target) -> None:
        self.memory: list[tuple[float, int]] = []
        self._target = target
        self._gpus = Gpus()
        self._readings: list[list[GpuReading]] = []
        self._reading: asyncio.Future[list[GpuReading]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._before: MetricsPage | None = None
        self._processes: list[psutil.Process] = []
        self._cpu_s = self._start_s = 0.0

    async def start(self) -> None:
        """Takes the first sample. Never raises."""
        self._before = await asyncio.to_thread(self._page)
        if self._target.pids:
            await asyncio.to_thread(self._find_processes)
            first = await asyncio.to_thread(self._gpus.read)
            self._readings = [first] if first else []
        self._cpu_s, self._start_s = _cpu_s(self._processes), time.perf_counter()
        self._sample()

    async def stop(self) -> ServerStats | None:
        """The observations since `start`; None without any, and on a second call."""
        if self._timer is None:
            return None
        self._timer.cancel()
        self._timer = None
        self._sample_memory()
        seconds = time.perf_counter() - self._start_s
        if self._reading is not None:
            with suppress(Exception):
                self._readings.append(await self._reading)
        after = await asyncio.to_thread(self._page)
        found = between(self._before, after) if self._before is not None and after is not None else {}
        if self._target.pids:
            await asyncio.to_thread(self._find_processes)
        if self._processes and seconds > 0:
            found["cpu"] = max(0.0, _cpu_s(self._processes) - self._cpu_s) / seconds
        if self.memory:
            found["memory_bytes"] = max(total for _, total in self.memory)
        if self._readings:
            found["gpus"] = _merge_gpus(self._readings)
        return ServerStats(**found) if found else None

    def _page(self) -> MetricsPage | None:
        if self._target.metrics is None:
            return None
        try:
            response = fetch(self._target.metrics, "GET", "/metrics", token=self._target.token, timeout_s=FETCH_S)
        except PenstockError:
            return None
        return read_page(response.body.decode(errors="replace"), self._target.model) if response.ok else None

    def _find_processes(self) -> None:
        """Finds the server's processes; in a thread, because it scans all processes of the machine."""
        found = []
        for pid in self._target.pids:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                found += [process, *process.children(recursive=True)]
        self._processes = found

    def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(EVERY_S, self._sample)
        self._sample_memory()
        if self._readings and self._reading is None:  # one at a time: a driver may be slow
            self._reading = loop.run_in_executor(None, self._gpus.read)
            self._reading.add_done_callback(self._on_gpus_read)

    def _on_gpus_read(self, reading: asyncio.Future[list[GpuReading]]) -> None:
        if self._timer is not None:
            self._reading = None
            if not reading.cancelled() and reading.exception() is None:
                self._readings.append(reading.result())

    def _sample_memory(self) -> None:
        if total := sum(map(resident_bytes, self._processes)):
            self.memory.append((time.perf_counter() - self._start_s, total))


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    """The CPU time of the processes and of their ended children, so that a dead worker still counts."""
    return sum(cpu_s(process, children=True) for process in processes)


def _merge_gpus(readings: list[list[GpuReading]]) -> list[Gpu]:
    by_gpu: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for reading in readings:
        for labels, busy, used, total in reading:
            by_gpu.setdefault(labels, []).append((busy, used, total))
    return [
        Gpu(
            name=f"{index} {name}",
            utilization=sum(busy for busy, _, _ in samples) / len(samples),
            memory_bytes=max(used for _, used, _ in samples),
            total_bytes=samples[-1][2],
        )
        for (index, name), samples in by_gpu.items()
    ]
