"""Metrics that a file of YAML declares."""

from __future__ import annotations

from typing import Any

from penstock.torchserve.ts.metrics import metric_cache_errors as merrors
from penstock.torchserve.ts.metrics.metric_cache import MetricsCache


class MetricsCacheYamlImpl(MetricsCache):
    """Reads the file at once; `initialize_cache` makes its metrics. Raises the errors of `metric_cache_errors`."""

    def __init__(self, config_file_path: str) -> None:
        super().__init__(config_file_path=config_file_path)
        self._parsed_file = _read(config_file_path)

    def initialize_cache(self) -> None:
        try:
            self._declared = self._parsed_file["model_metrics"]
        except KeyError as e:
            raise merrors.MetricsCacheKeyError(f"'model_metrics' key not found in yaml file: {e}") from e
        super().initialize_cache()


def _read(path: str) -> Any:
    if not path:
        raise merrors.MetricsCacheTypeError("Config file not initialized")
    import yaml  # the extra `yaml`

    try:
        with open(path, encoding="utf-8") as f:
            return yaml.safe_load(f)
    except yaml.YAMLError as e:
        raise merrors.MetricsCachePyYamlError(f"{path}: {e}") from e
    except OSError as e:
        raise merrors.MetricsCacheIOError(f"{path}: {e}") from e
    except Exception as e:
        raise merrors.GeneralMetricsCacheError(f"{path}: {e}") from e
