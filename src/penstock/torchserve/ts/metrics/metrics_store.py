"""The old face of a handler's metrics: `store` lists what was told, by metric."""

from __future__ import annotations

from typing import Any

from penstock.torchserve.ts.metrics.dimension import Dimension
from penstock.torchserve.ts.metrics.metric import Metric
from penstock.torchserve.ts.metrics.request_ids import request_id_of


class MetricsStore:
    """`store` has a Metric for each name, unit, request and dimensions that was told."""

    def __init__(self, request_ids: Any, model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids = request_ids
        self.model_name = model_name
        self.cache: dict[str, Metric] = {}

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        self._add(name, value, request_id_of(self.request_ids, idx), "count", dimensions)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: list[Dimension] | None = None,
    ) -> None:
        if unit not in ("ms", "s"):
            raise ValueError("the unit for a timed metric should be one of ['ms', 's']")
        self._add(name, value, request_id_of(self.request_ids, idx), unit, dimensions)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: list[Dimension] | None = None,
    ) -> None:
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError("The unit for size based metric is one of ['MB','kB', 'GB', 'B']")
        self._add(name, value, request_id_of(self.request_ids, idx), unit, dimensions)

    def add_percent(
        self, name: str, value: float, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        self._add(name, value, request_id_of(self.request_ids, idx), "percent", dimensions)

    def add_error(self, name: str, value: Any, dimensions: list[Dimension] | None = None) -> None:
        self._add(name, value, None, "", dimensions)

    def add_metric(
        self, name: str, value: float, unit: str, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        self._add(name, value, request_id_of(self.request_ids, idx), unit, dimensions)

    def _add(
        self, name: str, value: Any, request_id: str | None, unit: str, dimensions: list[Dimension] | None
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
