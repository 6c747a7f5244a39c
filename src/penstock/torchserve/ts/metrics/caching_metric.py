"""A metric that handlers keep and tell values of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from penstock import metrics
from penstock.torchserve.ts.metrics.dimension import Dimension
from penstock.torchserve.ts.metrics.metric_abstract import MetricAbstract
from penstock.torchserve.ts.metrics.metric_type_enum import MetricTypes

log = logging.getLogger("penstock.model")


class CachingMetric(MetricAbstract):
    """Its values go to the server with the answer of the batch; no value that is wrong raises."""

    def add_or_update(self, value: float, dimension_values: Sequence[Any] = (), request_id: str = "") -> None:
        """Tells one value: what is added to a counter, what a gauge shows, what a histogram counts.

        A value that is refused is logged: a counter that would fall, no number, or other dimensions than declared.
        """
        try:
            if dimension_values is None or len(dimension_values) != len(self.dimension_names):
                raise ValueError(
                    f"Dimension values: {dimension_values} should be one for each of {self.dimension_names}"
                )
            if self.metric_type is MetricTypes.COUNTER and not value >= 0:
                raise ValueError("Counter metric update value cannot be negative")
            labels = dict(zip(self.dimension_names, dimension_values, strict=True))
            metrics.record(self.metric_type.value, self.metric_name, value, labels, self.unit, request_id or "")
        except (ValueError, TypeError, OverflowError) as e:
            log.error("metric_refused name=%s value=%r error=%s: it is not counted", self.metric_name, value, e)

    def update(self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()) -> None:
        """Tells one value under other dimensions than before, which stay. An old way."""
        self.dimension_names = [d.name for d in dimensions]
        self.add_or_update(value, [d.value for d in dimensions], request_id)
