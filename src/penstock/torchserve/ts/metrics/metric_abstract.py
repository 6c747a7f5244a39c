"""What every metric has."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from penstock.torchserve.ts.metrics.metric_type_enum import MetricTypes
from penstock.torchserve.ts.metrics.unit import long_word


class MetricAbstract(abc.ABC):
    """`unit` is kept as its long word; `dimension_names` are those that every value comes with."""

    def __init__(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        self.metric_name = metric_name
        self.unit = long_word(unit)
        self.dimension_names = list(dimension_names or ())
        self.metric_type = metric_type

    @abc.abstractmethod
    def add_or_update(self, value: float, dimension_values: Sequence[Any], request_id: str = "") -> None:
        """Tells one value."""
