"""One size for all images of a batch, for lines of text: AlignMat, BatchFixHLimitW. Those that resize come behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.arrays import Array, as_mat
from penstock.pipeline.ops.base import BatchOp, Fields
from penstock.pipeline.ops.resize import check_size


class AlignMat(BatchOp):
    """The images as they are; `resize_h` and `resize_w` say a size for all of the batch, for DynamicResizeMat.

    As wide as the widest of them is at that height, rounded up, and at most `max_w`.

    - `resize_h`: the height.
    - `max_w`: the most width, a multiple of `align`.
    - `align`: what the width is a multiple of.
    """

    takes = "mat"
    gives = "mat"
    writes = ("resize_h", "resize_w")

    def __init__(self, resize_h: int, max_w: int, align: int = 32) -> None:
        name = type(self).__name__
        check_size(name, resize_h=resize_h, max_w=max_w)
        if align < 1 or max_w % align:
            raise ConfigError(f"{name}: max_w = {max_w} and align = {align}, expected max_w to be a multiple of align")
        self.height, self.max_w, self.align = resize_h, max_w, align

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        mats = [self._mat(one) for one in data]
        widths = [self.height * mat.shape[1] // mat.shape[0] for mat in mats if not isinstance(mat, BadRequest)]
        width = min(self.max_w, -(-max(widths, default=1) // self.align) * self.align)
        height_name, width_name = self.writes
        for one in fields:
            one[height_name], one[width_name] = self.height, max(width, self.align)
        return mats

    def _mat(self, data: Any) -> Array | BadRequest:
        """The image, or the error of what is none: it fails alone."""
        try:
            return as_mat(data, type(self).__name__)
        except BadRequest as e:
            return e


class BatchFixHLimitW(AlignMat):
    """The images as they are; `resize_h` and `max_w` say a size for all of the batch, for DynamicFixHResizePadMat."""

    writes = ("resize_h", "max_w")
