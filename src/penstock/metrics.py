"""A model's own counters, gauges and timers: `penstock.metrics.counter("faces", 3)` inside `predict`.

Callable from any thread. Changes are sent to the server process with the answer of the batch, for a pipeline ten times
a second.
"""

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from penstock.errors import plain
from penstock.plugins import load_object
from penstock.types import MetricDelta

MAX_TIMINGS = 10_000  # timings between two batches, and as many records; further ones are dropped
MAX_SERIES = 1_000

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `page`
_EMBEDDED = "penstock.serving.observe.embedded"
_RESERVED = ("penstock_", "process_")
_good_names: set[str] = set()

_Key = tuple[str, str, tuple[tuple[str, str], ...]]


def _check_name(name: str) -> None:
    """Raises ValueError for a name that would make the whole metrics page invalid."""
    if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
        raise ValueError(
            f"a metric cannot be named {name!r}: expected letters, digits and _, not first a digit, and not the"
            f" beginnings {' and '.join(_RESERVED)}, which are taken"
        )
    if len(_good_names) < MAX_SERIES:
        _good_names.add(name)


class Registry:
    """The changes since the last `drain`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[_Key, float] = {}
        self._timings: list[tuple[_Key, float]] = []
        self._records: list[MetricDelta] = []

    def add(self, kind: str, name: str, value: float, labels: dict[str, object]) -> None:
        if name not in _good_names:
            _check_name(name)
        # accepts NumPy numbers and any text, and converts them to values that can be sent
        key = (kind, name, tuple(sorted((k, plain(v)) for k, v in labels.items())))
        value = float(value)
        with self._lock:
            if kind == "timer":
                if len(self._timings) < MAX_TIMINGS:
                    self._timings.append((key, value))
            elif key in self._values or len(self._values) < MAX_SERIES:
                self._values[key] = value + (self._values.get(key, 0.0) if kind == "counter" else 0.0)

    def add_timings(self, key: _Key, values: Iterable[float]) -> None:
        with self._lock:
            room = MAX_TIMINGS - len(self._timings)
            self._timings += [(key, value) for value in islice(values, max(0, room))]

    def record(self, delta: MetricDelta) -> None:
        with self._lock:
            if len(self._records) < MAX_TIMINGS:
                self._records.append(delta)

    def drain(self) -> list[MetricDelta]:
        if not self._values and not self._timings and not self._records:
            return []
        with self._lock:
            taken = [*self._values.items(), *self._timings]
            records = self._records
            self._values = {}
            self._timings = []
            self._records = []
        return [MetricDelta(kind, name, value, dict(labels)) for (kind, name, labels), value in taken] + records


_shared = Registry()
_own = threading.local()  # `registry`: Registry, or None on a thread whose changes other threads report


def own_registry(registry: Registry | None = None) -> Registry:
    """Gives the calling thread a separate registry, for one of several models in this process, or that of another
    thread of the same model."""
    _own.registry = found = registry or Registry()
    return found


def count_for_all() -> None:
    """Undoes `own_registry`: metrics of the calling thread are reported with the answers of other threads."""
    if hasattr(_own, "registry"):
        _own.registry = None


def _current() -> Registry:
    return getattr(_own, "registry", None) or _shared


def counter(name: str, value: float = 1, **labels: object) -> None:
    """Adds `value` (>= 0) to a counter. Raises ValueError, also for an invalid Prometheus name."""
    if not value >= 0:  # also refuses NaN
        raise ValueError(f"counter '{name}' can only grow, found {value}: use a gauge")
    _current().add("counter", name, value, labels)


def gauge(name: str, value: float, **labels: object) -> None:
    """Sets a gauge."""
    _current().add("gauge", name, value, labels)


def record(
    kind: str, name: str, value: float, labels: Mapping[str, object], unit: str = "", request_id: str = ""
) -> None:
    """Reports one change unchanged and unmerged, for metrics with the names and units of another system.

    `kind` is "counter", "gauge" or "histogram". The receiver checks the name. Raises ValueError for a bad value.
    """
    texts = {plain(k): plain(v) for k, v in labels.items()}
    _current().record(MetricDelta(kind, plain(name), float(value), texts, plain(unit), plain(request_id)))


@contextmanager
def timer(name: str, **labels: object) -> Iterator[None]:
    """Measures the time of a `with` block, in seconds."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _current().add("timer", name, time.perf_counter() - start, labels)


def timings(name: str, seconds: Iterable[float], **labels: object) -> None:
    """Adds many measurements of one timer at once. Raises ValueError."""
    _check_name(name)
    key = ("timer", name, tuple(sorted((k, plain(v)) for k, v in labels.items())))
    _current().add_timings(key, seconds)


# ---- the metrics of models in this program


def page(target: object) -> bytes:
    """The metrics of a Streamer, an Engine, a Portal or an InferenceApp in the Prometheus text format, for a route of
    your own. Counters begin with the first call for this target. Raises TypeError for other objects.

    For an Engine and its app, call it on their event loop.
    """
    return load_object(f"{_EMBEDDED}:page")(target)  # type: ignore[no-any-return, operator]


def asgi(target: object) -> Any:
    """An ASGI application that serves the `page` of a target: `app.mount("/metrics", penstock.metrics.asgi(engine))`.

    Counters begin with this call, or once the target has an event loop. Raises TypeError as `page`.
    """
    return load_object(f"{_EMBEDDED}:MetricsApp")(target)  # type: ignore[operator]


def drain() -> list[MetricDelta] | None:
    """The changes since the last call, by this thread's model and by threads without a model."""
    own: Registry | None = getattr(_own, "registry", _shared)
    if own is None:
        return None
    changes = own.drain()
    if own is not _shared:
        changes += _shared.drain()
    return changes or None
