"""Prometheus metrics: an Observer that counts, the metrics that models define, and the page at `/metrics`.

Latencies arrive as one list per batch. NumPy counts the latencies of many batches into buckets at once: a histogram
call for every request would cost as much as the rest of the request in the server.
"""

import asyncio
import logging
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from penstock import tracing
from penstock._version import __version__
from penstock.core.contracts import BatchRecord, ModelSnapshot, Observer, ServerSnapshot
from penstock.errors import PenstockError
from penstock.metrics import CONTENT_TYPE
from penstock.serving.observe.history import Totals
from penstock.serving.observe.readings import Work
from penstock.serving.observe.series import SeriesTable
from penstock.serving.observe.system import FurtherMetrics, SystemMetrics
from penstock.serving.observe.text import Family, Histogram, Page
from penstock.tracing import SPAN
from penstock.types import Item, MetricDelta

log = logging.getLogger("penstock.serving")

METRICS_TYPE = CONTENT_TYPE
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PADDING = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
FILL = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MAX_GONE = 100  # unloaded versions whose counters are still shown
FOLDED = 64  # batches of a model that are counted at once: one by one they would take longer than their requests
SHOWN_S = 3600.0  # for this time after the unload
_STATES = ("LOADING", "READY", "IDLE", "FAILED", "DRAINED", "DRAINING")
_CLASSES = {0: "unready", 2: "2xx", 4: "4xx", 5: "5xx"}  # of responses that are shown before the first
WORKER_STATES = ("ready", "died", "failed", "leaking", "replaced", "removed")
_MODEL = ("model", "version")


def _counter(name: str, help: str, *labels: str) -> Family:
    return Family(name, "counter", (*_MODEL, *labels), help)


def _histogram(name: str, help: str) -> Family:
    return Family(name, "histogram", _MODEL, help)


def _gauge(name: str, help: str, *labels: str) -> Family:
    return Family(name, "gauge", (*_MODEL, *labels), help)


_COUNTERS = (
    ("arrived", _counter("penstock_requests_total", "Requests received.")),
    ("ahead", _counter("penstock_batches_ahead_total", "Batches sent to an instance that was still busy.")),
    ("restarts", _counter("penstock_worker_restarts_total", "Workers restarted after a death.")),
)
_BY_LABEL = (
    ("answered", _counter("penstock_answers_total", "Requests that the model answered.", "outcome")),
    ("rejected", _counter("penstock_rejections_total", "Requests that ended without a response.", "reason")),
    ("batches", _counter("penstock_batches_total", "Batches sent to an instance.", "outcome")),
    ("failed", _counter("penstock_item_failures_total", "Items that failed.", "code")),
    ("workers", _counter("penstock_worker_events_total", "Worker lifecycle events.", "state")),
)
_HISTOGRAMS = (
    (
        "latency",
        _histogram("penstock_request_seconds", "Time from arrival to answer of each answered request."),
        SECONDS,
    ),
    (
        "wait",
        _histogram("penstock_queue_seconds", "Time from arrival to dispatch, for each run of a request."),
        SECONDS,
    ),
    ("run", _histogram("penstock_run_seconds", "Time in the worker for each batch."), SECONDS),
    (
        "preprocess",
        _histogram("penstock_preprocess_seconds", "Time for decoding and preprocessing of each batch."),
        SECONDS,
    ),
    ("predict", _histogram("penstock_predict_seconds", "Time in the model for each batch."), SECONDS),
    (
        "postprocess",
        _histogram("penstock_postprocess_seconds", "Time for postprocessing and encoding of each batch."),
        SECONDS,
    ),
    ("rows", _histogram("penstock_batch_rows", "Rows of each batch."), ROWS),
    ("fill", _histogram("penstock_batch_fill_ratio", "Rows of each batch divided by max_batch_size."), FILL),
    ("padding", _histogram("penstock_batch_padding_ratio", "Part of each batch's work that is padding."), PADDING),
)


