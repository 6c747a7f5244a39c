"""Loads a handler into this process without a server, for tests."""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from penstock.torchserve.handlers.entry import find_entry, in_envelope
from penstock.torchserve.ts import __version__
from penstock.torchserve.ts.context import Context
from penstock.torchserve.ts.metric import Metric
from penstock.torchserve.ts.metric_cache import MetricsCache
from penstock.torchserve.ts.util import get_yaml_config

PREDICTION_METRIC = "PredictionTime"


class Service:
    """A loaded handler with its context; `handle(data, context)` is the handler's."""

    def __init__(self, context: Any, entry_point: Callable[[Any, Any], Any]) -> None:
        self.context = context
        self.handle = entry_point


def emit_metrics(metrics: Iterable[Metric]) -> None:
    """Records the value of each metric."""
    for metric in metrics or ():
        metric.update(metric.value)


class TsModelLoader:
    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str,
        gpu_id: int | None,
        batch_size: int | None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> Service:
        """The initialized handler of an unpacked archive. `model_dir` must be on the import path.

        The parameters are TorchServe's. Raises ImportError, ValueError, and the handler's errors.
        """
        manifest = _manifest(model_dir)
        initialize, handle = find_entry(handler)
        if envelope is not None:
            handle = in_envelope(envelope, handle)
        config = ((manifest or {}).get("model") or {}).get("configFile")
        context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size,
            gpu_id,
            __version__,
            limit_max_image_pixels,
            metrics_cache or MetricsCache(model_name),
            get_yaml_config(os.path.join(model_dir, config)) if config else {},
        )
        initialize(context)
        return Service(context, handle)


class ModelLoaderFactory:
    @staticmethod
    def get_model_loader() -> TsModelLoader:
        return TsModelLoader()


def _manifest(model_dir: str) -> Any:
    path = os.path.join(model_dir, "MAR-INF", "MANIFEST.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)
