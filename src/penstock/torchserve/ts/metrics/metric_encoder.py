"""JSON of metrics."""

from __future__ import annotations

from json import JSONEncoder
from typing import Any

from penstock.torchserve.ts.metrics.dimension import Dimension
from penstock.torchserve.ts.metrics.metric import Metric


class MetricEncoder(JSONEncoder):
    def default(self, o: Any) -> Any:
        return o.to_dict() if isinstance(o, (Metric, Dimension)) else super().default(o)
