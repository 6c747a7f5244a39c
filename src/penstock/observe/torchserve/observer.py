"""The metrics of TorchServe: an Observer that counts them, the page at `/metrics`, and the lines of the log files.

Source: what the log files and the page of TorchServe 0.12.0 hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from msgspec import Struct, field

from penstock.observe.base import BatchRecord, Observer
from penstock.observe.prometheus import PrometheusObserver
from penstock.observe.text import Page
from penstock.observe.torchserve.declared import Declared, MetricsConfig
from penstock.observe.torchserve.machine import Measured
from penstock.observe.torchserve.series import Labels, SeriesTable, only
from penstock.types import MetricDelta

log = logging.getLogger("penstock.observe")
SERVER_LOG: Final = logging.getLogger("TS_METRICS")
MODEL_LOG: Final = logging.getLogger("MODEL_METRICS")

EVERY_S: Final = 1.0
MAX_EVENTS: Final = 100_000  # that wait to be counted
MAX_DETECTED: Final = 1_000  # metrics that no file declares
_IN_LEGACY_MODE: Final = (
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
)
"""Not in the files when metrics_mode is legacy."""
_AT_ONCE: Final = 64  # events that are counted before the event loop has its turn
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
        self._events: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._lost = 0
        self._counted = Counts()
        self._detected: dict[str, Declared] = {}
        self._table = SeriesTable()
        for declared in (*config.server.values(), *config.models.values()):
            self._table.declare(declared)
        self._server_lines: dict[tuple[Declared, Labels], float] = {}
        self._model_lines: list[str] = []
        self._thread = ThreadPoolExecutor(1, "torchserve-metrics")
        self._counting: Future[None] | None = None

    # ---- Observer

    def on_served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        self._keep(self._served, model, version, labels, waits_s, latencies_s)

    def on_complete(self, record: BatchRecord) -> None:
        self._keep(self._completed, record.seconds - record.run_s)

    def on_load(self, model: str, version: str, slot: int, seconds: float) -> None:
        self._keep(self._loaded, f"W-{self._first_worker + slot}-{model}_{version}", seconds)

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        self._keep(self._told, (model, version), deltas, int(self._clock()))

    def on_unload(self, model: str, version: str) -> None:
        self._keep(self._table.forget, (model, version))

    def measured(self, values: Sequence[Measured]) -> None:
        """The machine was looked at."""
        self._keep(self._measured, values)

    def _keep(self, count: Callable[..., None], *what: Any) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append((count, what))
        else:
            self._lost += 1

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
            self.turn()

    def turn(self) -> None:
        """Counts what came since the last turn, and writes it; nothing while the last turn goes on."""
        if self._counting is None or self._counting.done():
            self._counting = self._count()

    async def close(self) -> None:
        """Writes what there is."""
        await asyncio.wrap_future(self._count())
        self._thread.shutdown(wait=False)

    def _count(self) -> Future[None]:
        events, self._events = self._events, []
        lost, self._lost = self._lost, 0
        if lost:
            log.warning("metrics_lost events=%d consequence=not_counted reason=more_than_can_be_counted", lost)
        return self._thread.submit(self._fold, events, self.counts())

    # ---- what the thread does

    def _page(self) -> bytes:
        page = Page()
        self._table.write(page)
        return page.encode()

    def _fold(self, events: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], counts: Counts) -> None:
        try:
            self._grown(counts)
            for i, (count, what) in enumerate(events, 1):
                count(*what)
                if i % _AT_ONCE == 0:
                    self._write_models()
                    time.sleep(_BREATH_S)
            self._write_server()
            self._write_models()
        except Exception:
            log.exception("metrics_not_counted events=%d", len(events))

    def _grown(self, counts: Counts) -> None:
        before, self._counted = self._counted, counts
        for kind, n in counts.answers.items():
            if n > before.answers.get(kind, 0):
                self._tell(f"Requests{kind}XX", (), n - before.answers.get(kind, 0))
        for key, n in counts.requests.items():
            if n > before.requests.get(key, 0):
                self._tell("ts_inference_requests_total", key, n - before.requests.get(key, 0))

    def _served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        for label, wait_s, latency_s in zip(labels, waits_s, latencies_s, strict=True):
            whose = (model, label or version)
            self._tell("ts_inference_latency_microseconds", whose, round(latency_s * 1e6, 3))
            self._tell("ts_queue_latency_microseconds", whose, round(wait_s * 1e6, 3))
        self._tell("QueueTime", ("Host",), round(waits_s[-1] * 1e3, 3))

    def _completed(self, seconds: float) -> None:
        self._tell("WorkerThreadTime", ("Host",), round(seconds * 1e3, 3))

    def _loaded(self, worker: str, seconds: float) -> None:
        self._tell("WorkerLoadTime", (worker, "Host"), round(seconds * 1e3, 3))

    def _measured(self, values: Sequence[Measured]) -> None:
        for m in values:
            self._tell(m.name, m.dimensions, m.value)

    def _tell(self, name: str, dimensions: tuple[str, ...], value: float) -> None:
        """A value of the server's; the host is the last of its dimensions."""
        declared = self._config.server.get(name)
        if declared is None:
            return
        if len(declared.dimensions) == 2 and not dimensions:
            dimensions = ("Host",)
        values = (*dimensions, self._host)
        if len(values) != len(declared.dimensions):
            return
        labels = tuple(zip(declared.dimensions, values, strict=True))
        self._table.change(declared, labels, float(value))
        if self._mode == "log" or (self._mode == "legacy" and name not in _IN_LEGACY_MODE):
            key = (declared, labels)
            before = self._server_lines.get(key, 0.0) if declared.kind == "counter" else 0.0
            self._server_lines[key] = before + value

    def _told(self, owner: tuple[str, str], deltas: Sequence[MetricDelta], at: int) -> None:
        """Values of a model's, of a batch that ended at `at`, seconds since 1970."""
        for d in deltas:
            if not d.unit:  # one of Penstock's own
                continue
            declared = self._config.models.get(d.name) or self._detected.get(d.name) or self._detect(d)
            if declared is None:
                continue
            labels = tuple(d.labels.items())
            own = labels if "Hostname" in d.labels else (*labels, ("Hostname", self._host))
            self._table.change(declared, own, d.value, owner)
            if self._mode != "prometheus":
                line = (
                    f"{d.name}.{declared.unit}:{d.value}|#{_joined(labels)}|#hostname:{self._host},"
                    f"requestID:{d.request_id or 'null'},timestamp:{at}"
                )
                self._model_lines.append(line if line.isprintable() else _one_line(line))

    def _detect(self, d: MetricDelta) -> Declared | None:
        if not self._auto_detect or len(self._detected) >= MAX_DETECTED:
            return None
        found = self._detected[d.name] = Declared(d.name, d.kind, d.unit, tuple(d.labels))
        log.info("metric_detected name=%r kind=%s unit=%r", d.name, d.kind, d.unit)
        return found

    def _write_server(self) -> None:
        lines, self._server_lines = self._server_lines, {}
        at = int(self._clock())
        _write(
            SERVER_LOG,
            [
                f"{d.name}.{d.unit}:{value}|#{_joined(labels[:-1])}|#hostname:{self._host},timestamp:{at}"
                for (d, labels), value in lines.items()
            ],
        )

    def _write_models(self) -> None:
        lines, self._model_lines = self._model_lines, []
        _write(MODEL_LOG, lines)


def _write(logger: logging.Logger, lines: Sequence[str]) -> None:
    """A record holds many lines, each of which the file stamps with the time."""
    for i in range(0, len(lines), _LINES):
        logger.info("%s", "\n".join(lines[i : i + _LINES]))


def _joined(labels: Labels) -> str:
    return ",".join([f"{name}:{value}" for name, value in labels])


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
