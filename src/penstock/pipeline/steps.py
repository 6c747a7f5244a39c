"""Steps of nodes for pipelines built in Python: `Decode("rgb") >> Resize(224, 224) >> ToTensor()`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.pipeline.lower import TARGET
from penstock.values import found

Color = Literal["rgb", "bgr", "gray"]
Target = str | type[Any] | Callable[..., Any]
"""An op's name, or a user's class or function."""


class StepChain:
    """Consecutive ops, as tables of a node's `ops`. `>>` appends more."""

    def __init__(self, *tables: dict[str, Any]) -> None:
        self.tables = tables

    def __rshift__(self, other: StepChain | Target) -> StepChain:
        return StepChain(*self.tables, *steps_of(other).tables)

    def __rrshift__(self, other: Target) -> StepChain:
        return StepChain(*steps_of(other).tables, *self.tables)

    def __repr__(self) -> str:
        return " >> ".join(str(table.get(TARGET, table["op"])) for table in self.tables)


def steps_of(value: StepChain | Target) -> StepChain:
    """The steps of a value. Raises ConfigError: not an op, or a class that cannot be found by name."""
    return value if isinstance(value, StepChain) else Use(value)


def Use(target: Target, /, **params: Any) -> StepChain:
    """Any op by name, or a user's class or function, with its parameters."""
    given = {key: value for key, value in params.items() if value is not None}
    if isinstance(target, str):
        return StepChain({"op": "Python", TARGET: target, **given} if ":" in target else {"op": target, **given})
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        name = type(target).__name__
        raise ConfigError(
            f"found {found(target)}, expected a class or a function; write Use({name}, ...) with its parameters"
        )
    name = f"{target.__module__}:{target.__qualname__}"
    if "<" in name:
        raise ConfigError(f"{name} cannot be found by its name: define it at the top of a module")
    return StepChain({"op": "Python", TARGET: name, **given})


def importable(tables: Sequence[dict[str, Any] | str]) -> list[dict[str, Any] | str]:
    """The ops with the running program's file instead of `__main__`, which other programs do not have."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    changed: list[dict[str, Any] | str] = []
    for table in tables:
        name = str(table.get(TARGET, "")) if isinstance(table, dict) else ""
        if isinstance(table, dict) and name.startswith("__main__:"):
            if file is None:
                raise ConfigError(f"{name} is not defined in a file; define it in a module to write it to a TOML file")
            table = {**table, TARGET: f"{os.path.abspath(file)}:{name.partition(':')[2]}"}
        changed.append(table)
    return changed


def Decode(color: Color = "bgr", *, scale: tuple[int, int] | None = None) -> StepChain:
    """Bytes of an image -> `[height, width, 3]` uint8.

    `scale` is the height and width needed later. It speeds up the decoding of JPEGs and changes pixels slightly.
    """
    height, width = scale or (None, None)
    decoded = Use("DecodeMat", scale_h=height, scale_w=width)
    return decoded if color == "bgr" else decoded >> Use("CvtColorMat", color=color)


def Convert(color: Color) -> StepChain:
    """`[height, width, 3]` -> the same in another color order."""
    return Use("CvtColorMat", color=color)


def Resize(height: int, width: int, *, pillow: bool = False) -> StepChain:
    """`[h, w, channels]` -> `[height, width, channels]`. `pillow`: bit-identical to Pillow, but slower."""
    return Use("PillowResizeMat" if pillow else "ResizeMat", resize_h=height, resize_w=width)


def Letterbox(height: int, width: int | None = None, *, pad_value: float | None = None) -> StepChain:
    """`[h, w, channels]` -> `[height, width, channels]`, proportions kept, centered. Default: a square."""
    return Use("ResizeCenterPadMat", max_h=height, max_w=width or height, pad_value=pad_value)


def ToTensor(data_format: Literal["nchw", "nhwc"] = "nchw") -> StepChain:
    """`[height, width, channels]` -> `[1, channels, height, width]`."""
    return Use("Mat2Tensor", data_format=None if data_format == "nchw" else data_format)


def Onnx(
    model: str | os.PathLike[str],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    precision: Literal["fp32", "fp16", "bf16", "int8", "best"] | None = None,
    runtime: Literal["auto", "cpu", "cuda", "tensorrt", "openvino"] | None = None,
    model_cache: str | None = None,
    threads: int | None = None,
) -> StepChain:
    """`[1, ...]` -> `[1, ...]` by an ONNX file, in batches, after `(x - mean) / std` per channel.

    The keyword parameters are the op's.
    """
    options = {"precision": precision, "runtime": runtime, "model_cache": model_cache, "threads": threads}
    return Use("OnnxTensor", model=os.fspath(model), mean=_list(mean), std=_list(std), **options)


def TorchScript(
    model: str | os.PathLike[str],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
) -> StepChain:
    """`[1, ...]` -> `[1, ...]` by a PyTorch file, in batches."""
    return Use("TorchScriptTensor", model=os.fspath(model), mean=_list(mean), std=_list(std), precision=precision)


def Softmax() -> StepChain:
    """`[rows, classes]` -> probabilities that sum to 1."""
    return Use("SoftmaxCpu")


def ArgMax() -> StepChain:
    """`[1, classes]` -> the best class, an int."""
    return Use("ArgMax")


def _list(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)
