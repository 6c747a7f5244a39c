"""Helpers for tests of handlers."""

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.torchserve.ts.metric_cache import MetricsStore
from penstock.torchserve.ts.util import get_yaml_config


class MockContext:
    """A Context for a handler's `initialize` and `handle`, without explanations."""

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        import torch

        self.manifest: dict[str, Any] = {"model": {}}
        if model_pt_file:
            self.manifest["model"]["serializedFile"] = model_pt_file
        if model_file:
            self.manifest["model"]["modelFile"] = model_file
        self.system_properties: dict[str, Any] = {"model_dir": model_dir}
        if gpu_id and torch.cuda.is_available():
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore(uuid.uuid4(), model_name)
        self.model_yaml_config: Any = {}
        if model_yaml_config_file:
            self.model_yaml_config = get_yaml_config(os.path.join(model_dir, model_yaml_config_file))

    def get_request_header(self, idx: int, exp: str) -> bool:
        return bool(idx and exp and self.explain)


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copies each file of `src_dir` to its name in `dst_dir`."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir) / source, Path(dst_dir) / target)
