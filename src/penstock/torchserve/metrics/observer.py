"""The metrics of TorchServe: an Observer that counts them, the page at `/metrics`, and the lines of the log files.

Source: what the log files and the page of TorchServe 0.12.0 hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from msgspec import Struct, field

from penstock.core.contracts import BatchRecord, Observer
from penstock.serving.observe.prometheus import MAX_GONE, PrometheusObserver
from penstock.serving.observe.text import Page
from penstock.torchserve.metrics.declared import Declared, MetricsConfig
from penstock.torchserve.metrics.machine import Measured
from penstock.torchserve.metrics.series import MAX_SERIES, Labels, Owner, SeriesTable, only
from penstock.types import MetricDelta

log = logging.getLogger("penstock.observe")
SERVER_LOG: Final = logging.getLogger("TS_METRICS")
MODEL_LOG: Final = logging.getLogger("MODEL_METRICS")

EVERY_S: Final = 1.0
MAX_TOLD: Final = 50_000  # batches whose metrics wait to be counted
MAX_VALUES: Final = 1_000_000  # of one series between two turns
MAX_DETECTED: Final = 1_000  # metrics that no file declares
_IN_LEGACY_MODE: Final = (
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
)
"""Not in the files when metrics_mode is legacy."""
_AT_ONCE: Final = 64  # batches that are counted before the event loop has its turn
_DIGITS: Final = 3
_HERE: Final = ("Host",)
UNVERSIONED: Final = "default"
"""The version of requests that name none."""
_LINES: Final = 500  # of one record
_BREATH_S: Final = 0.0005


class Counts(Struct, frozen=True):
    """What the server has counted since its start: answers by status // 100, inference requests by model and label."""

    answers: Mapping[int, int] = field(default_factory=dict)
    requests: Mapping[tuple[str, str], int] = field(default_factory=dict)


class PenstockFamilies(PrometheusObserver):
    """Penstock's own metrics, which stand beside those of TorchServe on the page."""

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        own = [d for d in deltas if not d.unit]
        if own:
            super().on_model_metrics(model, version, slot, own)


class _Told(Struct, frozen=True):
    """What models told with one batch that ended at `at`, seconds since 1970."""

    owner: Owner
    deltas: Sequence[MetricDelta]
    at: int


class _Shape(Struct, frozen=True):
    """What all values of one series have in common: `head` and `tail` are those of its lines."""

    declared: Declared
    labels: Labels
    head: str
    tail: str


_Key = tuple[str, tuple[str, ...], Owner | None]  # a metric of the server's, its dimensions but the host, its owner


