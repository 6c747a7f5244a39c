"""Batches of a model: which items can share one, which calls run it, and one array made from many."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.arrays import MOST_PARTS
from penstock.core.worker.tensor_model import Input
from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import Array, Fields, ItemOp, found, is_torch
from penstock.runtimes.pixels import Normalization
from penstock.types import DTYPES

PIXELS = np.dtype(np.uint8)

Pad = Callable[[tuple[int, ...]], tuple[int, ...]]


# ---- which items can share a batch


def shape_of(value: Any, pad: Pad | None = None) -> str:
    """The dtype and padded shape of an array without axis 0, for each array of a list; the text of a plain value.

    Arrays with the same text can share a batch.
    """
    if isinstance(value, (list, tuple)):
        return " ".join(_shape_of(each, pad) for each in value[:MOST_PARTS])
    return _shape_of(value, pad)


def _shape_of(value: Any, pad: Pad | None) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        dtype = getattr(value.dtype, "str", value.dtype)  # NumPy computes the name in Python, in 7 us
        return f"{dtype}{(tuple(shape) if pad is None else pad(tuple(shape)))[1:]}"
    return str(value) if isinstance(value, (str, int, float, bool)) else type(value).__name__


class PadTo(ItemOp):
    """The tensor with its sides padded with zeros, to the right and below, to the next of `sizes`.

    The sides are height and width of an image, and the length of `[1, length]` and `[1, length, features]`. Longer
    sides and other values stay unchanged.
    """

    takes = "tensor"
    gives = "tensor"

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def __call__(self, data: Any, fields: Fields) -> Any:
        if isinstance(data, list | tuple):
            return [self(each, fields) for each in data]
        if is_torch(data):
            data = data.cpu().numpy()
        if not isinstance(data, np.ndarray):
            return data
        shape = self.shape(data.shape, fields)
        if shape == data.shape:
            return data
        padded = np.zeros(shape, data.dtype)
        padded[tuple(map(slice, data.shape))] = data
        return padded

    def shape(self, shape: tuple[int, ...], fields: Fields) -> tuple[int, ...]:
        """The padded shape of a tensor of `shape`."""
        if not 2 <= len(shape) <= 4:
            return shape
        channels_last = fields.get("data_format") in ("nhwc", "hwc")
        axes = (1,) if len(shape) < 4 else (1, 2) if channels_last else (2, 3)
        return tuple(self._side(side) if axis in axes else side for axis, side in enumerate(shape))

    def _side(self, side: int) -> int:
        place = bisect_left(self._sizes, side)
        return self._sizes[place] if place < len(self._sizes) else side


# ---- which calls run a batch


@lru_cache(maxsize=1024)
def calls(rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of calls, largest first, that together hold `rows`. The last may need padding.

    They minimize the cost, if a call costs as much as its size plus one: [1, 4, 8] runs 5 rows as 4 + 1, and 7 as 8.
    """
    most = max(sizes)
    # an optimal plan has fewer than `most` smaller calls, because some of so many would add up to calls of `most`
    whole = max(0, rows // most - most)
    cheapest = [(0, 0)]  # for each number of rows: the cost, and the size of the last call
    for n in range(1, rows - whole * most + 1):
        cheapest.append(min((cheapest[max(0, n - size)][0] + size + 1, size) for size in sizes))
    plan = [most] * whole
    left = len(cheapest) - 1
    while left > 0:
        plan.append(cheapest[left][1])
        left -= plan[-1]
    return tuple(sorted(plan, reverse=True))


def chunks(rows: int, least: int, most: int) -> tuple[int, ...]:
    """Sizes of calls that together hold `rows`, if any size from `least` to `most` can run."""
    full, rest = divmod(rows, most)
    return (most,) * full + ((max(rest, least),) if rest else ())


# ---- whether an item fits an input


def normalizations(
    inputs: Sequence[Input], mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Normalization]:
    """The normalization of each image input, by name; empty without `mean` and `std`.

    An image input has the axes `[rows, channels, height, width]`, or the channels last. Raises ConfigError.
    """
    if not mean and not std:
        return {}
    images = [
        i for i in inputs if (i.shape is None or len(i.shape) == 4) and i.datatype in (None, "FP16", "FP32", "FP64")
    ]
    if not images:
        listed = ", ".join(f"'{i.name}' {i.datatype} {list(i.shape or ())}" for i in inputs)
        raise ConfigError(f"mean and std apply to images, but the model takes none: its inputs are {listed}")
    made = {}
    for spec in images:
        middle = _per_channel(spec, "mean", mean or (0.0,))
        spread = _per_channel(spec, "std", std or (1.0,))
        made[spec.name] = Normalization(middle.astype(np.float32), (1 / spread).astype(np.float32))
    return made


def _per_channel(spec: Input, key: str, values: tuple[float, ...]) -> Array:
    """One number for each channel, or one for all, in a shape that broadcasts to the input's."""
    shape, count = spec.shape or (-1, -1, -1, -1), len(values)
    if count == 1 or shape[1] in (-1, count):
        return np.array(values).reshape(1, count, 1, 1)
    if shape[3] == count:
        return np.array(values).reshape(1, 1, 1, count)
    raise ConfigError(
        f"{key}: found {count} values, expected one, or one for each of the channels of input '{spec.name}'"
        f" {list(shape)}"
    )


def array_of(spec: Input, value: Any) -> Array:
    """The value as an array on the CPU, without a copy for a PyTorch tensor there. Raises BadRequest."""
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.asarray(value.cpu() if is_torch(value) else value if hasattr(value, "__array__") else None)
    except Exception:  # a tensor with a gradient
        array = np.empty(0, object)
    if array.dtype.hasobject:
        raise BadRequest(f"input '{spec.name}' of the model is {_expected(spec)}, found {found(value)}")
    return array


def check_input(spec: Input, array: Array, normalization: Normalization | None) -> None:
    """Raises BadRequest for an array that the input does not accept."""
    shape = spec.shape
    if shape is not None and (
        array.ndim != len(shape) or any(n not in (-1, m) for n, m in zip(shape, array.shape, strict=True))
    ):
        wrong = True
    elif normalization is not None:
        channels = normalization.scale.shape
        wrong = array.ndim != 4 or any(n not in (1, m) for n, m in zip(channels, array.shape, strict=True))
    else:
        wrong = array.ndim == 0
    if wrong or not _castable(spec, array.dtype, normalization):
        is_image = array.ndim in (2, 3) or (array.ndim == 4 and array.shape[3] in (1, 3))
        hint = "; Mat2Tensor makes [1, channels, height, width] of an image" if is_image else ""
        raise BadRequest(f"input '{spec.name}' of the model is {_expected(spec)}, found {found(array)}{hint}")


def _castable(spec: Input, dtype: np.dtype[Any], normalization: Normalization | None) -> bool:
    """Whether numbers can be cast: any real number to a float, other types only without loss."""
    if normalization is not None or spec.datatype in ("FP16", "FP32", "FP64"):
        return dtype.kind in "biuf"
    return spec.datatype is None or np.can_cast(dtype, DTYPES[spec.datatype], "safe")


def dtype_of(spec: Input, array: Array, normalization: Normalization | None) -> np.dtype[Any]:
    """The dtype of a batch. Without a declared type, pixels become floats, as image networks expect."""
    if spec.datatype is not None:
        return np.dtype(DTYPES[spec.datatype])
    return np.dtype(np.float32) if normalization is not None or array.dtype == PIXELS else array.dtype


def _expected(spec: Input) -> str:
    name = "a tensor" if spec.datatype is None else str(np.dtype(DTYPES[spec.datatype]))
    if spec.shape is None:
        return name
    sides = ["any" if n == -1 else str(n) for n in spec.shape]
    sides[0] = "rows" if spec.shape[0] == -1 else sides[0]
    return f"{name} [{', '.join(sides)}]"


# ---- one array


class Collator:
    """Concatenates arrays in memory that the next batch reuses. The memory grows to the largest batch.

    Each thread needs its own.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def batch(
        self, arrays: Sequence[Array], rows: int, dtype: np.dtype[Any], normalization: Normalization | None = None
    ) -> Array:
        """`[rows, ...]` of `dtype`: the arrays concatenated on axis 0, cast and normalized, then zeros."""
        first = arrays[0]
        if dtype.hasobject:
            texts = np.concatenate(arrays).astype(dtype)  # in new memory, because the size of texts is unknown
            padding = np.full((rows - len(texts), *first.shape[1:]), "", dtype)
            return np.concatenate([texts, padding]) if len(padding) else texts
        if len(arrays) == 1 and len(first) == rows and first.dtype == dtype and normalization is None:
            return np.ascontiguousarray(first)
        batch = self._reserve((rows, *first.shape[1:]), dtype)
        start = 0
        for array in arrays:
            part = batch[start : start + len(array)]
            if normalization is None:
                np.copyto(part, array, casting="unsafe")
            else:
                normalization.write(array, part)
            start += len(array)
        batch[start:] = 0
        return batch

    def _reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size = dtype.itemsize * math.prod(shape)
        if self._memory.nbytes < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype).reshape(shape)
