"""Prometheus metrics: an Observer that counts, and the page at `/metrics`.

Latencies come as lists, one list a batch; they are counted into buckets by numpy, many at a time, because a histogram
call for every request would cost as much as the request's own way through the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.contracts import BatchRecord, Observer, ServerSnapshot
from penstock.errors import PenstockError
from penstock.serving.observe.gauges import write_gauges
from penstock.serving.observe.own import SECONDS, OwnMetrics
from penstock.serving.observe.system import SystemMetrics
from penstock.serving.observe.text import Family, Histogram, Page
from penstock.types import MetricDelta

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FILL = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MAX_GONE = 500  # unloaded versions whose counters are still shown
_STATES = ("ready", "died", "failed", "removed")
_MODEL = ("model", "version")


class _Model:
    """The numbers of one model version."""

    def __init__(self) -> None:
        self.arrived = 0
        self.ahead = 0
        self.restarts = 0
        self.answered: dict[str, int] = dict.fromkeys(("ok", "failed"), 0)
        self.rejected: dict[str, int] = {}
        self.batches: dict[str, int] = dict.fromkeys(("ok", "died", "lost"), 0)
        self.failed: dict[str, int] = {}
        self.workers: dict[str, int] = dict.fromkeys(_STATES, 0)
        self.down: set[int] = set()  # slots whose worker died and is not back
        self.latency = Histogram(SECONDS)
        self.wait = Histogram(SECONDS)
        self.run = Histogram(SECONDS)
        self.preprocess = Histogram(SECONDS)
        self.predict = Histogram(SECONDS)
        self.postprocess = Histogram(SECONDS)
        self.rows = Histogram(ROWS)
        self.fill = Histogram(FILL)


def _counter(name: str, help: str, *labels: str) -> Family:
    return Family(name, "counter", (*_MODEL, *labels), help)


def _histogram(name: str, help: str) -> Family:
    return Family(name, "histogram", _MODEL, help)


_COUNTERS = (
    ("arrived", _counter("penstock_requests_total", "Requests received.")),
    ("ahead", _counter("penstock_batches_ahead_total", "Batches sent to an instance that was still busy.")),
    ("restarts", _counter("penstock_worker_restarts_total", "Workers restarted after a death.")),
)
_BY_LABEL = (
    ("answered", _counter("penstock_answers_total", "Requests that the model answered.", "outcome")),
    ("rejected", _counter("penstock_rejections_total", "Requests that ended without an answer.", "reason")),
    ("batches", _counter("penstock_batches_total", "Batches sent to an instance.", "outcome")),
    ("failed", _counter("penstock_item_failures_total", "Items that failed.", "code")),
    ("workers", _counter("penstock_worker_events_total", "Worker lifecycle events.", "state")),
)
_HISTOGRAMS = (
    ("latency", _histogram("penstock_request_seconds", "Time from arrival to answer of each answered request.")),
    ("wait", _histogram("penstock_queue_seconds", "Time from arrival to dispatch, for each run of a request.")),
    ("run", _histogram("penstock_run_seconds", "Time in the worker for each batch.")),
    ("preprocess", _histogram("penstock_preprocess_seconds", "Time for decoding and preprocessing of each batch.")),
    ("predict", _histogram("penstock_predict_seconds", "Time in the model for each batch.")),
    ("postprocess", _histogram("penstock_postprocess_seconds", "Time for postprocessing and encoding of each batch.")),
    ("rows", _histogram("penstock_batch_rows", "Rows of each batch.")),
    ("fill", _histogram("penstock_batch_fill_ratio", "Rows of each batch divided by max_batch_size.")),
)


class PrometheusObserver(Observer):
    """Collects; `scrape()` gives the Prometheus text. `read` is asked for what stands now when it is made."""

    def __init__(self, read: Callable[[], ServerSnapshot] = ServerSnapshot) -> None:
        self.read = read
        self._models: dict[tuple[str, str], _Model] = {}
        self._gone: dict[tuple[str, str], None] = {}  # those of `_models` that were unloaded, the longest ago first
        self._own = OwnMetrics()
        self._system = SystemMetrics()

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
        m.latency.extend(latencies_s)

    def on_reject(self, model: str, version: str, reason: str) -> None:
        rejected = self._model(model, version).rejected
        rejected[reason] = rejected.get(reason, 0) + 1

    def on_complete(self, record: BatchRecord) -> None:
        m = self._model(record.model, record.version)
        m.batches[record.outcome] += 1
        m.ahead += record.ahead
        if record.outcome != "lost":  # that one was never run
            m.wait.extend(record.waits_s)
            m.run.add(record.run_s)
            m.rows.add(record.rows)
            m.fill.add(record.rows / record.max_batch_size)
            if record.stages_s is not None:
                preprocess_s, predict_s, postprocess_s = record.stages_s
                m.preprocess.add(preprocess_s)
                m.predict.add(predict_s)
                m.postprocess.add(postprocess_s)

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        failed = self._model(model, version).failed
        failed[error.code] = failed.get(error.code, 0) + 1

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        m = self._model(model, version)
        m.workers[state] = m.workers.get(state, 0) + 1
        if state == "died":
            m.down.add(slot)
        elif state == "ready":
            self._gone.pop((model, version), None)
            m.restarts += slot in m.down
            m.down.discard(slot)
        elif state == "removed":  # its number may be given to another
            m.down.discard(slot)

    def on_unload(self, model: str, version: str) -> None:
        self._own.forget(model, version)
        key = (model, version)
        if key not in self._models:
            return
        self._models[key].down.clear()
        self._gone.pop(key, None)
        self._gone[key] = None
        if len(self._gone) > MAX_GONE:
            oldest = next(iter(self._gone))
            del self._gone[oldest], self._models[oldest]

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        self._own.add(model, version, deltas)

    # ---- the page

    def render(self) -> bytes:
        """The page, UTF-8."""
        now = self.read()
        return self._page(now) + self._system.text(now.models)

    async def scrape(self) -> bytes:
        """What `render` gives; the event loop goes on while the machine is looked at."""
        now = self.read()
        page = self._page(now)
        return page + await self._system.on_thread(now.models)

    def _page(self, now: ServerSnapshot) -> bytes:
        """What this process knows by itself. In one go: its numbers agree with each other."""
        page, models = Page(), self._models
        for name, family in _COUNTERS:
            page.write(family, ((key, getattr(m, name)) for key, m in models.items()))
        for name, family in _BY_LABEL:
            page.write(
                family,
                (((*key, label), count) for key, m in models.items() for label, count in getattr(m, name).items()),
            )
        for name, family in _HISTOGRAMS:
            page.write_histograms(family, ((key, getattr(m, name)) for key, m in models.items()))
        write_gauges(page, now)
        self._own.write(page)
        return page.encode()
