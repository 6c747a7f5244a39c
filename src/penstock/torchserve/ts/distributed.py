"""Models split over several GPUs by DeepSpeed or PiPPy: their set-up, and the base classes of their handlers."""

import inspect
import json
import os
from abc import ABC
from pathlib import Path
from typing import Any

from penstock.torchserve.ts.base_handler import BaseHandler
from penstock.torchserve.ts.util import require


class BaseDeepSpeedHandler(BaseHandler, ABC):
    """Base of DeepSpeed handlers; a subclass loads the model. `device` is the number of the process's own GPU."""

    def initialize(self, ctx: Any) -> None:
        self.device = int(os.environ.get("LOCAL_RANK", "0"))


class BasePippyHandler(BaseHandler, ABC):
    """Base of PiPPy handlers; a subclass loads the model. `device` is the number of the process's own GPU."""

    def initialize(self, ctx: Any) -> None:
        import torch

        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.device = self.local_rank % torch.cuda.device_count()
        initialize_rpc_workers(self.local_rank, self.world_size, ctx)


def create_checkpoints_json(model_path: str, checkpoints_json: str) -> None:
    """Writes the list of the model's checkpoint files (*.bin, *.pt) for DeepSpeed."""
    files = sorted(str(p) for p in Path(model_path).rglob("*") if p.is_file() and p.suffix in (".bin", ".pt"))
    Path(checkpoints_json).write_text(json.dumps({"type": "ds_model", "checkpoints": files, "version": 1.0}))


def get_ds_engine(model: Any, ctx: Any) -> Any:
    """The model's DeepSpeed engine, configured by `deepspeed` in model-config.yaml.

    Raises ValueError without the configuration, ImportError without DeepSpeed.
    """
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
    deepspeed = require("deepspeed", "this handler needs DeepSpeed, install it in Penstock's environment")
    return deepspeed.init_inference(model, config=settings, base_dir=model_path, checkpoint=checkpoint)


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any) -> None:
    """Connects this process to the other `world_size` - 1 of its model, as `pippy` in model-config.yaml says."""
    import torch
    from torch.distributed import rpc

    options = ctx.model_yaml_config["pippy"]
    backend = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options["num_worker_threads"], rpc_timeout=options["rpc_timeout"]
    )
    gpus = torch.cuda.device_count()
    for rank in range(world_size):
        backend.set_device_map(f"worker{rank}", {local_rank % gpus: rank % gpus})
    start: Any = rpc.init_rpc
    start(f"worker{local_rank}", rank=local_rank, world_size=world_size, rpc_backend_options=backend)


def get_pipeline_driver(model: Any, world_size: int, ctx: Any) -> Any:
    """The driver that runs the model in `world_size` stages.

    Raises ValueError if model-config.yaml lacks a key, ImportError without PiPPy.
    """
    options, index, chunks = _pippy_options(ctx.model_yaml_config)
    advice = "this handler needs PiPPy, install it in Penstock's environment"
    pippy = require("pippy", advice)
    hf = require("pippy.hf", advice) if options["model_type"] == "HF" else None
    model.train(False)
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = {p.name: p.default for p in parameters if p.name not in options["input_names"]}
    if hf is not None and "bloom" in str(model.__class__):
        fixed.setdefault("deprecated_arguments", {})
    driver, _ = pippy.all_compile(
        model,
        num_ranks=world_size,
        num_chunks=chunks,
        schedule="FillDrain",
        split_policy=pippy.split_into_equal_size(world_size),
        tracer=None if hf is None else hf.PiPPyHFTracer(),
        concrete_args=fixed,
        index_filename=index,
        checkpoint_prefix=None,
    )
    if hf is None:
        return driver
    hf.inject_pipeline_forward(model, driver)
    return model


def _pippy_options(config: dict[str, Any]) -> tuple[dict[str, Any], str | None, int]:
    """(section `pippy`, path of the index file or None, chunks)."""
    for section, keys in (("pippy", ("input_names", "model_type")), ("handler", ("model_path",))):
        missing = [key for key in keys if key not in config.get(section, {})]
        if missing:
            raise ValueError(f"model-config.yaml lacks '{section}: {missing[0]}'")
    index = config["handler"].get("index_filename")
    if index is not None:
        index = os.path.join(config["handler"]["model_path"], index)
        if not os.path.exists(index):
            raise ValueError(f"there is no index file {index}")
    return config["pippy"], index, config["pippy"].get("chunks", 1)