_GAUGES: tuple[tuple[Family, Callable[[ModelSnapshot], float]], ...] = (
    (_gauge("penstock_requests_in_flight", "Requests queued or running."), lambda m: m.in_flight),
    (_gauge("penstock_queue_requests", "Requests queued."), lambda m: m.status.queue),
    (
        _gauge("penstock_queue_oldest_seconds", "Time for which the oldest queued request has waited."),
        lambda m: m.oldest_s,
    ),
    (_gauge("penstock_queue_rows", "Rows of the queued requests."), lambda m: m.queue_rows),
    (_gauge("penstock_queue_bytes", "Bytes of the queued requests."), lambda m: m.queue_bytes),
    (_gauge("penstock_queue_limit_rows", "Maximum rows in the queue."), lambda m: m.max_queue_rows),
    (_gauge("penstock_batch_limit_rows", "max_batch_size."), lambda m: m.status.max_batch_size),
    (_gauge("penstock_workers", "Desired number of workers."), lambda m: m.status.instances),
    (_gauge("penstock_workers_up", "Workers that are up."), lambda m: m.status.ready_instances),
    (
        _counter("penstock_request_bytes_total", "Bytes of the bodies of requests, with refused ones."),
        lambda m: m.arrived_bytes,
    ),
    (
        _counter("penstock_write_seconds_total", "Time from answer to last sent byte, sampled, summed over responses."),
        lambda m: m.write_s,
    ),
    (_gauge("penstock_preprocess_processes", "Helper processes of the workers that are up."), lambda m: m.helpers),
)
_STATE = _gauge("penstock_model_state", "1 for the current state of a model version, 0 for the others.", "state")
_COST_A = _gauge("penstock_cost_fixed_seconds", "Learned: a of a + b*n seconds for a batch of n rows, once sizes vary.")
_COST_B = _gauge("penstock_cost_row_seconds", "Learned: b of a + b*n seconds for a batch of n rows, once sizes vary.")
_HOLDS = _counter("penstock_holds_total", "Holds of an idle worker that waited for more requests.", "kind")
_HELD = _counter("penstock_held_seconds_total", "Time for which idle workers were held for more requests.")
_PADDED = _counter(
    "penstock_padded_rows_total", "Rows that padding added to batches, beside those of penstock_batch_rows."
)
_TOKENS = _counter("penstock_tokens_total", "Tokens of the batches of a model that pads texts, with padding.")
_PADDED_TOKENS = _counter("penstock_padded_tokens_total", "Tokens that padding added to batches.")
_POOL_USED = Family("penstock_pool_used_bytes", "gauge", (), "Shared memory in use for large payloads.")
_POOL = Family("penstock_pool_capacity_bytes", "gauge", (), "Shared memory reserved for large payloads.")
_BUDGET = Family("penstock_device_budget_bytes", "gauge", ("device",), "Memory that models may use, of `[devices]`.")
_RESIDENT = Family("penstock_device_resident_bytes", "gauge", ("device",), "Memory of the models that are loaded.")
_EVICTIONS = _counter("penstock_evictions_total", "How often the model left memory for another one or unused.")
_CONNECTIONS = Family("penstock_http_connections", "gauge", (), "Open connections of the inference listener.")
_REFUSED = Family(
    "penstock_http_connections_refused_total", "counter", (), "Connections refused because of limits.max_connections."
)
_ANSWERS = Family(
    "penstock_http_requests_total",
    "counter",
    ("status",),
    "Responses of the inference listener by status class, health checks that are not ready apart.",
)
_BUSY = _counter("penstock_busy_seconds_total", "Time in which instances had a batch, summed over the instances.")
_UNSENT = Family(
    "penstock_unsent_bytes", "gauge", ("listener",), "Bytes of responses that wait for clients to read them."
)
_ERRORS = Family("penstock_errors_total", "counter", ("listener", "code"), "Error responses of a listener by code.")
_BUILD = Family("penstock_build_info", "gauge", ("version", "python"), "1, with the versions as labels.")


