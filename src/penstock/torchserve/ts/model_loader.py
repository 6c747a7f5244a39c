"""A handler in this process, without a server: for its tests."""

from __future__ import annotations

import json
import os
from typing import Any

from penstock.torchserve.handlers.entry import find_entry, in_envelope
from penstock.torchserve.ts import __version__
from penstock.torchserve.ts.context import Context
from penstock.torchserve.ts.metrics.metric_cache import MetricsCache
from penstock.torchserve.ts.service import Service
from penstock.torchserve.ts.utils.util import get_yaml_config


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
        """The handler of an unpacked archive, initialised. `model_dir` must be on the path for imports.

        Raises ImportError, ValueError, and what the handler raises.
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
