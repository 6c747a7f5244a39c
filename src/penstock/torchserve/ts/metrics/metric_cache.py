"""A worker's metrics: those that metrics.yaml declares under `model_metrics`, and those that the handler adds."""

from __future__ import annotations

import logging
from typing import Any, Final

from penstock.torchserve.ts.metrics import metric_cache_errors as merrors
from penstock.torchserve.ts.metrics.caching_metric import CachingMetric
from penstock.torchserve.ts.metrics.metric_cache_abstract import MetricCacheAbstract
from penstock.torchserve.ts.metrics.metric_type_enum import MetricTypes

log = logging.getLogger("penstock.model")

ALWAYS: Final[dict[str, Any]] = {
    "gauge": [
        {"name": "HandlerTime", "unit": "ms", "dimensions": ["ModelName", "Level"]},
        {"name": "PredictionTime", "unit": "ms", "dimensions": ["ModelName", "Level"]},
    ]
}


class MetricsCache(MetricCacheAbstract):
    """`declared` is the section `model_metrics` of metrics.yaml: {type: [{name, unit, dimensions}]}."""

    def __init__(
        self, model_name: str | None = None, declared: Any = ALWAYS, config_file_path: str | None = None
    ) -> None:
        super().__init__(config_file_path)
        self.model_name = model_name
        self._declared = declared

    def initialize_cache(self) -> None:
        """Makes the metrics that are declared. Raises MetricsCacheValueError, MetricsCacheKeyError."""
        if not self._declared:
            raise merrors.MetricsCacheValueError("Missing `model_metrics` specification")
        for kind, metrics in self._declared.items():
            try:
                metric_type = MetricTypes(kind)
            except ValueError as e:
                raise merrors.MetricsCacheKeyError(f"Invalid metric type: {e}") from e
            for metric in metrics:
                try:
                    name, unit, dimensions = metric["name"], metric["unit"], metric["dimensions"]
                except KeyError as e:
                    raise merrors.MetricsCacheKeyError(f"Key not found in cache spec: {e}") from e
                self.add_metric_to_cache(name, unit, dimensions, metric_type)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: list[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """A new metric, in the place of one of the same name and type. Raises MetricsCacheTypeError."""
        _check(metric_name, str, "`metric_name` must be a str")
        _check(unit, str, "`unit` must be a str")
        _check(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        if dimension_names:
            _check(dimension_names, list, "`dimension_names` should be a list of dimension name strings")
        of_type = self.cache.setdefault(metric_type, {})
        if metric_name in of_type:
            log.warning(
                "metric_replaced type=%s name=%s: what it declared is forgotten", metric_type.value, metric_name
            )
        metric = of_type[metric_name] = CachingMetric(metric_name, unit, dimension_names, metric_type)
        return metric

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """The metric of that name and type. Raises MetricsCacheKeyError, MetricsCacheTypeError."""
        _check(metric_name, str, "`metric_name` must be a str")
        _check(metric_type, MetricTypes, "`metric_type` must be a MetricTypes enum")
        try:
            metric: CachingMetric = self.cache[metric_type][metric_name]
        except KeyError:
            raise merrors.MetricsCacheKeyError(
                f"Metric of type '{metric_type}' and name '{metric_name}' doesn't exist"
            ) from None
        return metric

    def cache_keys(self) -> list[str]:
        """`type:name` of every metric."""
        return [f"{kind.value}:{name}" for kind, metrics in self.cache.items() for name in metrics]


def _check(value: object, expected: type, message: str) -> None:
    if not isinstance(value, expected):
        raise merrors.MetricsCacheTypeError(message)
