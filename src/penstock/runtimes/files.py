"""Opens model files (`model.onnx`, `model.ts`, `model.pt`, `model.pt2`) and PyTorch modules as TensorModels.

A worker uses it for targets with one of these suffixes, and for an `nn.Module` or a subclass of it. It imports only the
runtime that the file needs.
"""

from contextlib import suppress
from functools import partial
from typing import Any

from penstock.config.inputs import images_in, input_texts
from penstock.config.schema import ModelConfig
from penstock.core.worker.python_model import is_torch_module
from penstock.core.worker.tensor_model import ANY_ROWS, Program, ProgramSettings, TensorModel, refuse_inputs
from penstock.errors import ConfigError, LoadFailed
from penstock.values import tensor_specs


def file_model(path: str, config: ModelConfig, threads: int) -> TensorModel:
    """The model in a file. The suffix decides the runtime, the content the kind of PyTorch file. Raises ConfigError."""
    if config.weights is not None:
        raise ConfigError(
            f"weights: found with the target {path}, which is not a class; expected for example net.py:Net"
        )
    refuse_pointer(path)
    open_program = _open_onnx if path.lower().endswith(".onnx") else _open_torch
    return TensorModel(partial(open_program, path), settings_of(config, threads))


def module_model(target: Any, config: ModelConfig, threads: int) -> TensorModel:
    """The model of an `nn.Module` or a subclass of it, with the configured weights.

    Raises ConfigError for any other target, which cannot take weights.
    """
    if not is_torch_module(target) or hasattr(target, "predict"):
        raise ConfigError(
            "weights: the target does not take this key; expected a torch.nn.Module without `predict`, such as"
            " net.py:Net"
        )
    return TensorModel(partial(_open_module, target, config.weights), settings_of(config, threads))


def refuse_pointer(path: str) -> None:
    """Raises LoadFailed for a pointer that Git LFS left in place of the file; nothing for any other or no file."""
    with suppress(OSError), open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs.github.com/"):
            raise LoadFailed(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull in its repository")


def settings_of(config: ModelConfig, threads: int) -> ProgramSettings:
    """The keys of a model that its program needs. Raises ConfigError."""
    if config.outputs:
        raise ConfigError("outputs: a model file or module names its outputs itself; leave the key out")
    size, sizes = config.batching.max_batch_size, config.batching.sizes
    if isinstance(sizes, tuple):
        size = sizes[-1]
    return ProgramSettings(
        precision=config.precision or "fp32",
        optimize=config.optimize,
        trust=config.trust,
        threads=threads,
        inputs=tensor_specs(input_texts(config.inputs, "inputs"), "inputs"),
        images=images_in(config.inputs),
        most_rows=None if size == "auto" else size,
        sizes="any" if config.batching.rows == "none" else sizes,
    )


def _open_onnx(path: str, settings: ProgramSettings) -> Program:
    from penstock.runtimes import onnx
    from penstock.runtimes.pixels import ImageProgram

    refuse_inputs(settings, "an ONNX graph")
    device, threads, precision = settings.device, settings.threads, settings.precision
    compiled = onnx.compiled(device, precision, settings.optimize or "none")
    if not device.startswith("cuda"):
        program: Program = onnx.OnnxProgram(onnx.open_session(path, device, threads=threads))
        return ImageProgram(program, settings.images) if settings.images else program
    from penstock.runtimes import onnx_device

    on = onnx_device.device_of(device)
    stream = None if on is None else on.stream
    if not compiled:
        session = onnx.open_session(path, device, threads=threads, stream=stream)
        return onnx_device.in_phases(session, device, on, settings.images)
    least = settings.sizes[0] if isinstance(settings.sizes, tuple) else 1
    most = settings.most_rows or onnx.PROFILE_ROWS
    session = onnx.open_tensorrt(
        path, device, threads=threads, precision=precision, least_rows=least, most_rows=most, stream=stream
    )
    program = onnx_device.in_phases(session, device, on, settings.images)
    if program.rows == ANY_ROWS:
        program.rows = (least, most)  # of the engine
    return program


def _open_torch(path: str, settings: ProgramSettings) -> Program:
    from penstock.runtimes import torch

    return torch.open_program(path, settings)


def _open_module(target: Any, weights: str | None, settings: ProgramSettings) -> Program:
    from penstock.runtimes import torch, torch_files

    torch_files.import_torch().set_num_threads(settings.threads)
    if weights is None:
        module = torch_files.instance_of(target)
    else:
        refuse_pointer(weights)
        module = torch_files.load_weights(target, weights, settings.device, trust=settings.trust)
    return torch.of_module(module, settings, own=module is not target)
