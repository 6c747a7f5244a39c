"""What a metric is; `value` is the word in metrics.yaml."""

from __future__ import annotations

import enum


class MetricTypes(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
