"""A metric with its value, as handlers made them before there was a cache of metrics."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from penstock.torchserve.ts.metrics.caching_metric import CachingMetric
from penstock.torchserve.ts.metrics.dimension import Dimension
from penstock.torchserve.ts.metrics.metric_type_enum import MetricTypes


class Metric:
    """`value` is the first one; `update` tells another. Always a counter."""

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
        """Tells one more value."""
        self._metric.add_or_update(value, self.dimension_values, self.request_id or "")

    def reset(self) -> None:
        """Tells a zero."""
        self.update(0)

    def __str__(self) -> str:
        """`Name.Unit:value|#Dimension:value,...|#hostname:h,seconds[,request id]`, as a line of a log has it."""
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
