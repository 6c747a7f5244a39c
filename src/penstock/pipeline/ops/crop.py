"""Parts of images: CropMat, CropResizeMat, and what straightens a quadrangle. The field `_box` says which part."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import BOX, Array, Fields, ItemOp, as_mat
from penstock.pipeline.ops.data import field
from penstock.pipeline.ops.mat import cv2
from penstock.pipeline.ops.resize import MAX_PIXELS, check_size, sized


def numbers(value: Any, op: str, shape: tuple[int, ...], words: str) -> Array:
    """A field as an array of finite numbers whose first axes have this shape. Raises BadRequest."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0)
    if array.ndim != len(shape) or any(has < least for has, least in zip(array.shape, shape, strict=True)):
        raise BadRequest(f"{op} found {BOX} = {_short(value)}, expected {words}")
    if not np.isfinite(array).all() or np.abs(array).max() > 2**31:
        raise BadRequest(f"{op} found {BOX} = {_short(value)}, expected finite numbers")
    return array


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."


def box_of(fields: Fields, op: str, height: int, width: int) -> tuple[int, int, int, int]:
    """The box [x1, y1, x2, y2] in pixels, inside the image and not empty. Raises BadRequest."""
    box = field(fields, BOX, op)
    x1, y1, x2, y2 = (int(v) for v in numbers(box, op, (4,), "[x1, y1, x2, y2]")[:4])
    if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        raise BadRequest(
            f"{op} found {BOX} = {_short(box)}, expected 0 <= x1 < x2 <= {width} and 0 <= y1 < y2 <= {height}"
        )
    return x1, y1, x2, y2


class CropMat(ItemOp):
    """The part of the image in the box: `[height, width, channels]` -> `[y2 - y1, x2 - x1, channels]`, a view.

    `_box` is [x1, y1, x2, y2] in pixels, x2 and y2 not in it. A box that is empty or not inside is an error.
    """

    takes = "mat"
    gives = "mat"
    reads = (BOX,)

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = as_mat(data, "CropMat")
        x1, y1, x2, y2 = box_of(fields, "CropMat", *mat.shape[:2])
        return mat[y1:y2, x1:x2]


class CropResizeMat(ItemOp):
    """The part of the image in the box, at a size: `[height, width, channels]` -> `[resize_h, resize_w, channels]`.

    `_box` is [x1, y1, x2, y2] in parts of width and height, 0 to 1. It is cut to the image.

    - `resize_h`: the new height.
    - `resize_w`: the new width.
    - `enlarge_ratio`: how much of its width and height is added to the box at each side.
    """

    takes = "mat"
    gives = "mat"
    reads = (BOX,)

    def __init__(self, resize_h: int, resize_w: int, enlarge_ratio: float = 0.0) -> None:
        check_size("CropResizeMat", resize_h=resize_h, resize_w=resize_w)
        if not -0.5 < enlarge_ratio <= 1000:
            raise ConfigError(f"CropResizeMat: enlarge_ratio = {enlarge_ratio}, expected above -0.5")
        self.height, self.width, self.ratio = resize_h, resize_w, enlarge_ratio

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = as_mat(data, "CropResizeMat")
        h, w = mat.shape[:2]
        box = field(fields, BOX, "CropResizeMat")
        x1, y1, x2, y2 = (int(v) for v in numbers(box, "CropResizeMat", (4,), "[x1, y1, x2, y2]")[:4] * (w, h, w, h))
        more_x, more_y = int(self.ratio * (x2 - x1 + 1)), int(self.ratio * (y2 - y1 + 1))
        x1, y1, x2, y2 = max(0, x1 - more_x), max(0, y1 - more_y), min(w, x2 + more_x), min(h, y2 + more_y)
        if x1 >= x2 or y1 >= y2:
            raise BadRequest(f"CropResizeMat found {BOX} = {_short(box)}, which has nothing of the image in it")
        return sized(mat[y1:y2, x1:x2], self.height, self.width)


def straightened(mat: Array, corners: Array, op: str, flags: int) -> Array:
    """What is inside four corners (upper left, upper right, lower right, lower left), as an upright image."""
    first, right, _, below = corners.astype(int)  # whole pixels, as TorchPipe has them
    width, height = int(np.hypot(*(first - right))), int(np.hypot(*(first - below)))
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadRequest(f"{op} found a {BOX} of {width} x {height} pixels, expected 1 to {MAX_PIXELS}")
    upright = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    matrix = cv2.getPerspectiveTransform(corners.astype(int).astype(np.float32), upright)
    image = cv2.warpPerspective(mat, matrix, (width, height), flags=flags, borderMode=cv2.BORDER_CONSTANT)
    return image.reshape(height, width, *mat.shape[2:])


class PerspectiveTransformMat(ItemOp):
    """The quadrangle in `_box` as an upright image, the nearest pixel for each, as TorchPipe does it.

    `_box` is four points [x, y]: upper left, upper right, lower right, lower left.
    """

    takes = "mat"
    gives = "mat"
    reads = (BOX,)

    def __call__(self, data: Any, fields: Fields) -> Array:
        op = "PerspectiveTransformMat"
        corners = numbers(field(fields, BOX, op), op, (4, 2), "four points [x, y]")
        return straightened(as_mat(data, op), corners[:4, :2], op, cv2.INTER_NEAREST)


class PerspectiveTransformMats(ItemOp):
    """A list of upright images, one for each quadrangle in `_box` (`[n, 4, 2]`), bilinear."""

    takes = "mat"
    reads = (BOX,)

    def __call__(self, data: Any, fields: Fields) -> list[Array]:
        op = "PerspectiveTransformMats"
        mat, boxes = as_mat(data, op), field(fields, BOX, op)
        if isinstance(boxes, list | tuple) and not boxes:
            return []
        corners = numbers(boxes, op, (1, 4, 2), "a list of four points [x, y] each")
        return [straightened(mat, one[:4, :2], op, cv2.INTER_LINEAR) for one in corners]
