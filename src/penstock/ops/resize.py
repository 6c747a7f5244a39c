"""Images to other sizes: ResizeMat and what keeps the proportions. All bilinear, without smoothing, as OpenCV does."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.ops.arrays import Array, as_mat
from penstock.ops.base import Fields, ItemOp
from penstock.ops.cv import cv2

MAX_SIDE = 1 << 20


def check_sides(op: str, **sides: int) -> None:
    """Raises ConfigError where a side is not 1 to 2**20."""
    for name, side in sides.items():
        if not 1 <= side <= MAX_SIDE:
            raise ConfigError(f"{op}: {name} = {side}, expected 1 to {MAX_SIDE}")


class ResizeMat(ItemOp):
    """The image at another size: `[height, width, channels]` -> `[resize_h, resize_w, channels]`.

    - `resize_h`: the new height.
    - `resize_w`: the new width.
    """

    takes = "mat"
    gives = "mat"

    def __init__(self, resize_h: int, resize_w: int) -> None:
        check_sides("ResizeMat", resize_h=resize_h, resize_w=resize_w)
        self.size = (resize_w, resize_h)

    def __call__(self, data: Any, fields: Fields) -> Array:
        return cv2.resize(as_mat(data, "ResizeMat"), self.size, interpolation=cv2.INTER_LINEAR)
