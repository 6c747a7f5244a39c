"""Colours and number types of mats: CvtColorMat, FloatMat."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.ops.arrays import Array, as_mat, found
from penstock.pipeline.ops.base import Fields, ItemOp
from penstock.pipeline.ops.cv import cv2

Color = Literal["rgb", "bgr", "gray"]
_CODES: dict[tuple[str, str], int] = {
    ("bgr", "rgb"): cv2.COLOR_BGR2RGB,
    ("rgb", "bgr"): cv2.COLOR_RGB2BGR,
    ("bgr", "gray"): cv2.COLOR_BGR2GRAY,
    ("rgb", "gray"): cv2.COLOR_RGB2GRAY,
    ("gray", "bgr"): cv2.COLOR_GRAY2BGR,
    ("gray", "rgb"): cv2.COLOR_GRAY2RGB,
}
CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}


def color_of(fields: Fields, channels: int) -> str:
    """What the item's `color` says its data is; OpenCV's order where it says nothing. Raises BadRequest."""
    color = fields.get("color", "gray" if channels == 1 else "bgr")
    if not isinstance(color, str) or color not in CHANNELS:
        raise BadRequest(f"the field color is {color!r}, expected one of {', '.join(CHANNELS)}")
    return color


class CvtColorMat(ItemOp):
    """The image in other colours: `[height, width, 3]` or gray -> `[height, width, 3]`, or `[height, width]` for gray.

    From what the field `color` says ("bgr" where there is none); sets it.

    - `color`: "rgb", "bgr" or "gray".
    """

    takes = "mat"
    gives = "mat"
    writes = ("color",)

    def __init__(self, color: Color) -> None:
        self.color = color

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = as_mat(data, "CvtColorMat")
        channels = 1 if mat.ndim == 2 else mat.shape[2]
        now = color_of(fields, channels)
        if channels != CHANNELS[now]:
            raise BadRequest(f"CvtColorMat found {found(mat)}, expected {CHANNELS[now]} channels (color is {now})")
        fields["color"] = self.color
        return mat if now == self.color else cv2.cvtColor(mat, _CODES[now, self.color])


class FloatMat(ItemOp):
    """The image as float32, its values as they are: any numbers `[height, width, channels]` -> float32."""

    takes = "mat"
    gives = "mat"

    def __call__(self, data: Any, fields: Fields) -> Array:
        return as_mat(data, "FloatMat", any_type=True).astype(np.float32, copy=False)
