"""The metrics that handlers record, and `context.metrics`, the cache that holds them by type and name.

The values reach the server with the batch's responses.
"""

import abc
import enum
import logging
import socket
import time
from collections.abc import Sequence
from json import JSONEncoder
from typing import Any, Final

from penstock.metrics import record

log = logging.getLogger("penstock.model")

DEFAULT: Final[dict[str, Any]] = {
    "gauge": [
        {"name": "HandlerTime", "unit": "ms", "dimensions": ["ModelName", "Level"]},
        {"name": "PredictionTime", "unit": "ms", "dimensions": ["ModelName", "Level"]},
    ]
}

UNIT_NAMES: Final[dict[str | None, str]] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}


class Units:
    """`units` maps the short name of a unit to its long name."""

    def __init__(self) -> None:
        self.units = dict(UNIT_NAMES)


class MetricTypes(enum.Enum):
    """The type of a metric; `value` is its name in metrics.yaml."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Dimension:
    """A label of a metric with its value."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, Any]:
        return {"Name": self.name, "Value": self.value}


class CachingMetric:
    """A metric that sends its values to the server. An invalid value is logged and does not raise.

    `unit` becomes its long name; every value needs all of `dimension_names`.
    """

    def __init__(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        self.metric_name = metric_name
        self.unit = UNIT_NAMES.get(unit, unit or "")
        self.dimension_names = list(dimension_names or ())
        self.metric_type = metric_type

    def add_or_update(self, value: float, dimension_values: Sequence[Any] = (), request_id: str = "") -> None:
        """Records one value: an increment of a counter, a level of a gauge, an observation of a histogram.

        Logs and drops a negative increment, a value that is not a number, and dimensions other than the declared ones.
        """
        try:
            if dimension_values is None or len(dimension_values) != len(self.dimension_names):
                raise ValueError(
                    f"Dimension values: {dimension_values} should be one for each of {self.dimension_names}"
                )
            if self.metric_type is MetricTypes.COUNTER and not value >= 0:
                raise ValueError("Counter metric update value cannot be negative")
            labels = dict(zip(self.dimension_names, dimension_values, strict=True))
            record(self.metric_type.value, self.metric_name, value, labels, self.unit, request_id or "")
        except (ValueError, TypeError, OverflowError) as e:
            log.error("metric_refused name=%s value=%r error=%s: it is not counted", self.metric_name, value, e)

    def update(self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()) -> None:
        """Records one value and replaces the dimensions. The old API."""
        self.dimension_names = [d.name for d in dimensions]
        self.add_or_update(value, [d.value for d in dimensions], request_id)


MetricAbstract = CachingMetric  # the only kind; handlers use this name in annotations


class Metric:
    """A counter with its value. The API before there was a metric cache."""

    def __init__(
        self,
        name: str,
        value: Any,
        unit: str | None,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: Any = None,
    ) -> None:
        self.metric_type = MetricTypes.COUNTER
        self.dimensions = dimensions
        self.dimension_names = [d.name for d in dimensions]
        self.dimension_values = [d.value for d in dimensions]
        self._metric = CachingMetric(name, unit, self.dimension_names, self.metric_type)
        self.name = name
        self.unit = self._metric.unit
        self.metric_method = metric_method
        self.value = value
        self.request_id = request_id

    def update(self, value: float) -> None:
        self._metric.add_or_update(value, self.dimension_values, self.request_id or "")

    def reset(self) -> None:
        self.update(0)

    def __str__(self) -> str:
        """A metric log line: `Name.Unit:value|#Dimension:value,...|#hostname:h,seconds[,request id]`."""
        dimensions = ",".join(map(str, self.dimensions))
        tail = f",{self.request_id}" if self.request_id else ""
        host = socket.gethostname()
        return f"{self.name}.{self.unit}:{self.value}|#{dimensions}|#hostname:{host},{int(time.time())}{tail}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": self.dimensions,
            "Timestamp": int(time.time()),
            "HostName": socket.gethostname(),
            "RequestId": self.request_id,
        }


