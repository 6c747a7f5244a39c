"""Batches of a model: which calls they are run in, and one array of the arrays of many items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct

from penstock.errors import ConfigError
from penstock.runtimes.tensors import Input

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
