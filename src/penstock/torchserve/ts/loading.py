"""Chooses a handler's device, and loads, compiles and calls its model.

Functions import the runtimes themselves, because those load NumPy and many handlers do without.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from importlib.util import find_spec
from typing import Any

from penstock.errors import describe
from penstock.torchserve.ts.util import check_valid_pt2_backend, list_classes_from_module

log = logging.getLogger("penstock.model")

XLA_AVAILABLE = find_spec("torch_xla") is not None
ONNX_AVAILABLE = find_spec("onnxruntime") is not None
PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = find_spec("torch") is not None
IPEX_AVAILABLE = False  # Intel ended its extension, whose features moved into PyTorch


def choose_device(gpu_id: int | str | None) -> tuple[str | None, Any]:
    """(map location, torch.device): the worker's GPU, otherwise XLA's device, otherwise the CPU."""
    import torch

    if gpu_id is not None and torch.cuda.is_available():
        return "cuda", torch.device(f"cuda:{gpu_id}")
    if gpu_id is not None and torch.xpu.is_available():
        return "xpu", torch.device(f"xpu:{gpu_id}")
    if gpu_id is not None and torch.backends.mps.is_available():
        return "mps", torch.device("mps")
    if XLA_AVAILABLE:
        return None, importlib.import_module("torch_xla.core.xla_model").xla_device()
    return "cpu", torch.device("cpu")


def allow_tensor_cores() -> None:
    """Lets a CUDA device multiply float32 matrices in TF32, as TorchServe's workers do."""
    import torch

    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")


def load_eager(model_dir: str, model_file: str, weights: str | None, device: Any, trust: str) -> Any:
    """An instance of the only class in `model_file`, with the weights of a state dict if there is one.

    Raises RuntimeError, ValueError, LoadFailed.
    """
    from penstock.runtimes import torch as torch_files

    if not os.path.isfile(os.path.join(model_dir, model_file)):
        raise RuntimeError("Missing the model.py file")
    if model_dir not in sys.path:
        sys.path.insert(0, model_dir)
    classes = list_classes_from_module(importlib.import_module(model_file.split(".")[0]))
    if len(classes) != 1:
        raise ValueError(f"Expected only one class as model definition. {classes}")
    if not weights:
        return classes[0]()
    place = "cpu" if str(device).startswith("xla") else str(device)  # files cannot be loaded directly onto XLA devices
    return torch_files.load_weights(classes[0], weights, place, trust=trust)


def load_torchscript(path: str, device: Any) -> Any:
    """The TorchScript module in a file. Raises LoadFailed."""
    from penstock.runtimes import torch as torch_files

    return torch_files.load_script(path, str(device))


def load_exported(path: str, device: Any) -> Any:
    """The callable in a library (.so) or package (.pt2) compiled ahead of time by torch, or in an exported program.

    Raises LoadFailed, RuntimeError.
    """
    import zipfile

    import torch

    from penstock.runtimes import torch as torch_files

    if device.type == "cuda":
        torch.cuda.set_device(device)  # the loaders take no device
    if path.endswith(".so"):
        return torch._export.aot_load(path, device.type)
    with zipfile.ZipFile(path) as package:
        compiled = any("/aotinductor/" in name for name in package.namelist())
    if compiled:
        return torch._inductor.aoti_load_package(path)
    return torch_files.load_module(path, str(device))


def setup_ort_session(model_pt_path: Any, map_location: str | None, device: Any = None) -> Any:
    """ONNX Runtime's session of a model, on the handler's GPU if ONNX Runtime supports it. Raises LoadFailed."""
    import torch

    from penstock.runtimes import onnx as onnx_files

    place = "cpu"
    if map_location == "cuda":
        if onnx_files.CUDA in onnx_files.import_onnxruntime().get_available_providers():
            place = str(device or "cuda:0")
        else:
            log.warning("onnx_on_cpu model=%s: this ONNX Runtime has no CUDA", os.path.basename(model_pt_path))
    return onnx_files.open_session(model_pt_path, place, threads=torch.get_num_threads())


def optimize_model(model: Any, device: Any, config: dict[str, Any]) -> Any:
    """The model with `precision`, `optimize` and `pt2` of model-config.yaml applied; uncompiled if compiling fails."""
    precision, optimize = config.get("precision", "fp32"), config.get("optimize", "none")
    if (precision, optimize) != ("fp32", "none"):
        from penstock.runtimes import torch as torch_files

        model = torch_files.prepare(model, str(device), precision=precision, optimize=optimize)
    options = compile_options(config.get("pt2"))
    if options is None:
        return model
    import torch

    try:
        return torch.compile(model, **options)
    except Exception as e:
        log.warning("compile_failed options=%s error=%s: the model runs uncompiled", options, describe(e))
        return model


def compile_options(pt2: Any) -> dict[str, Any] | None:
    """The arguments of torch.compile from `pt2` in model-config.yaml; None: do not compile.

    `pt2` is `{compile: {enable: true, backend, mode ...}}`, or in the old form a backend or the arguments alone. Raises
    ValueError.
    """
    if pt2 is None:
        return None
    if isinstance(pt2, str):
        options: dict[str, Any] = {"backend": pt2}
    elif not isinstance(pt2, dict):
        raise ValueError("pt2 should be str or dict")
    elif "compile" in pt2:
        options = dict(pt2["compile"])
        if options.pop("enable", False) is not True:
            return None
    elif "export" in pt2:
        return None
    else:
        options = dict(pt2)
    return options if "backend" not in options or check_valid_pt2_backend(options["backend"]) else None


def to_device(data: Any, device: Any, config: dict[str, Any]) -> Any:
    """The tensor on the model's device; a float tensor also in the `precision` of model-config.yaml."""
    data = data.to(device)
    precision = config.get("precision", "fp32")
    if precision == "fp32" or not data.is_floating_point():
        return data
    from penstock.runtimes import torch as torch_files

    return data.to(torch_files.dtype_of(precision))


def call(model: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's output for a tensor; for an ONNX session its first output, as a tensor."""
    if not hasattr(model, "get_inputs"):
        return model(data, *args, **kwargs)
    import torch

    name = model.get_inputs()[0].name
    return torch.from_numpy(model.run(None, {name: data.cpu().numpy()}, *args, **kwargs)[0])