class MetricEncoder(JSONEncoder):
    def default(self, o: Any) -> Any:
        return o.to_dict() if isinstance(o, (Metric, Dimension)) else super().default(o)


# ---- caches


class GeneralMetricsCacheError(Exception):
    def __init__(self, message: object) -> None:
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(OSError):
    def __init__(self, message: object) -> None:
        super().__init__(f"Error reading file: {message}")


class MetricsCachePyYamlError(Exception):
    def __init__(self, message: object) -> None:
        super().__init__(f"Error parsing file: {message}")


class MetricsCacheTypeError(TypeError):
    """A metric's name, unit or type has the wrong type."""


class MetricsCacheValueError(ValueError):
    """An invalid unit or section."""


class MetricsCacheKeyError(KeyError):
    """An unknown metric, or a missing key in metrics.yaml."""


class _AddMethods(abc.ABC):
    """The methods that record a value. `idx` is a request's place in the batch; None means the whole batch."""

    request_ids: Any

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Any = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Records a value of any unit."""
        self._add(name, value, unit, self._request_id(idx), dimensions, metric_type)

    def add_counter(self, name: str, value: float, idx: int | None = None, dimensions: Any = None) -> None:
        self._add(name, value, "count", self._request_id(idx), dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Any = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Records a time in "ms" or "s". Raises MetricsCacheValueError for another unit."""
        if unit not in ("ms", "s"):
            raise MetricsCacheValueError("the unit for a timed metric should be one of ['ms', 's']")
        self._add(name, value, unit, self._request_id(idx), dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Any = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Records a size in "B", "kB", "MB" or "GB". Raises ValueError for another unit."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self._add(name, value, unit, self._request_id(idx), dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Any = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        self._add(name, value, "percent", self._request_id(idx), dimensions, metric_type)

    def add_error(self, name: str, value: Any, dimensions: Any = None) -> None:
        self._add(name, value, "", None, dimensions, MetricTypes.COUNTER)

    def _request_id(self, idx: int | None) -> Any:
        """The id of the batch's request `idx`; without a valid `idx` all ids, separated by commas."""
        ids = self.request_ids
        if isinstance(ids, dict):
            return ids[idx] if idx in ids else ",".join(ids.values())
        return ids

    @abc.abstractmethod
    def _add(
        self, name: str, value: Any, unit: str, request_id: Any, dimensions: Any, metric_type: MetricTypes
    ) -> None: ...


class MetricsCache(_AddMethods):
    """A worker's metric cache. `declared` is metrics.yaml's `model_metrics`: {type: [{name, unit, dimensions}]}.

    `cache` holds the metrics by type and name. Every `add_*` method adds the dimensions ModelName and Level, and
    creates an unknown metric.
    """

    def __init__(
        self, model_name: str | None = None, declared: Any = DEFAULT, config_file_path: str | None = None
    ) -> None:
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        self.store: list[Any] = []
        self.request_ids: Any = None
        self.model_name = model_name
        self.config_file_path = config_file_path
        self._declared = declared

    def set_request_ids(self, request_ids: Any) -> None:
        self.request_ids = request_ids

    def _add(
        self,
        name: str,
        value: float,
        unit: str,
        request_id: Any,
        dimensions: Sequence[Dimension] | None,
        metric_type: MetricTypes,
    ) -> None:
        labels = {d.name: d.value for d in dimensions or ()}
        if request_id is not None:
            labels.setdefault("ModelName", self.model_name)
        labels.setdefault("Level", "Error" if request_id is None else "Model")
        try:
            metric = self.get_metric(name, metric_type)
        except MetricsCacheKeyError:
            metric = self.add_metric_to_cache(name, unit, list(labels), metric_type)
        metric.add_or_update(value, list(labels.values()), "" if request_id is None else str(request_id))

    def initialize_cache(self) -> None:
        """Creates the declared metrics. Raises MetricsCacheValueError, MetricsCacheKeyError."""
        if not self._declared:
            raise MetricsCacheValueError("Missing `model_metrics` specification")
        for kind, metrics in self._declared.items():
            try:
                metric_type = MetricTypes(kind)
            except ValueError as e:
                raise MetricsCacheKeyError(f"Invalid metric type: {e}") from e
            for metric in metrics:
                try:
                    name, unit, dimensions = metric["name"], metric["unit"], metric["dimensions"]
                except KeyError as e:
                    raise MetricsCacheKeyError(f"Key not found in cache spec: {e}") from e
                self.add_metric_to_cache(name, unit, dimensions, metric_type)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """A new metric, which replaces one of the same name and type. Raises MetricsCacheTypeError."""
        _check(metric_name, str, "`metric_name` must be a str")
        _check(unit, str, "`unit` must be a str")
        _check(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        if dimension_names:
            _check(dimension_names, list, "`dimension_names` should be a list of dimension name strings")
        of_type = self.cache.setdefault(metric_type, {})
        if metric_name in of_type:
            log.warning("metric_replaced type=%s name=%s: its old declaration is lost", metric_type.value, metric_name)
        metric = of_type[metric_name] = CachingMetric(metric_name, unit, dimension_names, metric_type)
        return metric

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """The metric of that name and type. Raises MetricsCacheKeyError, MetricsCacheTypeError."""
        _check(metric_name, str, "`metric_name` must be a str")
        _check(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        try:
            return self.cache[metric_type][metric_name]
        except KeyError:
            raise MetricsCacheKeyError(
                f"Metric of type '{metric_type}' and name '{metric_name}' doesn't exist"
            ) from None

    def cache_keys(self) -> list[str]:
        """`type:name` of every metric."""
        return [f"{kind.value}:{name}" for kind, metrics in self.cache.items() for name in metrics]


MetricCacheAbstract = MetricsCache  # the only kind; handlers use this name in annotations


def _check(value: object, expected: type, message: str) -> None:
    if not isinstance(value, expected):
        raise MetricsCacheTypeError(message)


class MetricsCacheYamlImpl(MetricsCache):
    """A metric cache declared in a YAML file, which the constructor reads. Raises the errors of this module."""

    def __init__(self, config_file_path: str) -> None:
        super().__init__(config_file_path=config_file_path)
        self._parsed_file = _read(config_file_path)

    def initialize_cache(self) -> None:
        try:
            self._declared = self._parsed_file["model_metrics"]
        except KeyError as e:
            raise MetricsCacheKeyError(f"'model_metrics' key not found in yaml file: {e}") from e
        super().initialize_cache()


def _read(path: str) -> Any:
    if not path:
        raise MetricsCacheTypeError("Config file not initialized")
    import yaml  # the extra `yaml`

    try:
        with open(path, encoding="utf-8") as f:
            return yaml.safe_load(f)
    except yaml.YAMLError as e:
        raise MetricsCachePyYamlError(f"{path}: {e}") from e
    except OSError as e:
        raise MetricsCacheIOError(f"{path}: {e}") from e
    except Exception as e:
        raise GeneralMetricsCacheError(f"{path}: {e}") from e


class MetricsStore(_AddMethods):
    """The old API: `store` lists a Metric for each name, unit, request and set of dimensions."""

    def __init__(self, request_ids: Any, model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids = request_ids
        self.model_name = model_name
        self.cache: dict[str, Metric] = {}

    def _add(
        self, name: str, value: Any, unit: str, request_id: Any, dimensions: Any, metric_type: MetricTypes
    ) -> None:
        if dimensions is not None and not isinstance(dimensions, list):
            raise ValueError("Please provide a list of dimensions")
        own = [] if request_id is None else [Dimension("ModelName", self.model_name)]
        level = Dimension("Level", "Error" if request_id is None else "Model")
        dimensions = [*(dimensions or ()), *own, level]
        key = "-".join([name, unit, str(request_id), *map(str, dimensions)])
        metric = self.cache.get(key)
        if metric is None:
            metric = self.cache[key] = Metric(name, value, unit, dimensions, request_id)
            self.store.append(metric)
        else:
            metric.value = value
        if isinstance(value, (int, float)):
            metric.update(value)
