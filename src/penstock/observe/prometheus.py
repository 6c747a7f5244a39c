"""Prometheus metrics of models, batches and workers: an Observer, and a collector that renders it.

Latencies come as lists, one list a batch; they are counted into buckets by numpy, many at a time, because a histogram
call for every request would cost as much as the request's own way through the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.errors import PenstockError
from penstock.observe.base import BatchRecord, Observer
from penstock.types import MetricDelta, ModelStatus

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_FOLD = 4096
_STATES = ("ready", "died", "failed")


class _Histogram:
    """Counts of values by bucket; values wait in a list until there are many, or until they are looked at."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.asarray(bounds, dtype=np.float64)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._new: list[float] = []

    def extend(self, values: Sequence[float]) -> None:
        self._new.extend(values)
        if len(self._new) >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        values, self._new = np.asarray(self._new, dtype=np.float64), []
        places = np.searchsorted(self._bounds, values, side="left")  # Prometheus: a bucket holds values <= its bound
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum())

    def family(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative (bound, count) pairs, and the sum."""
        self._fold()
        names = [f"{b:g}" for b in self._bounds] + ["+Inf"]
        return list(zip(names, np.cumsum(self._counts).tolist(), strict=True)), self._sum


class _Model:
    """The numbers of one model version."""

    def __init__(self) -> None:
        self.arrived = 0
        self.answered = 0
        self.batches = 0
        self.rejected: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.workers: dict[str, int] = dict.fromkeys(_STATES, 0)
        self.latency = _Histogram(SECONDS)
        self.wait = _Histogram(SECONDS)
        self.run = _Histogram(SECONDS)
        self.rows = _Histogram(ROWS)


_HISTOGRAMS = (
    ("latency", "penstock_request_seconds", "Arrival to answer of each request that was run."),
    ("wait", "penstock_queue_seconds", "Arrival to dispatch of each request that was run."),
    ("run", "penstock_run_seconds", "The worker's own time on each batch."),
    ("rows", "penstock_batch_rows", "Rows of each batch."),
)


class PrometheusObserver(Observer):
    """Collects; `render()` gives the Prometheus text. `statuses` is asked for gauges when it is rendered."""

    def __init__(self, statuses: Callable[[], Iterable[ModelStatus]] = tuple) -> None:
        self.statuses = statuses
        self._models: dict[tuple[str, str], _Model] = {}
        self._own: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
        self._timers: dict[tuple[str, tuple[tuple[str, str], ...]], _Histogram] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _model(self, model: str, version: str) -> _Model:
        found = self._models.get((model, version))
        if found is None:
            found = self._models[(model, version)] = _Model()
        return found

    # ---- Observer

    def on_arrival(self, model: str, version: str) -> None:
        self._model(model, version).arrived += 1

    def on_reject(self, model: str, version: str, code: str) -> None:
        rejected = self._model(model, version).rejected
        rejected[code] = rejected.get(code, 0) + 1

    def on_complete(self, record: BatchRecord) -> None:
        m = self._model(record.model, record.version)
        m.batches += 1
        m.answered += len(record.latencies_s)
        m.latency.extend(record.latencies_s)
        m.wait.extend(record.waits_s)
        m.run.extend((record.run_s,))
        m.rows.extend((record.rows,))

    def on_error(self, model: str, version: str, error: PenstockError) -> None:
        failed = self._model(model, version).failed
        failed[error.code] = failed.get(error.code, 0) + 1

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        self._model(model, version).workers[state] += 1

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        for d in deltas:
            labels = tuple(sorted({**d.labels, "model": model, "version": version}.items()))
            if d.kind == "timer":
                self._timers.setdefault((d.name, labels), _Histogram(SECONDS)).extend((d.value,))
            elif d.kind == "gauge":
                self._own[("gauge", d.name, labels)] = d.value
            else:
                key = ("counter", d.name, labels)
                self._own[key] = self._own.get(key, 0.0) + d.value

    # ---- prometheus_client

    def collect(self) -> Iterable[Metric]:
        names = ("model", "version")
        requests = CounterMetricFamily("penstock_requests", "Requests that were queued.", labels=names)
        answered = CounterMetricFamily("penstock_answers", "Requests that were run and answered.", labels=names)
        batches = CounterMetricFamily("penstock_batches", "Batches that were run.", labels=names)
        rejected = CounterMetricFamily(
            "penstock_rejections", "Requests that ended without being run.", labels=(*names, "reason")
        )
        failed = CounterMetricFamily("penstock_item_failures", "Items that failed.", labels=(*names, "code"))
        workers = CounterMetricFamily("penstock_worker_events", "Workers that came and went.", labels=(*names, "state"))
        for key, m in self._models.items():
            requests.add_metric(key, m.arrived)
            answered.add_metric(key, m.answered)
            batches.add_metric(key, m.batches)
            for family, values in ((rejected, m.rejected), (failed, m.failed), (workers, m.workers)):
                for label, value in values.items():
                    family.add_metric((*key, label), value)
        yield from (requests, answered, batches, rejected, failed, workers)
        for attribute, name, text in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=names)
            for key, m in self._models.items():
                histogram.add_metric(key, *getattr(m, attribute).family())
            yield histogram
        yield from self._gauges()
        yield from self._own_metrics()

    def _gauges(self) -> Iterable[Metric]:
        names = ("model", "version")
        queue = GaugeMetricFamily("penstock_queue_requests", "Requests that wait now.", labels=names)
        up = GaugeMetricFamily("penstock_workers_up", "Workers that can take a batch.", labels=names)
        for status in self.statuses():
            queue.add_metric((status.name, status.version), status.queue)
            up.add_metric((status.name, status.version), status.ready_instances)
        yield from (queue, up)

    def _own_metrics(self) -> Iterable[Metric]:
        """What models counted through `penstock.metrics`; samples of one name may have different labels."""
        families: dict[str, Metric] = {}
        for (kind, name, labels), value in self._own.items():
            family = families.setdefault(f"{kind} {name}", Metric(name, f"{kind} of a model", kind))
            family.add_sample(f"{name}_total" if kind == "counter" else name, dict(labels), value)
        for (name, labels), timer in self._timers.items():
            full = f"{name}_seconds"
            family = families.setdefault(f"timer {name}", Metric(full, "timer of a model", "histogram"))
            counts, total = timer.family()
            for bound, count in counts:
                family.add_sample(f"{full}_bucket", {**dict(labels), "le": bound}, count)
            family.add_sample(f"{full}_count", dict(labels), counts[-1][1])
            family.add_sample(f"{full}_sum", dict(labels), total)
        yield from families.values()
