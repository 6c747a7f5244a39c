"""PadTo: tensors of many shapes filled up to a few, so that a model takes them in fewer calls."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from penstock.pipeline.ops.base import Fields, ItemOp


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
