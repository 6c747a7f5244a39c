"""The metrics that handlers record, one object per metric. Values reach the server with the batch's answers."""

import enum
import logging
import socket
import time
from collections.abc import Sequence
from json import JSONEncoder
from typing import Any, Final

from penstock.metrics import record

log = logging.getLogger("penstock.model")

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
