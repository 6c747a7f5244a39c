"""One item of a model: whether it fits an input, and what it is cast to."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.collate import Normalization
from penstock.pipeline.ops.arrays import found
from penstock.runtimes.tensors import Input
from penstock.types import DTYPES

Array = np.ndarray[Any, Any]
PIXELS = np.dtype(np.uint8)


def array_of(spec: Input, value: Any) -> Array:
    """The value as an array; a tensor of PyTorch on the CPU is one without a copy. Raises BadRequest."""
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.asarray(value if hasattr(value, "__array__") else None)
    except Exception:  # of a tensor on a GPU, or one that has a gradient
        array = np.empty(0, object)
    if array.dtype.hasobject:
        raise BadRequest(f"input '{spec.name}' of the model is {_expected(spec)}, found {found(value)}")
    return array


def check(spec: Input, array: Array, normalization: Normalization | None) -> None:
    """Raises BadRequest for an array that the input does not take."""
    shape = spec.shape
    if shape is not None and (
        array.ndim != len(shape) or any(n not in (-1, m) for n, m in zip(shape[1:], array.shape[1:], strict=True))
    ):
        wrong = True
    elif normalization is not None:
        channels = normalization.scale.shape
        wrong = array.ndim != 4 or any(n not in (1, m) for n, m in zip(channels, array.shape, strict=True))
    else:
        wrong = array.ndim == 0
    if wrong or not _fits(spec, array.dtype, normalization):
        hint = "; Mat2Tensor makes [1, channels, height, width] of an image" if _is_image(array) else ""
        raise BadRequest(f"input '{spec.name}' of the model is {_expected(spec)}, found {found(array)}{hint}")


def _is_image(array: Array) -> bool:
    return array.ndim in (2, 3) or (array.ndim == 4 and array.shape[3] in (1, 3))


def _fits(spec: Input, dtype: np.dtype[Any], normalization: Normalization | None) -> bool:
    """Whether numbers may be cast: any real ones to floats, else only without loss."""
    if normalization is not None or spec.datatype in ("FP16", "FP32", "FP64"):
        return dtype.kind in "biuf"
    return spec.datatype is None or np.can_cast(dtype, DTYPES[spec.datatype], "safe")


def dtype_of(spec: Input, array: Array, normalization: Normalization | None) -> np.dtype[Any]:
    """What a batch is cast to; pixels become floats where the program does not tell, as networks of images want."""
    if spec.datatype is not None:
        return np.dtype(DTYPES[spec.datatype])
    return np.dtype(np.float32) if normalization is not None or array.dtype == PIXELS else array.dtype


def _expected(spec: Input) -> str:
    name = "a tensor" if spec.datatype is None else str(np.dtype(DTYPES[spec.datatype]))
    sides = ["rows", *("any" if n == -1 else str(n) for n in (spec.shape or ())[1:])]
    return f"{name} [{', '.join(sides)}]" if spec.shape is not None else name