class _Model:
    """The counters of one model version, and its latencies and batches that the histograms have not counted yet."""

    def __init__(self) -> None:
        self.arrived = 0
        self.ahead = 0
        self.restarts = 0
        self.answered: dict[str, int] = dict.fromkeys(("ok", "failed"), 0)
        self.rejected: dict[str, int] = {"queue_full": 0}
        self.batches: dict[str, int] = dict.fromkeys(("ok", "died", "lost"), 0)
        self.failed: dict[str, int] = {}
        self.workers: dict[str, int] = dict.fromkeys(WORKER_STATES, 0)
        self.down: set[int] = set()  # slots whose worker died and has not restarted
        self.preprocess_s = 0.0  # of the model's own function
        self.histograms = {name: Histogram(bounds) for name, _, bounds in _HISTOGRAMS}
        self.latencies_s: list[float] = []
        self.records: list[BatchRecord] = []

    def fold(self) -> dict[str, Histogram]:
        """The histograms, after counting what has come since the last call."""
        latencies_s, self.latencies_s = self.latencies_s, []
        ran, self.records = [r for r in self.records if r.outcome != "lost"], []  # a lost batch never ran
        stages_s = zip(*(r.stages_s for r in ran if r.stages_s is not None), strict=True)
        new: dict[str, Sequence[float]] = {
            "latency": latencies_s,
            "wait": [wait_s for r in ran for wait_s in r.waits_s],
            "run": [r.run_s for r in ran],
            "rows": [r.rows for r in ran],
            "fill": [r.rows / r.max_batch_size for r in ran],
            "padding": [r.padding for r in ran if r.padding is not None],
            **dict(zip(("preprocess", "predict", "postprocess"), stages_s, strict=False)),  # no stages, no values
        }
        for name, values in new.items():
            self.histograms[name].extend(values)
        self.preprocess_s += sum(r.hooks_s[0] for r in ran if r.hooks_s is not None)
        return self.histograms


K = TypeVar("K", bound=Hashable)


class UnloadedVersions(Generic[K]):
    """Unloaded versions whose metrics are still shown: the last MAX_GONE, each for SHOWN_S. Time is an argument."""

    def __init__(self) -> None:
        self._since_s: dict[K, float] = {}  # oldest first

    def add(self, version: K, now_s: float) -> None:
        self.discard(version)
        self._since_s[version] = now_s

    def discard(self, version: K) -> None:
        """The version is loaded again."""
        self._since_s.pop(version, None)

    def expired(self, now_s: float) -> list[K]:
        """Removes and returns the versions to drop."""
        found = list(self._since_s)[: max(0, len(self._since_s) - MAX_GONE)]
        found += [v for v, since_s in self._since_s.items() if now_s - since_s >= SHOWN_S and v not in found]
        for version in found:
            del self._since_s[version]
        return found


