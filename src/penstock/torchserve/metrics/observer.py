"""The metrics of TorchServe: an Observer that collects them, the page `/metrics`, and the lines of the log files.

Source: the log files and the page of TorchServe 0.12.0.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from msgspec import Struct, field

from penstock.core.contracts import BatchRecord, Observer
from penstock.serving.observe.prometheus import PrometheusObserver, UnloadedVersions
from penstock.serving.observe.series import MAX_SERIES, Labels, Owner, SeriesTable
from penstock.serving.observe.text import Page
from penstock.torchserve.metrics.families import BOUNDS, MetricDefinition, MetricsConfig, filter_page
from penstock.torchserve.metrics.system import SystemMetric
from penstock.tracing import SPAN
from penstock.types import MetricDelta
from penstock.values import printable

log = logging.getLogger("penstock.torchserve")
SERVER_LOG: Final = logging.getLogger("TS_METRICS")
MODEL_LOG: Final = logging.getLogger("MODEL_METRICS")
CONSOLE_LOG: Final = logging.getLogger("METRICS_CONSOLE")
"""Prints every value on stdout. Its records have `worker`, and in `metrics` the name of TorchServe's logger."""
CONSOLE_LOG.setLevel(logging.CRITICAL + 1)  # until the server's logs turn it on

FLUSH_S: Final = 1.0  # the files' timestamps are whole seconds
MAX_BATCHES: Final = 50_000  # batches whose metrics wait for the thread
MAX_VALUES: Final = 1_000_000  # of one series between two flushes
MAX_DETECTED: Final = 1_000  # metrics without a definition
UNVERSIONED: Final = "default"
"""The version label of requests without a version."""
_NOT_IN_LEGACY_FILES: Final = (
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
)
_COUNTS: Final = ("Requests2XX", "Requests4XX", "Requests5XX", "ts_inference_requests_total")
_CHUNK: Final = 64  # batches that the thread counts before the event loop gets the GIL
_PAUSE_S: Final = 0.0005  # enough for the event loop to take the GIL
_DIGITS: Final = 3  # times are in ms and µs
_LINES: Final = 500  # of one record, some 75 KB
_HOST: Final = ("Host",)


class FrontendCounts(Struct, frozen=True):
    """Responses since the start, by status // 100; requests since the last reading, by model and version label."""

    responses: Mapping[int, int] = field(default_factory=dict)
    requests: Mapping[tuple[str, str], int] = field(default_factory=dict)


class MetricsOptions(Struct, frozen=True, kw_only=True):
    """The properties of a server that its metrics need; `mode` is metrics_mode, `first_worker` initial_worker_port."""

    config: MetricsConfig
    host: str
    mode: str = "log"
    auto_detect: bool = False
    first_worker: int = 9000
    clock: Callable[[], float] = time.time


class PenstockMetrics(PrometheusObserver):
    """Penstock's own metrics, which `/metrics` shows next to TorchServe's."""

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        own = [d for d in deltas if not d.unit]
        if own:
            super().on_model_metrics(model, version, slot, own)


class _ModelBatch(Struct, frozen=True):
    """The model metrics of one batch of the worker `slot` that ended at `at`, in seconds since 1970."""

    owner: Owner
    slot: int
    deltas: Sequence[MetricDelta]
    at: int


class _Series(Struct, frozen=True):
    """What the values of one series share; `head` and `tail` are the constant parts of its lines."""

    definition: MetricDefinition
    labels: Labels
    head: str
    tail: str


_Key = tuple[str, tuple[str, ...], Owner | None]  # a server metric, its dimensions without the host, its owner


