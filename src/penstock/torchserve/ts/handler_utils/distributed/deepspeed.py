"""Models that DeepSpeed runs on several GPUs, as `deepspeed` of model-config.yaml says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.torchserve.ts.handler_utils.distributed.needs import library


def create_checkpoints_json(model_path: str, checkpoints_json: str) -> None:
    """Writes the list of the model's checkpoint files (*.bin, *.pt) that DeepSpeed loads."""
    files = sorted(str(p) for p in Path(model_path).rglob("*") if p.is_file() and p.suffix in (".bin", ".pt"))
    Path(checkpoints_json).write_text(json.dumps({"type": "ds_model", "checkpoints": files, "version": 1.0}))


def get_ds_engine(model: Any, ctx: Any) -> Any:
    """DeepSpeed's engine of the model. Raises ValueError without its configuration, ImportError without DeepSpeed."""
    config = ctx.model_yaml_config
    options = config.get("deepspeed")
    if options is None:
        raise ValueError(f"{ctx.model_name} has no deepspeed config in model config yaml file")
    model_dir, model_path = ctx.system_properties.get("model_dir"), config["handler"]["model_path"]
    settings = checkpoint = None
    if "config" in options:
        settings = os.path.join(model_dir, options["config"])
        if not os.path.exists(settings):
            raise ValueError(f"{ctx.model_name} has no deepspeed config file {settings}")
    if "checkpoint" in options:
        checkpoint = os.path.join(model_dir, options["checkpoint"])
        create_checkpoints_json(model_path, checkpoint)
    deepspeed = library("deepspeed", "DeepSpeed")
    return deepspeed.init_inference(model, config=settings, base_dir=model_path, checkpoint=checkpoint)
