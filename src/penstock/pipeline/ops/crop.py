"""Cropping, and rectification of quadrangles. The field `_box` has the coordinates."""

from typing import Any

import numpy as np

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import BOX, Array, Fields, MatOp, as_mat
from penstock.pipeline.ops.data import field
from penstock.pipeline.ops.mat import cv2
from penstock.pipeline.ops.resize import MAX_PIXELS, check_size, sized
from penstock.values import shorten


def box_numbers(fields: Fields, op: str, shape: tuple[int, ...], words: str) -> Array:
    """The field `_box` as finite numbers, with at least `shape` elements on each axis. Raises BadRequest."""
    value = field(fields, BOX, op)
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
    return shorten(repr(value), 80)


def cropped(image: Array, fields: Fields, op: str) -> Array:
    """The part of an image in its box. Raises BadRequest if the box is empty or not inside the image."""
    height, width = image.shape[:2]
    x1, y1, x2, y2 = (int(v) for v in box_numbers(fields, op, (4,), "[x1, y1, x2, y2]")[:4])
    if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
        raise BadRequest(
            f"{op} found {BOX} = {_short(fields[BOX])}, expected 0 <= x1 < x2 <= {width} and 0 <= y1 < y2 <= {height}"
        )
    return image[y1:y2, x1:x2]


class CropMat(MatOp):
    """The part of the image in the box: `[height, width, channels]` -> `[y2 - y1, x2 - x1, channels]`, a view.

    `_box` is [x1, y1, x2, y2] in pixels, without x2 and y2. An empty box, or one outside the image, is an error.
    """

    reads = (BOX,)

    def image(self, mat: Array, fields: Fields) -> Array:
        return cropped(mat, fields, "CropMat")


class CropResizeMat(MatOp):
    """The part of the image in the box, at a size: `[height, width, channels]` -> `[resize_h, resize_w, channels]`.

    `_box` is [x1, y1, x2, y2] as fractions of width and height, 0 to 1. It is clipped to the image.

    - `resize_h`: the new height.
    - `resize_w`: the new width.
    - `enlarge_ratio`: the fraction of its width and height that is added to the box at each side.
    """

    reads = (BOX,)

    def __init__(self, resize_h: int, resize_w: int, enlarge_ratio: float = 0.0) -> None:
        check_size("CropResizeMat", resize_h=resize_h, resize_w=resize_w)
        if not -0.5 < enlarge_ratio <= 1000:
            raise ConfigError(f"CropResizeMat: enlarge_ratio = {enlarge_ratio}, expected above -0.5")
        self.size, self.ratio = (resize_h, resize_w), enlarge_ratio

    def image(self, mat: Array, fields: Fields) -> Array:
        h, w = mat.shape[:2]
        box = box_numbers(fields, "CropResizeMat", (4,), "[x1, y1, x2, y2]")
        x1, y1, x2, y2 = (int(v) for v in box[:4] * (w, h, w, h))
        more_x, more_y = int(self.ratio * (x2 - x1 + 1)), int(self.ratio * (y2 - y1 + 1))
        x1, y1, x2, y2 = max(0, x1 - more_x), max(0, y1 - more_y), min(w, x2 + more_x), min(h, y2 + more_y)
        if x1 >= x2 or y1 >= y2:
            raise BadRequest(f"CropResizeMat found {BOX} = {_short(fields[BOX])}, which contains nothing of the image")
        return sized(mat[y1:y2, x1:x2], *self.size)


def rectified(mat: Array, corners: Array, op: str, flags: int) -> Array:
    """The area inside four corners (upper left, upper right, lower right, lower left) as an upright image."""
    first, right, _, below = corners.astype(int)  # whole pixels, as in TorchPipe
    width, height = int(np.hypot(*(first - right))), int(np.hypot(*(first - below)))
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadRequest(f"{op} found a {BOX} of {width} x {height} pixels, expected 1 to {MAX_PIXELS}")
    upright = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    matrix = cv2.getPerspectiveTransform(corners.astype(int).astype(np.float32), upright)
    image = cv2.warpPerspective(mat, matrix, (width, height), flags=flags, borderMode=cv2.BORDER_CONSTANT)
    return image.reshape(height, width, *mat.shape[2:])


class PerspectiveTransformMat(MatOp):
    """The quadrangle in `_box` as an upright image, with nearest-neighbor sampling as in TorchPipe.

    `_box` is four points [x, y]: upper left, upper right, lower right, lower left.
    """

    reads = (BOX,)

    def image(self, mat: Array, fields: Fields) -> Array:
        op = "PerspectiveTransformMat"
        corners = box_numbers(fields, op, (4, 2), "four points [x, y]")
        return rectified(mat, corners[:4, :2], op, cv2.INTER_NEAREST)


class PerspectiveTransformMats(MatOp):
    """A list of upright images, one for each quadrangle in `_box` (`[n, 4, 2]`), bilinear."""

    gives = "any"
    reads = (BOX,)

    def __call__(self, data: Any, fields: Fields) -> list[Array]:
        op = "PerspectiveTransformMats"
        mat, boxes = as_mat(data, op), field(fields, BOX, op)
        if mat.ndim == 4 or (isinstance(boxes, list | tuple | np.ndarray) and len(boxes) == 0):
            return []
        corners = box_numbers(fields, op, (1, 4, 2), "a list of four points [x, y] each")
        return [rectified(mat, one[:4, :2], op, cv2.INTER_LINEAR) for one in corners]
