"""TorchServe's metric families: their definitions, built in or from a metrics.yaml, and their values on `/metrics`.

Users choose names, kinds and labels. A metric that would break the page is left out, which is logged once.
Source: `ts/configs/metrics.yaml` and `docs/metrics.md` of TorchServe 0.12.0.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from penstock.config.load import load_yaml
from penstock.errors import ConfigError, nearest
from penstock.serving.observe.text import Histogram, Page
from penstock.values import convert, found

log = logging.getLogger("penstock.torchserve")

KINDS: Final = ("counter", "gauge", "histogram")

_HOST: Final = ("Level", "Hostname")
_GPU: Final = ("Level", "DeviceId", "Hostname")
_VERSION: Final = ("model_name", "model_version", "hostname")

SERVER_METRICS: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "Requests2XX": ("counter", "Count", _HOST),
    "Requests4XX": ("counter", "Count", _HOST),
    "Requests5XX": ("counter", "Count", _HOST),
    "ts_inference_requests_total": ("counter", "Count", _VERSION),
    "ts_inference_latency_microseconds": ("counter", "Microseconds", _VERSION),
    "ts_queue_latency_microseconds": ("counter", "Microseconds", _VERSION),
    "QueueTime": ("gauge", "Milliseconds", _HOST),
    "WorkerThreadTime": ("gauge", "Milliseconds", _HOST),
    "WorkerLoadTime": ("gauge", "Milliseconds", ("WorkerName", "Level", "Hostname")),
    "CPUUtilization": ("gauge", "Percent", _HOST),
    "MemoryUsed": ("gauge", "Megabytes", _HOST),
    "MemoryAvailable": ("gauge", "Megabytes", _HOST),
    "MemoryUtilization": ("gauge", "Percent", _HOST),
    "DiskUsage": ("gauge", "Gigabytes", _HOST),
    "DiskUtilization": ("gauge", "Percent", _HOST),
    "DiskAvailable": ("gauge", "Gigabytes", _HOST),
    "GPUMemoryUtilization": ("gauge", "Percent", _GPU),
    "GPUMemoryUsed": ("gauge", "Megabytes", _GPU),
    "GPUUtilization": ("gauge", "Percent", _GPU),
}
"""The server's metrics: (kind, unit, dimensions) by default. The last dimension is the host."""

_HANDLER_METRICS: Final = ("HandlerTime", "PredictionTime")


class MetricDefinition(Struct, frozen=True):
    """One metric. Its values have labels for the dimensions, in this order."""

    name: str
    kind: str
    unit: str
    dimensions: tuple[str, ...]


class MetricsConfig(Struct, frozen=True):
    """The metrics of the server (`ts_metrics`) and of models (`model_metrics`), by name."""

    server: Mapping[str, MetricDefinition]
    models: Mapping[str, MetricDefinition]

    def section(self) -> dict[str, list[dict[str, Any]]]:
        """The section `model_metrics` in the form of the file, for workers."""
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for d in self.models.values():
            found[d.kind].append({"name": d.name, "unit": d.unit, "dimensions": list(d.dimensions)})
        return found


def default_config() -> MetricsConfig:
    """The configuration without a file: all metrics of the server, and two times of each handler."""
    server = {name: MetricDefinition(name, *default) for name, default in SERVER_METRICS.items()}
    dimensions = ("ModelName", "Level")
    models = {name: MetricDefinition(name, "gauge", "ms", dimensions) for name in _HANDLER_METRICS}
    return MetricsConfig(server, models)


def read_config(path: str) -> MetricsConfig:
    """The configuration in a metrics.yaml. Raises ConfigError, which names the file and the line or key."""
    document, _ = load_yaml(path, f"metrics_config={path}")
    _check_keys(document, ("dimensions", "ts_metrics", "model_metrics"), path)
    server, models = (_section(path, key, document.get(key)) for key in ("ts_metrics", "model_metrics"))
    for name, default in SERVER_METRICS.items():
        own = server.get(name)
        if own is not None and len(own.dimensions) != len(default[2]):
            raise ConfigError(
                f"{path}: ts_metrics.{own.kind}: {name}: found the dimensions {list(own.dimensions)}, expected"
                f" {len(default[2])}, such as {list(default[2])}"
            )
    return MetricsConfig(server, models)