class PrometheusObserver(Observer):
    """Counts events; `scrape()` returns the page. `read` returns the current state and is called for each page."""

    def __init__(
        self,
        read: Callable[[], ServerSnapshot] = ServerSnapshot,
        clock: Callable[[], float] = time.monotonic,
        further: FurtherMetrics | None = None,
    ) -> None:
        self.read = read
        self._clock = clock
        self._models: dict[tuple[str, str], _Model] = {}
        self._unloaded: UnloadedVersions[tuple[str, str]] = UnloadedVersions()
        self._custom = CustomMetrics()
        self.custom = self._custom.of
        self._further = further
        self._system = SystemMetrics(further)
        self._scraping = asyncio.Lock()
        self._next: dict[bool, asyncio.Task[bytes]] = {}  # the pages that have not begun, by `openmetrics`

    def _model(self, model: str, version: str) -> _Model:
        found = self._models.get((model, version))
        if found is None:
            found = self._models[(model, version)] = _Model()
        return found

    # ---- Observer

    def on_arrival(self, model: str, version: str) -> None:
        self._model(model, version).arrived += 1

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        m = self._model(model, version)
        m.answered["ok"] += len(latencies_s) - failed
        m.answered["failed"] += failed
        m.latencies_s += latencies_s

    def on_reject(self, model: str, version: str, reason: str) -> None:
        rejected = self._model(model, version).rejected
        rejected[reason] = rejected.get(reason, 0) + 1

    def on_complete(self, record: BatchRecord) -> None:
        m = self._model(record.model, record.version)
        m.batches[record.outcome] += 1
        m.ahead += record.ahead
        m.records.append(record)
        if len(m.records) >= FOLDED:
            m.fold()

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        failed = self._model(model, version).failed
        failed[error.code] = failed.get(error.code, 0) + 1

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        m = self._model(model, version)
        m.workers[state] = m.workers.get(state, 0) + 1
        if state == "died":
            m.down.add(slot)
        elif state == "ready":
            self._unloaded.discard((model, version))
            m.restarts += slot in m.down
            m.down.discard(slot)
        elif state == "removed":  # another worker may get this slot
            m.down.discard(slot)

    def on_unload(self, model: str, version: str) -> None:
        self._custom.forget(model, version)
        if (found := self._models.get((model, version))) is not None:
            found.down.clear()
            self._unloaded.add((model, version), self._clock())
            self._drop_expired()

    def _drop_expired(self) -> None:
        for key in self._unloaded.expired(self._clock()):
            del self._models[key]

    def on_traced_end(
        self, model: str, version: str, item: Item, arrival_s: float, ended_s: float, outcome: str
    ) -> None:
        if item.trace is not None and outcome in ("ok", "failed"):
            latency = self._model(model, version).histograms["latency"]
            latency.exemplify(ended_s - arrival_s, item.trace.id, time.time())

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        self._custom.add(model, version, deltas)

    def totals(self) -> dict[tuple[str, str], Totals]:
        """The counters of each model version."""
        found = {}
        for key, m in self._models.items():
            histograms = m.fold()
            counts, rows = histograms["rows"].read()
            rejected, failed = sum(m.rejected.values()), m.answered["failed"]
            answered, batches = m.answered["ok"] + failed, counts[-1][1]
            found[key] = Totals(m.arrived, answered, failed, rejected, batches, rows, m.restarts)
        return found

    def work(self) -> dict[tuple[str, str], Work]:
        """The counters of each model version that readings are made of."""
        found = {}
        for key, m in self._models.items():
            counts, sums = {}, {}
            histograms = m.fold()
            for name in ("rows", "run", "preprocess"):
                buckets, sums[name] = histograms[name].read()
                counts[name] = buckets[-1][1]
            found[key] = Work(
                requests=m.arrived,
                answers=sum(m.answered.values()),
                refused=m.rejected["queue_full"],
                memory_failed=m.failed.get("out_of_memory", 0),
                died=m.workers["died"],
                leaking=max(0, m.workers["leaking"] - m.workers["replaced"] - m.workers["died"]),
                batches=counts["rows"],
                rows=sums["rows"],
                run_s=sums["run"],
                prepare_s=sums["preprocess"],
                preprocess_s=m.preprocess_s,
            )
        return found

    # ---- the page

    def render(self) -> bytes:
        """The page, in UTF-8. Blocks while it reads the machine's metrics."""
        now = self.read()
        return self._page(now) + self._system.text(now.models)

    async def scrape(self, accepted: bytes = b"") -> tuple[bytes, str]:
        """The page and its content type; the machine's metrics are read on another thread. It is OpenMetrics, with
        exemplars, while requests are traced and the client has `accepted` that.

        One page is written at a time, and callers that arrive before it begins share it: many would stop the server.
        """
        # Triton's counters have names that OpenMetrics does not allow
        openmetrics = tracing.tracer is not None and b"application/openmetrics-text" in accepted and not self._further
        if openmetrics not in self._next:
            self._next[openmetrics] = asyncio.get_running_loop().create_task(self._scrape(openmetrics))
        return await asyncio.shield(self._next[openmetrics]), OPENMETRICS_TYPE if openmetrics else METRICS_TYPE

    async def _scrape(self, openmetrics: bool) -> bytes:
        async with self._scraping:
            del self._next[openmetrics]
            now = self.read()
            page = self._page(now, openmetrics)
            return page + await self._system.on_thread(now.models, openmetrics)

    def _page(self, now: ServerSnapshot, openmetrics: bool = False) -> bytes:
        """The part without the machine's metrics, written in one step for consistent numbers."""
        self._drop_expired()
        page, models = Page(openmetrics=openmetrics), self._models
        for name, family in _COUNTERS:
            page.write(family, ((key, getattr(m, name)) for key, m in models.items()))
        for name, family in _BY_LABEL:
            page.write(
                family,
                (((*key, label), count) for key, m in models.items() for label, count in getattr(m, name).items()),
            )
        histograms = {key: m.fold() for key, m in models.items()}
        for name, family, _ in _HISTOGRAMS:
            page.write(family, ((key, found[name]) for key, found in histograms.items()))
        _write_gauges(page, now)
        if self._further is not None:
            self._further.write_models(page, now.models)
        self._custom.write(page)
        return page.encode()


