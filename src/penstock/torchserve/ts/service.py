"""A handler with its context, and the old way to tell metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.torchserve.ts.metrics.metric import Metric

PREDICTION_METRIC = "PredictionTime"


class Service:
    """What `ts.model_loader` loaded; `handle(data, context)` is the handler's."""

    def __init__(self, context: Any, entry_point: Callable[[Any, Any], Any]) -> None:
        self.context = context
        self.handle = entry_point


def emit_metrics(metrics: Iterable[Metric]) -> None:
    """Tells the value of each metric."""
    for metric in metrics or ():
        metric.update(metric.value)
