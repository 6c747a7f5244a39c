"""The face of a handler's metrics, `context.metrics`: what it can tell, whatever the metrics are kept in."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from penstock.torchserve.ts.metrics import metric_cache_errors as merrors
from penstock.torchserve.ts.metrics.dimension import Dimension
from penstock.torchserve.ts.metrics.metric_abstract import MetricAbstract
from penstock.torchserve.ts.metrics.metric_type_enum import MetricTypes
from penstock.torchserve.ts.metrics.request_ids import request_id_of


class MetricCacheAbstract(abc.ABC):
    """`cache` has the metrics by type and name. `idx` is a request's place in the batch; None: the whole batch.

    Every `add_*` adds the dimensions ModelName and Level to those that it is given, and makes the metric when it is
    new.
    """

    def __init__(self, config_file_path: str | None = None) -> None:
        self.cache: dict[MetricTypes, dict[str, Any]] = {}
        self.store: list[Any] = []
        self.request_ids: Any = None
        self.model_name: str | None = None
        self.config_file_path = config_file_path

    def set_request_ids(self, request_ids: Any) -> None:
        self.request_ids = request_ids

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Tells a value of any unit."""
        self._add(name, value, unit, request_id_of(self.request_ids, idx), dimensions, metric_type)

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Adds to a counter."""
        self._add(name, value, "count", request_id_of(self.request_ids, idx), dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Tells a time, in "ms" or "s". Raises MetricsCacheValueError for another unit."""
        if unit not in ("ms", "s"):
            raise merrors.MetricsCacheValueError("the unit for a timed metric should be one of ['ms', 's']")
        self._add(name, value, unit, request_id_of(self.request_ids, idx), dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Tells a size, in "B", "kB", "MB" or "GB". Raises ValueError for another unit."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self._add(name, value, unit, request_id_of(self.request_ids, idx), dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Tells a part of a hundred."""
        self._add(name, value, "percent", request_id_of(self.request_ids, idx), dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        """Adds to a counter of errors."""
        self._add(name, value, "", None, dimensions, MetricTypes.COUNTER)

    def _add(
        self,
        name: str,
        value: float,
        unit: str,
        request_id: Any,
        dimensions: Sequence[Dimension],
        metric_type: MetricTypes,
    ) -> None:
        labels = {d.name: d.value for d in dimensions or ()}
        if request_id is not None:
            labels.setdefault("ModelName", self.model_name)
        labels.setdefault("Level", "Error" if request_id is None else "Model")
        try:
            metric = self.get_metric(name, metric_type)
        except merrors.MetricsCacheKeyError:
            metric = self.add_metric_to_cache(name, unit, list(labels), metric_type)
        metric.add_or_update(value, list(labels.values()), "" if request_id is None else str(request_id))

    @abc.abstractmethod
    def initialize_cache(self) -> None:
        """Makes the metrics that the configuration declares."""

    @abc.abstractmethod
    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> MetricAbstract:
        """The metric of that name and type. Raises MetricsCacheKeyError."""

    @abc.abstractmethod
    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> MetricAbstract:
        """A new metric, in the place of one of the same name and type."""
