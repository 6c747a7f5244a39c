"""Models that PiPPy cuts into stages on several GPUs, as `pippy` of model-config.yaml says."""

from __future__ import annotations

import inspect
import os
from typing import Any

from penstock.torchserve.ts.handler_utils.distributed.needs import library


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any) -> None:
    """Joins this process, one of `world_size`, to the others of its model."""
    rpc, torch = library("torch.distributed.rpc", "PyTorch"), library("torch", "PyTorch")
    options = ctx.model_yaml_config["pippy"]
    backend = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options["num_worker_threads"], rpc_timeout=options["rpc_timeout"]
    )
    gpus = torch.cuda.device_count()
    for rank in range(world_size):
        backend.set_device_map(f"worker{rank}", {local_rank % gpus: rank % gpus})
    rpc.init_rpc(f"worker{local_rank}", rank=local_rank, world_size=world_size, rpc_backend_options=backend)


def get_pipeline_driver(model: Any, world_size: int, ctx: Any) -> Any:
    """What runs the model in `world_size` stages. Raises ValueError for what model-config.yaml lacks, ImportError."""
    options, index, chunks = _options(ctx.model_yaml_config)
    pippy = library("pippy", "PiPPy")
    hf = library("pippy.hf", "PiPPy") if options["model_type"] == "HF" else None
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


def _options(config: dict[str, Any]) -> tuple[dict[str, Any], str | None, int]:
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