def _write_gauges(page: Page, now: ServerSnapshot) -> None:
    """Writes the snapshot. A model whose batches had one size only has no cost samples: a line needs two."""
    for family, value in _GAUGES:
        page.write(family, ((m.key, value(m)) for m in now.models))
    page.write(_STATE, (((*m.key, s), int(m.status.state == s)) for m in now.models for s in _STATES))
    learned = [m for m in now.models if m.scheduler.get("ready") and m.scheduler.get("fitted")]
    page.write(_COST_A, ((m.key, _number(m.scheduler, "a_s")) for m in learned))
    page.write(_COST_B, ((m.key, _number(m.scheduler, "b_s")) for m in learned))
    holds = [(m, m.scheduler.get("holds_by_kind")) for m in now.models]  # a user's own policy may lack it
    page.write(
        _HOLDS,
        (((*m.key, str(k)), float(n)) for m, kinds in holds if isinstance(kinds, Mapping) for k, n in kinds.items()),
    )
    page.write(_BUSY, ((m.key, m.busy_s) for m in now.models))
    page.write(_HELD, ((m.key, _number(m.scheduler, "held_s")) for m in now.models))
    page.write(_PADDED, ((m.key, _number(m.scheduler, "padded_rows")) for m in now.models))
    padding = [m for m in now.models if "sent_tokens" in m.scheduler]
    page.write(
        _TOKENS, ((m.key, sum(_number(m.scheduler, f"{k}_tokens") for k in ("sent", "padded"))) for m in padding)
    )
    page.write(_PADDED_TOKENS, ((m.key, _number(m.scheduler, "padded_tokens")) for m in padding))
    resident = [(m, m.resident) for m in now.models if m.resident is not None]
    page.write(_EVICTIONS, ((m.key, _number(found, "evictions")) for m, found in resident))
    page.write(_BUDGET, (((device,), budget) for device, budget, _ in now.devices))
    page.write(_RESIDENT, (((device,), used) for device, _, used in now.devices))
    page.write(_POOL_USED, [((), now.pool_used_bytes)])
    page.write(_POOL, [((), now.pool_capacity_bytes)])
    if now.http is not None:
        page.write(_CONNECTIONS, [((), now.http.connections)])
        page.write(_REFUSED, [((), now.http.refused)])
        answers = {**dict.fromkeys(_CLASSES, 0), **now.http.answers}
        page.write(_ANSWERS, (((_CLASSES.get(kind) or f"{kind}xx",), n) for kind, n in sorted(answers.items())))
    page.write(_UNSENT, (((name,), found.unsent_bytes) for name, found in now.listeners.items()))
    page.write(_ERRORS, (((name, c), n) for name, found in now.listeners.items() for c, n in found.errors.items()))
    page.write(_BUILD, [((__version__, platform.python_version()), 1)])


def _number(statistics: Mapping[str, Any], name: str) -> float:
    return float(statistics.get(name, 0.0))


class CustomMetrics:
    """The metrics that models define with `penstock.metrics`, received from their workers."""

    def __init__(self) -> None:
        self._table = SeriesTable(SECONDS)
        self.write, self.of = self._table.write, self._table.of

    def add(self, model: str, version: str, deltas: Sequence[MetricDelta]) -> None:
        for d in deltas:
            if d.kind == SPAN:
                continue
            labels = tuple(sorted({**d.labels, "model": model, "version": version}.items()))
            self._table.change(_custom(d.kind, d.name), labels, (d.value,), (model, version))

    def forget(self, model: str, version: str) -> None:
        """Drops the series of a version. A name without series can be used again, also for another kind."""
        self._table.forget((model, version))


@lru_cache(1000)
def _custom(kind: str, name: str) -> Family:
    """A metric that a model defines. `labels` holds the model's name for it: two that become one on the page differ."""
    suffix, shown = {"counter": ("_total", "counter"), "timer": ("_seconds", "histogram")}.get(kind, ("", kind))
    exposed = name if kind == "counter" and name.endswith(suffix) else name + suffix
    return Family(exposed, shown, (name,), f"{kind} of a model")
