"""The server's side of a run: its page of metrics before and after, its processes and the GPUs meanwhile.

What is done during the run takes well under a millisecond of the generator's thread, twice a second.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import psutil
from msgspec import Struct, field

from penstock.errors import PenstockError
from penstock.perf.bench.figures import enough
from penstock.perf.bench.measurement import Gpu, ServerStats
from penstock.perf.bench.server import fetch
from penstock.perf.bench.target import Target
from penstock.serving.observe.system import GpuReading, Gpus

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
_GAUGES: Final = ("ts_last_queue_ms", "ts_last_run_ms")
_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?[ ]+([^\s#]+)", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MODEL: Final = ("model", "model_name", "ModelName")
_AT: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class MetricsPage(Struct, frozen=True):
    """Sums over the versions of a model: `sums` by name ("queue_sum", "queue_count"), buckets by upper bound."""

    sums: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)


def read_page(text: str, model: str) -> MetricsPage:
    """What the page says of `model`, of all models when that is ""; lines that are no samples are passed over."""
    sums: dict[str, float] = defaultdict(float)
    buckets: dict[str, Buckets] = defaultdict(lambda: defaultdict(float))
    for name, given, value in _SAMPLE.findall(text):
        base, _, kind = name.rpartition("_")
        known = _HISTOGRAMS.get(base)
        plain = _PLAIN.get(name)
        if known is None and plain is None:
            continue
        labels = dict(_LABEL.findall(given))
        if model and next((labels[key] for key in _MODEL if key in labels), model) != model:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if plain is not None:
            sums[plain] = number if plain in _GAUGES else sums[plain] + number
        elif kind == "bucket":
            buckets[str(known)][float(labels.get("le", "inf"))] += number
        else:
            sums[f"{known}_{kind}"] += number
    return MetricsPage(dict(sums), {name: dict(found) for name, found in buckets.items()})


def between(before: MetricsPage, after: MetricsPage) -> dict[str, Any]:
    """The fields of ServerStats that the time between two pages tells. Nothing when the server began anew meanwhile."""
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
    if found["run_s"] is None:  # a model that does not tell its stages
        found["run_s"] = _mean(change, "worker")
    return {
        **_torchserve(change, after.sums),
        **{name: value for name, value in found.items() if value not in (None, {})},
    }


def _torchserve(change: dict[str, float], last: dict[str, float]) -> dict[str, Any]:
    """Waits are counted in one of its modes only; of the handler's time there is never more than that of one batch."""
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
    """How many values came into each bucket, by its upper bound, in order."""
    old = before.buckets.get(name, {})
    up_to = sorted((bound, count - old.get(bound, 0.0)) for bound, count in after.buckets.get(name, {}).items())
    return {bound: count - less for (_, less), (bound, count) in pairwise([(0.0, 0.0), *up_to])}


def _quantiles(new: Buckets) -> dict[str, float]:
    """Those that there are values enough for."""
    total = sum(new.values())
    return {name: _quantile(new, share * total) for name, share in _AT.items() if enough(int(total), share)}


def _quantile(new: Buckets, rank: float) -> float:
    """Between the bounds of its bucket, as if the values in it lay evenly; the last bound where there is no next."""
    low = below = 0.0
    for bound, count in new.items():
        if count and below + count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / count
        below += count
        low = bound
    return low


def _by_rows(new: Buckets) -> dict[str, int]:
    """Rows -> batches. Those beyond the last bound stand under twice that bound."""
    largest = max((bound for bound in new if not math.isinf(bound)), default=0.0)
    return {f"{2 * largest if math.isinf(bound) else bound:g}": int(count) for bound, count in new.items() if count}


EVERY_S: Final = 0.5
ASK_S: Final = 5.0


class ServerProbe:
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
        self._before: MetricsPage | None = None
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

    async def stop(self) -> ServerStats | None:
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
        return ServerStats(**found) if found else None

    # ---- what is looked at

    def _page(self) -> MetricsPage | None:
        metrics = self._target.metrics
        if metrics is None:
            return None
        try:
            reply = fetch(metrics, "GET", "/metrics", token=self._target.token, timeout_s=ASK_S)
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
