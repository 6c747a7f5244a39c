"""Batches of a model: which calls they are run in, and one array of the arrays of many items."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import Fields, ItemOp, found
from penstock.runtimes.tensors import Input
from penstock.types import DTYPES

Array = np.ndarray[Any, Any]


@lru_cache(maxsize=1024)
def calls(rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of calls, largest first, that have room for `rows`; the last may be filled up.

    They are the cheapest, where a call costs as much as one row more than it has: [1, 4, 8] runs 5 rows as 4 + 1, and 7
    as 8.
    """
    most = max(sizes)
    # of `most` smaller calls some add up to calls of `most`, which are fewer: there are never so many
    whole = max(0, rows // most - most)
    cheapest = [(0, 0)]  # for each number of rows: the cost, and the size of the last call
    for n in range(1, rows - whole * most + 1):
        cheapest.append(min((cheapest[max(0, n - size)][0] + size + 1, size) for size in sizes))
    found = [most] * whole
    left = len(cheapest) - 1
    while left > 0:
        found.append(cheapest[left][1])
        left -= found[-1]
    return tuple(sorted(found, reverse=True))


def chunks(rows: int, least: int, most: int) -> tuple[int, ...]:
    """Sizes of calls that have room for `rows`, where any size from `least` to `most` may be run."""
    full, rest = divmod(rows, most)
    return (most,) * full + ((max(rest, least),) if rest else ())


class Normalization(Struct, frozen=True):
    """`(x - mean) * scale` in float32; both have a shape that broadcasts to the input's."""

    mean: Array
    scale: Array


def normalizations(
    inputs: Sequence[Input], mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Normalization]:
    """For each input of images, by its name, what `mean` and `std` make of it; nothing where neither is given.

    An input of images has the axes `[rows, channels, height, width]`, or the channels last. Raises ConfigError.
    """
    if not mean and not std:
        return {}
    images = [
        i for i in inputs if (i.shape is None or len(i.shape) == 4) and i.datatype in (None, "FP16", "FP32", "FP64")
    ]
    if not images:
        told = ", ".join(f"'{i.name}' {i.datatype} {list(i.shape or ())}" for i in inputs)
        raise ConfigError(f"mean and std are of images, and the model has none: its inputs are {told}")
    found = {}
    for spec in images:
        middle, spread = (
            _constant(spec, key, values) for key, values in (("mean", mean or (0.0,)), ("std", std or (1.0,)))
        )
        found[spec.name] = Normalization(middle.astype(np.float32), (1 / spread).astype(np.float32))
    return found


def _constant(spec: Input, key: str, values: tuple[float, ...]) -> Array:
    """One number for each channel, or for all, in a shape that broadcasts to the input's."""
    shape, count = spec.shape or (-1, -1, -1, -1), len(values)
    if count == 1 or shape[1] in (-1, count):
        return np.array(values).reshape(1, count, 1, 1)
    if shape[3] == count:
        return np.array(values).reshape(1, 1, 1, count)
    raise ConfigError(
        f"{key}: found {count} values, expected one, or one for each of the channels of input '{spec.name}'"
        f" {list(shape)}"
    )


class Collator:
    """Makes one array of many, in memory that the next batch takes again: it is read until then, and not kept.

    A thread's own. The memory grows to that of the largest batch.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def batch(
        self, arrays: Sequence[Array], rows: int, dtype: np.dtype[Any], normalization: Normalization | None = None
    ) -> Array:
        """`[rows, ...]` of `dtype`: the arrays, one behind the other on axis 0, cast and normalised; then zeros."""
        first = arrays[0]
        if dtype.hasobject:
            return np.concatenate(arrays).astype(dtype)  # texts: there is no memory of a known size
        if len(arrays) == 1 and len(first) == rows and first.dtype == dtype and normalization is None:
            return np.ascontiguousarray(first)
        batch = self._room((rows, *first.shape[1:]), dtype)
        start = 0
        for array in arrays:
            part = batch[start : start + len(array)]
            np.copyto(part, array, casting="unsafe")
            if normalization is not None:  # image by image, while it is in the cache
                part -= normalization.mean
                part *= normalization.scale
            start += len(array)
        batch[start:] = 0
        return batch

    def _room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size = dtype.itemsize * math.prod(shape)
        if self._memory.nbytes < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].view(dtype).reshape(shape)


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


class PadTo(ItemOp):
    """The tensor with its sides filled up with zeros, to the right and below, to the next of `sizes`: of an image
    height and width, of `[1, length]` and `[1, length, features]` the length. Sides beyond the last stay.

    What is no such tensor stays as it is.
    """

    takes = "tensor"
    gives = "tensor"

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def __call__(self, data: Any, fields: Fields) -> Any:
        if isinstance(data, list | tuple):
            return [self(each, fields) for each in data]
        if not isinstance(data, np.ndarray):
            return data
        shape = self.shape(data.shape, fields)
        if shape == data.shape:
            return data
        padded = np.zeros(shape, data.dtype)
        padded[tuple(map(slice, data.shape))] = data
        return padded

    def shape(self, shape: tuple[int, ...], fields: Fields) -> tuple[int, ...]:
        """The shape that a tensor of `shape` is given."""
        if not 2 <= len(shape) <= 4:
            return shape
        channels_last = fields.get("data_format") in ("nhwc", "hwc")
        axes = (1,) if len(shape) < 4 else (1, 2) if channels_last else (2, 3)
        return tuple(self._side(side) if axis in axes else side for axis, side in enumerate(shape))

    def _side(self, side: int) -> int:
        place = bisect_left(self._sizes, side)
        return self._sizes[place] if place < len(self._sizes) else side
