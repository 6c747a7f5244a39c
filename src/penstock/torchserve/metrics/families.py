"""TorchServe's metrics: their definitions, built in or from a metrics.yaml, and the page filtered by name.

Source: `ts/configs/metrics.yaml` and `docs/metrics.md` of TorchServe 0.12.0.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from penstock.config.load import load_yaml
from penstock.errors import ConfigError, nearest
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

    @property
    def help(self) -> str:
        unit = self.unit.replace("\\", "\\\\").replace("\n", "\\n")
        return f"Torchserve prometheus {self.kind} metric with unit: {unit}"


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


# ---- the page

# TorchServe's bounds, and larger ones because its times are in ms and µs.
BOUNDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
    1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 2.5e6, 5e6, 1e7,
)  # fmt: skip


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