def _check_keys(value: Any, keys: Sequence[str], where: str) -> None:
    """Raises ConfigError unless the value is a table with no other keys."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: found {found(value)}, expected the keys {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise ConfigError(f"{where}: found the key {key!r}, expected {', '.join(keys)}{nearest(str(key), keys)}")


def _section(path: str, section: str, kinds: Any) -> dict[str, MetricDefinition]:
    read: dict[str, MetricDefinition] = {}
    if kinds is None:
        return read
    _check_keys(kinds, KINDS, f"{path}: {section}")
    for kind, metrics in kinds.items():
        where = f"{path}: {section}.{kind}"
        for i, metric in enumerate(convert(metrics, list[Any] | None, where) or ()):
            definition = _metric(f"{where}[{i}]", kind, metric)
            if definition.name in read:
                log.warning("%s[%d]: %s is defined twice; consequence=the last one counts", where, i, definition.name)
            read[definition.name] = definition
    return read


def _metric(where: str, kind: str, metric: Any) -> MetricDefinition:
    keys = ("name", "unit", "dimensions")
    _check_keys(metric, keys, where)
    for key in keys:
        if key not in metric:
            raise ConfigError(f"{where}: found no {key}, expected name, unit and dimensions")
    name = convert(metric["name"], Annotated[str, Meta(min_length=1)], f"{where}.name")
    unit = convert(metric["unit"], str, f"{where}.unit")
    dimensions = convert(metric["dimensions"], tuple[str, ...], f"{where}.dimensions")
    return MetricDefinition(name, kind, unit, dimensions)


# ---- values

MAX_SERIES: Final = 10_000  # a choice: users may put anything into dimensions, and each series stays
# TorchServe's bounds, and larger ones because its times are in ms and µs.
BOUNDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2.5e6, 5e6, 1e7,
)  # fmt: skip
_NAME: Final = re.compile(r"(?!penstock_|process_)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)(?!le$)[a-zA-Z_][a-zA-Z0-9_]*")
_SUFFIXES: Final = ("", "_bucket", "_count", "_sum")

Labels = tuple[tuple[str, str], ...]
Owner = tuple[str, ...]  # the model version of the values


class _Family:
    def __init__(self, definition: MetricDefinition) -> None:
        self.definition = definition
        self.series: dict[Labels, float | Histogram] = {}
        self.owners: dict[Labels, Owner] = {}


class SeriesTable:
    """Metric families by name, each with its series by labels. Used by one thread at a time."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._claimed: dict[str, str] = {}  # every name on the page -> its family
        self._series = 0
        self._refused: set[str] = set()

    def declare(self, definition: MetricDefinition) -> None:
        """Shows the family even before its first value."""
        self._family(definition)

    def change(
        self, definition: MetricDefinition, labels: Labels, values: Sequence[float], owner: Owner | None = None
    ) -> None:
        """Adds to a counter, sets a gauge to the last value, or fills a histogram. `forget` drops an owner's series."""
        family = self._families.get(definition.name) or self._family(definition)
        if family is None:
            return
        if family.definition is not definition and family.definition != definition:
            self._refuse(definition, "another metric has this name")
            return
        found = family.series.get(labels)
        if found is None and not self._admit(family, labels, owner):
            return
        if definition.kind == "histogram":
            histogram = found if isinstance(found, Histogram) else Histogram(BOUNDS)
            histogram.extend(values)
            family.series[labels] = histogram
        elif definition.kind == "counter":
            family.series[labels] = sum(values) + (found if isinstance(found, float) else 0.0)
        else:
            family.series[labels] = values[-1]

    def forget(self, owner: Owner) -> None:
        for family in self._families.values():
            for labels in [labels for labels, whose in family.owners.items() if whose == owner]:
                del family.owners[labels]
                del family.series[labels]
                self._series -= 1

    def write(self, page: Page) -> None:
        for family in self._families.values():
            d = family.definition
            page.family(d.name, d.kind, f"Torchserve prometheus {d.kind} metric with unit: {_one_line(d.unit)}")
            for labels, value in family.series.items():
                page.sample(d.name, labels, value)

    def _family(self, definition: MetricDefinition) -> _Family | None:
        names = [definition.name + suffix for suffix in (_SUFFIXES if definition.kind == "histogram" else ("",))]
        if not _NAME.fullmatch(definition.name):
            self._refuse(definition, "the name is not valid in Prometheus, or it is reserved")
            return None
        if any(name in self._claimed for name in names):
            self._refuse(definition, "another metric has this name")
            return None
        self._claimed.update(dict.fromkeys(names, definition.name))
        family = self._families[definition.name] = _Family(definition)
        return family

    def _admit(self, family: _Family, labels: Labels, owner: Owner | None) -> bool:
        """True if a new series may be added."""
        d = family.definition
        bad = next((name for name, _ in labels if not _LABEL.fullmatch(name)), None)
        if bad is not None or len({name for name, _ in labels}) < len(labels):
            self._refuse(d, f"its dimensions are not valid: {[name for name, _ in labels]}")
        elif self._series >= MAX_SERIES:
            self._refuse(d, f"there are {MAX_SERIES} series already; a dimension must not have many values")
        else:
            self._series += 1
            if owner is not None:
                family.owners[labels] = owner
            return True
        return False

    def _refuse(self, d: MetricDefinition, why: str) -> None:
        if d.name not in self._refused and len(self._refused) < MAX_SERIES:
            self._refused.add(d.name)
            log.warning("metric_refused name=%r kind=%s consequence=not_on_the_page: %s", d.name, d.kind, why)


def filter_page(page: bytes, names: Iterable[str]) -> bytes:
    """The families and samples of these names."""
    wanted = set(names)
    kept: list[str] = []
    head: list[str] = []
    whole = False
    for line in page.decode("utf-8").splitlines(keepends=True):
        if line.startswith("# HELP "):
            head, whole = [], line.split(" ", 3)[2] in wanted
        if line.startswith("#"):
            (kept if whole else head).append(line)
        elif whole or line.partition("{")[0].partition(" ")[0] in wanted:
            kept += [*head, line]
            head = []
    return "".join(kept).encode("utf-8")


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
