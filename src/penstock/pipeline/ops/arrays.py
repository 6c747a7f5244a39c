"""What ops take, checked: mats and tensors, or an error that tells what was found and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest

Array = NDArray[Any]
MAT_TYPES = ("uint8", "float32")


def found(value: Any) -> str:
    """What a value is, in few words: `uint8 array [480, 640, 3]`, `str`."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {list(value.shape)}"
    if isinstance(value, list):
        return f"list of {found(value[0]) if value else 'nothing'}"
    return type(value).__name__


def as_mat(data: Any, op: str, *, any_type: bool = False) -> Array:
    """The value, if it is an image: an array `[height, width]` or `[height, width, 1 to 4]`, uint8 or float32.

    Raises BadRequest. `any_type` lets other numbers pass.
    """
    if not isinstance(data, np.ndarray):
        raise BadRequest(f"{op} found {found(data)}, expected an image (an array [height, width, channels])")
    shape = data.shape
    if not (data.ndim == 2 or (data.ndim == 3 and 1 <= shape[2] <= 4)) or 0 in shape:
        raise BadRequest(f"{op} found {found(data)}, expected [height, width] or [height, width, 1 to 4 channels]")
    if data.dtype.name not in MAT_TYPES and not (any_type and data.dtype.kind in "biuf"):
        raise BadRequest(f"{op} found {found(data)}, expected uint8 or float32: put FloatMat before it")
    return data


def as_tensor(data: Any, op: str, ndim: int | None = None) -> Array:
    """The value, if it is an array of numbers with `ndim` axes, axis 0 its rows. Raises BadRequest."""
    if not isinstance(data, np.ndarray) or data.dtype.kind not in "biuf":
        raise BadRequest(f"{op} found {found(data)}, expected a tensor (an array of numbers)")
    if data.ndim == 0 or 0 in data.shape or (ndim is not None and data.ndim != ndim):
        shape = "[rows, ...]" if ndim is None else f"{ndim} axes"
        raise BadRequest(f"{op} found {found(data)}, expected {shape}, none of them empty")
    return data