class TorchServeMetrics(Observer):
    """Keeps what is told as it came; a thread counts it once a second, and writes the log files' lines.

    Counters are written as what they grew by in that second, gauges as they stand at its end; what models tell is a
    line for each value. `counts` is asked for what front-ends count. `mode` is that of metrics_mode.
    """

    def __init__(
        self,
        config: MetricsConfig,
        *,
        host: str,
        mode: str = "log",
        auto_detect: bool = False,
        first_worker: int = 9000,
        counts: Callable[[], Counts] = Counts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.penstock = PenstockFamilies()
        self.counts = counts
        self._config, self._host, self._mode = config, host, mode
        self._auto_detect, self._first_worker, self._clock = auto_detect, first_worker, clock
        # of the loop: what came since the last turn
        self._values: dict[_Key, list[float]] = {}
        self._told: list[_Told | Owner] = []  # an owner: it is gone
        self._lost = 0
        self._up: set[tuple[str, str]] = set()  # model and version
        self._gone: dict[Owner, None] = {}  # whose values are still shown, the longest gone first
        self._counted = Counts()
        self._counting: Future[None] | None = None
        # of the thread
        self._thread = ThreadPoolExecutor(1, "torchserve-metrics")
        self._table = SeriesTable()
        for declared in (*config.server.values(), *config.models.values()):
            self._table.declare(declared)
        self._detected: dict[str, Declared] = {}
        self._shapes: dict[tuple[str, Labels], _Shape] = {}

    # ---- Observer

    def on_served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        for label, wait_s, latency_s in zip(labels, waits_s, latencies_s, strict=True):
            whose = (model, label or version)
            self._keep("ts_inference_latency_microseconds", whose, latency_s * 1e6, ("", *whose))
            self._keep("ts_queue_latency_microseconds", whose, wait_s * 1e6, ("", *whose))
            self._keep("QueueTime", _HERE, wait_s * 1e3)

    def on_complete(self, record: BatchRecord) -> None:
        self._keep("WorkerThreadTime", _HERE, (record.seconds - record.run_s) * 1e3)

    def on_load(self, model: str, version: str, slot: int, seconds: float) -> None:
        self._up.add((model, version))
        for label in (version, UNVERSIONED):
            self._gone.pop(("", model, label), None)
        worker = f"W-{self._first_worker + slot}-{model}_{version}"
        self._keep("WorkerLoadTime", (worker, "Host"), seconds * 1e3, ("", model, version))

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        if len(self._told) < MAX_TOLD:
            self._told.append(_Told((model, version), deltas, int(self._clock())))
        else:
            self._lost += len(deltas)

    def on_unload(self, model: str, version: str) -> None:
        self._told.append((model, version))
        self._up.discard((model, version))
        gone = [version] if any(name == model for name, _ in self._up) else [version, UNVERSIONED]
        for label in gone:
            self._gone.pop(("", model, label), None)
            self._gone["", model, label] = None
        while len(self._gone) > MAX_GONE:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._told.append(oldest)

    def measured(self, values: Sequence[Measured]) -> None:
        """The machine was looked at."""
        for m in values:
            self._keep(m.name, m.dimensions, m.value)

    def _keep(self, name: str, dimensions: tuple[str, ...], value: float, owner: Owner | None = None) -> None:
        key = (name, dimensions, owner)
        kept = self._values.get(key)
        if kept is None:
            self._values[key] = [value]
        elif len(kept) < MAX_VALUES:
            kept.append(value)

    # ---- the page, and the files

    async def scrape(self, names: Sequence[str] = ()) -> bytes:
        """The page in the Prometheus text format, Penstock's own families after TorchServe's; of `names`, if any."""
        self._count()
        page: bytes = await asyncio.get_running_loop().run_in_executor(self._thread, self._page)
        page += await self.penstock.scrape()
        return only(page, names) if names else page

    async def run(self) -> None:
        """Counts and writes once a second, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.turn()
            except Exception:
                log.exception("metrics_not_counted consequence=some_are_missing")

    def turn(self) -> None:
        """Counts what came since the last turn, if anything, and writes it; not while the last turn goes on."""
        if self._counting is None or self._counting.done():
            self._grown()
            if self._values or self._told:
                self._counting = self._count()

    async def close(self) -> None:
        """Writes what there is."""
        await asyncio.wrap_future(self._count())
        self._thread.shutdown(wait=False)

    def _count(self) -> Future[None]:
        self._grown()
        values, self._values = self._values, {}
        told, self._told = self._told, []
        lost, self._lost = self._lost, 0
        if lost:
            log.warning("model_metrics_lost values=%d reason=more_than_can_be_counted", lost)
        return self._thread.submit(self._fold, values, told)

    def _grown(self) -> None:
        before, now = self._counted, self.counts()
        self._counted = now
        for kind, n in now.answers.items():
            if n > before.answers.get(kind, 0):
                self._keep(f"Requests{kind}XX", _HERE, n - before.answers.get(kind, 0))
        for key, n in now.requests.items():
            if n > before.requests.get(key, 0):
                self._keep("ts_inference_requests_total", key, n - before.requests.get(key, 0), ("", *key))

    # ---- what the thread does

    def _page(self) -> bytes:
        page = Page()
        self._table.write(page)
        return page.encode()

    def _fold(self, values: Mapping[_Key, list[float]], told: Sequence[_Told | Owner]) -> None:
        try:
            self._fold_server(values)
            for i in range(0, len(told), _AT_ONCE):
                if i:
                    time.sleep(_BREATH_S)
                self._fold_models(told[i : i + _AT_ONCE])
        except Exception:
            log.exception("metrics_not_counted consequence=some_are_missing")

    def _fold_server(self, values: Mapping[_Key, list[float]]) -> None:
        lines: list[str] = []
        at = int(self._clock())
        for (name, dimensions, owner), found in values.items():
            declared = self._config.server.get(name)
            if declared is None or len(declared.dimensions) != len(dimensions) + 1:
                continue
            labels = tuple(zip(declared.dimensions, (*dimensions, self._host), strict=True))
            self._table.change(declared, labels, found, owner)
            if self._mode == "log" or (self._mode == "legacy" and name not in _IN_LEGACY_MODE):
                value = round(float(sum(found) if declared.kind == "counter" else found[-1]), _DIGITS)
                where = f"|#{_joined(labels[:-1])}|#hostname:{self._host},timestamp:{at}"
                lines.append(_one_line(f"{name}.{declared.unit}:{value}{where}"))
        _write(SERVER_LOG, lines)

    def _fold_models(self, told: Sequence[_Told | Owner]) -> None:
        lines: list[str] = []
        for each in told:
            if isinstance(each, tuple):
                self._table.forget(each)
                continue
            for d in each.deltas:
                shape = self._shape(d) if d.unit else None  # without a unit: one of Penstock's own
                if shape is None:
                    continue
                self._table.change(shape.declared, shape.labels, (d.value,), each.owner)
                lines.append(f"{shape.head}{d.value}{shape.tail}{d.request_id or 'null'},timestamp:{each.at}")
        if self._mode != "prometheus":
            _write(MODEL_LOG, [_one_line(line) for line in lines])

    def _shape(self, d: MetricDelta) -> _Shape | None:
        """None for a metric that no file declares, unless such ones are welcome."""
        told = tuple(d.labels.items())
        found = self._shapes.get((d.name, told))
        if found is not None:
            return found
        declared = self._config.models.get(d.name) or self._detected.get(d.name) or self._detect(d)
        if declared is None:
            return None
        labels = told if "Hostname" in d.labels else (*told, ("Hostname", self._host))
        head, tail = f"{d.name}.{declared.unit}:", f"|#{_joined(told)}|#hostname:{self._host},requestID:"
        if len(self._shapes) >= MAX_SERIES:
            self._shapes.clear()
        shape = self._shapes[d.name, told] = _Shape(declared, labels, head, tail)
        return shape

    def _detect(self, d: MetricDelta) -> Declared | None:
        if not self._auto_detect or len(self._detected) >= MAX_DETECTED:
            return None
        found = self._detected[d.name] = Declared(d.name, d.kind, d.unit, tuple(d.labels))
        log.info("metric_detected name=%r kind=%s unit=%r", d.name, d.kind, d.unit)
        return found


def _write(logger: logging.Logger, lines: Sequence[str]) -> None:
    """A record holds many lines, each of which the file stamps with the time."""
    for i in range(0, len(lines), _LINES):
        logger.info("%s", "\n".join(lines[i : i + _LINES]))


def _joined(labels: Labels) -> str:
    return ",".join([f"{name}:{value}" for name, value in labels])


def _one_line(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
