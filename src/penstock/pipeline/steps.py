"""Steps of nodes for pipelines that are built in Python: `Decode("rgb") >> Resize(224, 224) >> ToTensor()`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from penstock.config.toml import found
from penstock.errors import ConfigError
from penstock.pipeline.lower import TARGET

Color = Literal["rgb", "bgr", "gray"]
Target = str | type[Any] | Callable[..., Any]
"""An op by its name, or a class or function of one's own."""


class Steps:
    """Ops in a row, each a table as a node's `ops` has them. `>>` puts more behind them."""

    def __init__(self, *tables: dict[str, Any]) -> None:
        self.tables = tables

    def __rshift__(self, other: Steps | Target) -> Steps:
        return Steps(*self.tables, *steps_of(other).tables)

    def __rrshift__(self, other: Target) -> Steps:
        return Steps(*steps_of(other).tables, *self.tables)

    def __repr__(self) -> str:
        return " >> ".join(str(table.get(TARGET, table["op"])) for table in self.tables)


def steps_of(value: Steps | Target) -> Steps:
    """The steps that a value means. Raises ConfigError: it is none, or a class that cannot be found by its name."""
    return value if isinstance(value, Steps) else Use(value)


def Use(target: Target, /, **params: Any) -> Steps:
    """Any op by its name, or a class or function of one's own, with its parameters."""
    given = {key: value for key, value in params.items() if value is not None}
    if isinstance(target, str):
        return Steps({"op": "Python", TARGET: target, **given} if ":" in target else {"op": target, **given})
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        told = f"found {found(target)}, expected a class or a function"
        raise ConfigError(f"{told}; write Use({type(target).__name__}, ...) with its parameters")
    name = f"{target.__module__}:{target.__qualname__}"
    if "<" in name:
        raise ConfigError(f"{name} cannot be found by its name: define it at the top of a module")
    return Steps({"op": "Python", TARGET: name, **given})


def importable(tables: Sequence[dict[str, Any] | str]) -> list[dict[str, Any] | str]:
    """The ops with the file of the program that runs in place of `__main__`, which other programs do not have."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    changed: list[dict[str, Any] | str] = []
    for table in tables:
        name = str(table.get(TARGET, "")) if isinstance(table, dict) else ""
        if isinstance(table, dict) and name.startswith("__main__:"):
            if file is None:
                raise ConfigError(f"{name} is defined in no file; define it in a module to write it to a TOML file")
            table = {**table, TARGET: f"{os.path.abspath(file)}:{name.partition(':')[2]}"}
        changed.append(table)
    return changed


def Decode(color: Color = "bgr", *, scale: tuple[int, int] | None = None) -> Steps:
    """Bytes of an image -> `[height, width, 3]` uint8. `scale`: height and width wanted later, for a faster decoding
    of JPEGs that changes pixels a little."""
    height, width = scale or (None, None)
    decoded = Use("DecodeMat", scale_h=height, scale_w=width)
    return decoded if color == "bgr" else decoded >> Use("CvtColorMat", color=color)


def Convert(color: Color) -> Steps:
    """`[height, width, 3]` -> the same in other colours."""
    return Use("CvtColorMat", color=color)


def Resize(height: int, width: int, *, pillow: bool = False) -> Steps:
    """`[h, w, channels]` -> `[height, width, channels]`; `pillow`: bit for bit as Pillow does it, which is slower."""
    return Use("PillowResizeMat" if pillow else "ResizeMat", resize_h=height, resize_w=width)


def Letterbox(height: int, width: int | None = None, *, pad_value: float | None = None) -> Steps:
    """`[h, w, channels]` -> `[height, width, channels]`, its proportions kept, in the middle; by default a square."""
    return Use("ResizeCenterPadMat", max_h=height, max_w=width or height, pad_value=pad_value)


def ToTensor(data_format: Literal["nchw", "nhwc"] = "nchw") -> Steps:
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
) -> Steps:
    """`[1, ...]` -> `[1, ...]` by an ONNX file, in batches. `(x - mean) / std` is done before it, for each channel."""
    options: dict[str, Any] = {
        "precision": precision,
        "runtime": runtime,
        "model_cache": model_cache,
        "threads": threads,
    }
    return Use("OnnxTensor", model=os.fspath(model), mean=_list(mean), std=_list(std), **options)


def TorchScript(
    model: str | os.PathLike[str],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
) -> Steps:
    """`[1, ...]` -> `[1, ...]` by a file of PyTorch, in batches."""
    return Use("TorchScriptTensor", model=os.fspath(model), mean=_list(mean), std=_list(std), precision=precision)


def Softmax() -> Steps:
    """`[rows, classes]` -> shares that sum up to 1."""
    return Use("SoftmaxCpu")


def ArgMax() -> Steps:
    """`[1, classes]` -> the best class, an int."""
    return Use("ArgMax")


def _list(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)