class TorchServeMetrics(Observer):
    """Collects events on the event loop; once a second a thread counts them and writes the log files.

    The files have the growth of counters in that second, gauges at its end, and a line for each value of a model
    metric. Stdout has a line for each value of every metric, as TorchServe prints them. `counts` returns the totals of
    the listeners.
    """

    def __init__(self, options: MetricsOptions, counts: Callable[[], FrontendCounts] = FrontendCounts) -> None:
        self.penstock = PenstockMetrics()
        self.counts = counts
        self._first_worker, self._clock = options.first_worker, options.clock
        self._values: dict[_Key, list[float]] = {}  # since the last flush, as are the batches
        self._batches: list[_ModelBatch | Owner] = []  # an owner: its series are to be dropped
        self._lost = 0
        self._up: set[tuple[str, str]] = set()  # model and version
        self._unloaded: UnloadedVersions[Owner] = UnloadedVersions()
        self._last_responses: Mapping[int, int] = {}
        self._flushing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "torchserve-metrics")
        self._writer = _MetricsWriter(options)

    # ---- Observer

    def on_served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        for label, wait_s, latency_s in zip(labels, waits_s, latencies_s, strict=True):
            target = (model, label or version)
            self._add("ts_inference_latency_microseconds", target, latency_s * 1e6, ("", *target))
            self._add("ts_queue_latency_microseconds", target, wait_s * 1e6, ("", *target))
            self._add("QueueTime", _HOST, wait_s * 1e3)

    def on_complete(self, record: BatchRecord) -> None:
        self._add("WorkerThreadTime", _HOST, (record.seconds - record.run_s) * 1e3)

    def on_load(self, model: str, version: str, slot: int, seconds: float) -> None:
        self._up.add((model, version))
        for label in (version, UNVERSIONED):
            self._unloaded.discard(("", model, label))
        worker = f"W-{self._first_worker + slot}-{model}_{version}"
        self._add("WorkerLoadTime", (worker, "Host"), seconds * 1e3, ("", model, version))

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        if len(self._batches) < MAX_BATCHES:
            self._batches.append(_ModelBatch((model, version), slot, deltas, int(self._clock())))
        else:
            self._lost += len(deltas)

    def on_unload(self, model: str, version: str) -> None:
        self._batches.append((model, version))
        self._up.discard((model, version))
        gone = [version] if any(name == model for name, _ in self._up) else [version, UNVERSIONED]
        for label in gone:
            self._unloaded.add(("", model, label), self._clock())
        self._batches += self._unloaded.expired(self._clock())

    def measured(self, values: Sequence[SystemMetric]) -> None:
        for m in values:
            self._add(m.name, m.dimensions, m.value)

    def _add(self, name: str, dimensions: tuple[str, ...], value: float, owner: Owner | None = None) -> None:
        key = (name, dimensions, owner)
        values = self._values.get(key)
        if values is None:
            self._values[key] = [value]
        elif len(values) < MAX_VALUES:
            values.append(value)

    # ---- the page and the files

    async def scrape(self, names: Sequence[str] = ()) -> bytes:
        """The page in the Prometheus text format, TorchServe's metrics first; only `names` if there are any."""
        self._flush()
        page: bytes = await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.page)
        page += (await self.penstock.scrape())[0]
        return filter_page(page, names) if names else page

    async def run(self) -> None:
        """Counts and writes once a second, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                self.flush_if_idle()
            except Exception:
                log.exception("metrics_not_counted consequence=some_are_missing")

    def flush_if_idle(self) -> bool:
        """Flushes new events; False if there are none or the last flush is still in progress."""
        if self._flushing is not None and not self._flushing.done():
            return False
        self._add_counts()
        if not self._values and not self._batches:
            return False
        self._flushing = self._flush()
        return True

    async def close(self) -> None:
        await asyncio.wrap_future(self._flush())
        self._thread.shutdown(wait=False)

    def _flush(self) -> Future[None]:
        self._add_counts()
        values, self._values = self._values, {}
        batches, self._batches = self._batches, []
        lost, self._lost = self._lost, 0
        if lost:
            log.warning("model_metrics_lost values=%d reason=more_than_can_be_counted", lost)
        return self._thread.submit(self._writer.write, values, batches)

    def _add_counts(self) -> None:
        before, now = self._last_responses, self.counts()
        self._last_responses = now.responses
        for kind, n in now.responses.items():
            if n > before.get(kind, 0):
                self._add(f"Requests{kind or 5}XX", _HOST, n - before.get(kind, 0))
        for key, n in now.requests.items():
            self._add("ts_inference_requests_total", key, n, ("", *key))
        self._batches += self._unloaded.expired(self._clock())


class _MetricsWriter:
    """Counts events into series and writes them to the log files. Used on the thread."""

    def __init__(self, options: MetricsOptions) -> None:
        self._options, self._config, self._host = options, options.config, options.host
        self._table = SeriesTable(BOUNDS)
        for definition in (*self._config.server.values(), *self._config.models.values()):
            self._table.declare(definition)
        self._detected: dict[str, MetricDefinition] = {}
        self._series: dict[tuple[str, Labels], _Series] = {}

    def page(self) -> bytes:
        """TorchServe's part of the page."""
        page = Page(end=",")
        self._table.write(page)
        return page.encode()

    def write(self, values: Mapping[_Key, list[float]], batches: Sequence[_ModelBatch | Owner]) -> None:
        """Counts and logs; pauses between chunks of batches, so that the event loop keeps running."""
        try:
            self._write_server(values)
            for i in range(0, len(batches), _CHUNK):
                if i:
                    time.sleep(_PAUSE_S)
                self._write_models(batches[i : i + _CHUNK])
        except Exception:
            log.exception("metrics_not_counted consequence=some_are_missing")

    def _write_server(self, values: Mapping[_Key, list[float]]) -> None:
        lines: list[str] = []
        at, mode = int(self._options.clock()), self._options.mode
        for (name, dimensions, owner), found in values.items():
            definition = self._config.server.get(name)
            if definition is None or len(definition.dimensions) != len(dimensions) + 1:
                continue
            labels = tuple(zip(definition.dimensions, (*dimensions, self._host), strict=True))
            self._table.change(definition, labels, found, owner)
            if mode == "log" or (mode == "legacy" and name not in _NOT_IN_LEGACY_FILES):
                value = round(float(sum(found) if definition.kind == "counter" else found[-1]), _DIGITS)
                head = printable(f"{name}.{definition.unit}:")
                tail = printable(f"|#{_joined(labels[:-1])}|#hostname:{self._host},timestamp:{at}")
                lines.append(f"{head}{value}{tail}")
                if CONSOLE_LOG.isEnabledFor(logging.INFO):
                    _print_values(name, head, found, tail)
        _log_lines(SERVER_LOG, lines)

    def _write_models(self, batches: Sequence[_ModelBatch | Owner]) -> None:
        lines: list[str] = []
        printed: dict[str, list[str]] = {}  # by worker
        for batch in batches:
            if isinstance(batch, tuple):
                self._table.forget(batch)
                continue
            worker = f"W-{self._options.first_worker + batch.slot}-{'_'.join(batch.owner)}-stdout"
            own = printed.setdefault(worker, [])
            for d in batch.deltas:
                # Penstock's own metrics have no unit
                series = self._series_of(d) if d.unit and d.kind != SPAN else None
                if series is None:
                    continue
                self._table.change(series.definition, series.labels, (d.value,), batch.owner)
                line = f"{series.head}{d.value}{series.tail}{d.request_id or 'null'},timestamp:{batch.at}"
                lines.append(printable(line))
                own.append(lines[-1])
        if self._options.mode != "prometheus":
            _log_lines(MODEL_LOG, lines)
            for worker, own in printed.items():
                _log_lines(CONSOLE_LOG, own, worker=worker, metrics=MODEL_LOG.name)

    def _series_of(self, d: MetricDelta) -> _Series | None:
        """None for a metric without a definition, unless auto_detect is on."""
        own_labels = tuple(d.labels.items())
        found = self._series.get((d.name, own_labels))
        if found is not None:
            return found
        definition = self._config.models.get(d.name) or self._detected.get(d.name) or self._detect(d)
        if definition is None:
            return None
        labels = own_labels if "Hostname" in d.labels else (*own_labels, ("Hostname", self._host))
        head, tail = f"{d.name}.{definition.unit}:", f"|#{_joined(own_labels)}|#hostname:{self._host},requestID:"
        if len(self._series) >= MAX_SERIES:
            self._series.clear()
        series = self._series[d.name, own_labels] = _Series(definition, labels, head, tail)
        return series

    def _detect(self, d: MetricDelta) -> MetricDefinition | None:
        if not self._options.auto_detect or len(self._detected) >= MAX_DETECTED:
            return None
        found = self._detected[d.name] = MetricDefinition(d.name, d.kind, d.unit, tuple(d.labels))
        log.info("metric_detected name=%r kind=%s unit=%r", d.name, d.kind, d.unit)
        return found


def _log_lines(logger: logging.Logger, lines: Sequence[str], **extra: str) -> None:
    """Logs many lines per record; the formatter stamps each with the time."""
    for i in range(0, len(lines), _LINES):
        logger.info("%s", "\n".join(lines[i : i + _LINES]), extra=extra)


def _print_values(name: str, head: str, values: Sequence[float], tail: str) -> None:
    """Prints a line for each value, with pauses, so that the event loop keeps running."""
    extra = {"worker": "main", "metrics": SERVER_LOG.name}
    if name in _COUNTS:
        _log_lines(CONSOLE_LOG, [f"{head}1.0{tail}"] * int(sum(values)), **extra)
        return
    for i in range(0, len(values), _LINES):
        if i:
            time.sleep(_PAUSE_S)
        lines = [f"{head}{round(value, _DIGITS)}{tail}" for value in values[i : i + _LINES]]
        _log_lines(CONSOLE_LOG, lines, **extra)


def _joined(labels: Labels) -> str:
    return ",".join([f"{name}:{value}" for name, value in labels])
