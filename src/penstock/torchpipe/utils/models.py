"""torchpipe.utils.models: networks by name, and their export to ONNX.

Functions import torch and timm when they are called.
"""

import os
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from penstock.errors import PenstockError
from penstock.runtimes.onnx import open_session
from penstock.torchpipe.boundary import as_runtime_error

SHAPE = (1, 3, 224, 224)  # of the example input

_makers: dict[str, Callable[..., Any]] = {}


def register_model(param: Any) -> Any:
    """Registers a function that makes a network: `@register_model`, or `@register_model("NAME")`.

    Raises KeyError for a known name, TypeError for anything but a function or a name.
    """
    if isinstance(param, str):
        return lambda maker: _register(param, maker)
    return _register(getattr(param, "__name__", ""), param)


def _register(name: str, maker: Any) -> Any:
    if not callable(maker):
        raise TypeError(f"found {maker!r}, expected a function that makes a network, or a name")
    if name in _makers:
        raise KeyError(f"there is already a model '{name}', of {_makers[name].__module__}")
    _makers[name] = maker
    return maker


def register_model_from_timm(model_name: str) -> None:
    """Registers a network of the package timm. Raises ImportError, ValueError: timm does not have it."""
    timm: Any = import_module("timm")
    if model_name not in timm.list_models():
        raise ValueError(f"timm has no model '{model_name}'")
    _register(model_name, lambda **keys: timm.create_model(model_name, **keys))


def create_model(model_name: str, **keys: Any) -> Any:
    """The network that a registered function makes. Raises KeyError."""
    if model_name not in _makers:
        raise KeyError(f"there is no model '{model_name}'; there are: {', '.join(_makers) or 'none'}")
    return _makers[model_name](**keys)


def list_models() -> list[str]:
    """The registered names."""
    return list(_makers)


def onnx_export(model: Any, onnx_path: str | None = None, input: Any = None, opset: int | None = None) -> str:
    """Writes a torch module with one input, "input", and outputs "output_0" ... as an ONNX file; any number of rows.

    `input` is an example tensor, or its shape; by default `[1, 3, 224, 224]`. Without a path the file has the name of
    the class, in the folder for temporary files. Returns the path. Raises ValueError for another input.
    """
    import torch

    shape = SHAPE if input is None else input
    if isinstance(shape, tuple | list) and all(isinstance(side, int) for side in shape):
        example = torch.randn(*shape)
    elif isinstance(shape, torch.Tensor):
        example = shape.cpu()
    else:
        raise ValueError(f"input is a {type(input).__name__}, expected a tensor or its shape, such as (1, 3, 224, 224)")
    model.train(False)
    with torch.inference_mode():
        given = model(example)
    names = [f"output_{i}" for i in range(len(given) if isinstance(given, tuple | list) else 1)]
    path = onnx_path or os.path.join(tempfile.gettempdir(), f"{type(model).__name__}.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs no other package warns about its age
        torch.onnx.export(
            model,
            (example,),
            path,
            opset_version=opset,
            input_names=["input"],
            output_names=names,
            dynamic_axes={name: {0: "batch_size"} for name in ("input", *names)},
            dynamo=False,
        )
    return path


def infer_shape(model: str) -> list[list[int]]:
    """The shape of each input of an ONNX file; -1 is any size. Raises LoadFailed."""
    try:
        inputs = open_session(model).get_inputs()
    except PenstockError as e:
        raise as_runtime_error(e) from None
    return [[side if isinstance(side, int) else -1 for side in given.shape] for given in inputs]
