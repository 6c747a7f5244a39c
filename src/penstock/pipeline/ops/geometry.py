"""Ops that resize, pad, align, crop and rectify images. The field `_box` has the coordinates of a crop.

Bilinear: OpenCV's without antialiasing, or Pillow's with it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from penstock.errors import BadRequest, ConfigError, PenstockError
from penstock.pipeline.ops.base import BOX, Array, BatchOp, Fields, MatOp, as_mat, found
from penstock.pipeline.ops.data import field
from penstock.pipeline.ops.mat import cv2
from penstock.values import shorten

MAX_SIDE = 1 << 20
MAX_PIXELS = 100 << 20


def check_size(op: str, error: type[PenstockError] = ConfigError, /, **sides: int) -> None:
    """Raises `error` if a side is not 1 to 2**20, or their product exceeds 100 Mi pixels."""
    for name, side in sides.items():
        if not 1 <= side <= MAX_SIDE:
            raise error(f"{op}: {name} = {side}, expected 1 to {MAX_SIDE}")
    if math.prod(sides.values()) > MAX_PIXELS:
        named = " and ".join(f"{name} = {side}" for name, side in sides.items())
        raise error(f"{op}: {named} are {math.prod(sides.values())} pixels, expected at most {MAX_PIXELS}")


def sized(mat: Array, height: int, width: int) -> Array:
    """The image at another size, with the same axes; the same array if it already has that size."""
    if mat.shape[:2] == (height, width):
        return mat
    resized = cv2.resize(mat, (width, height), interpolation=cv2.INTER_LINEAR)
    return resized.reshape(height, width, *mat.shape[2:])  # OpenCV drops a channel axis of 1


class Inverse(Struct, frozen=True):
    """The inverse of a resize: `inverse(x, y)` is the point (x, y) in the original image.

    With a `width` above 0, points are clipped to the original image, as in ResizeCenterPadMat.
    """

    scale_x: float
    scale_y: float
    left: int = 0
    top: int = 0
    width: int = 0
    height: int = 0

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        x, y = self.scale_x * (x - self.left), self.scale_y * (y - self.top)
        if not self.width:
            return x, y
        return min(max(x, 0.0), self.width - 1), min(max(y, 0.0), self.height - 1)


def fitted(mat: Array, bounds: tuple[int, int], *, up: bool = False) -> tuple[int, int]:
    """The largest (height, width) with the image's proportions inside the bounds, each at least 1. `up` rounds up.

    It computes in 32 bits as TorchPipe does, because another rounding gives another image.
    """
    max_h, max_w = bounds
    ratio = np.float32(mat.shape[1]) / np.float32(mat.shape[0])

    def whole(value: np.float32) -> int:
        return math.ceil(value) if up else math.floor(float(value) + 0.5)

    if np.float32(max_h) * ratio <= max_w:
        return max_h, max(1, whole(np.float32(max_h) * ratio))
    return max(1, whole(np.float32(max_w) / ratio)), max_w


class ResizeMat(MatOp):
    """The image at another size: `[height, width, channels]` -> `[resize_h, resize_w, channels]`.

    - `resize_h`: the new height.
    - `resize_w`: the new width.
    """

    def __init__(self, resize_h: int, resize_w: int) -> None:
        check_size(type(self).__name__, resize_h=resize_h, resize_w=resize_w)
        self.size = (resize_h, resize_w)

    def image(self, mat: Array, fields: Fields) -> Array:
        return sized(mat, *self.size)


class PillowResizeMat(ResizeMat):
    """The image at another size, bit-identical to Pillow's bilinear filter: uint8 `[height, width, 3]` or gray.

    Pillow applies antialiasing, as torchvision does, so networks trained that way receive the same pixels.
    """

    def image(self, mat: Array, fields: Fields) -> Array:
        return pillow_sized(mat, *self.size, "PillowResizeMat")


def pillow_sized(mat: Array, height: int, width: int, op: str) -> Array:
    """The image at another size by Pillow, with the same axes. Raises BadRequest unless it is uint8, RGB or gray."""
    from PIL import Image

    channels = 1 if mat.ndim == 2 else mat.shape[2]
    if mat.dtype != np.uint8 or channels not in (1, 3):
        raise BadRequest(f"{op} found {found(mat)}, expected uint8 with 1 or 3 channels")
    flat = mat[:, :, 0] if mat.ndim == 3 and channels == 1 else mat
    resized = Image.fromarray(np.ascontiguousarray(flat)).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized).reshape(height, width, *mat.shape[2:])


class FixRatioResizeMat(MatOp):
    """The image scaled to fit, with its proportions kept: `[height, width, channels]` -> at most `max_h` x `max_w`.

    `inverse_trans` maps points back.

    - `max_h`: largest height.
    - `max_w`: largest width.
    """

    writes = ("inverse_trans",)

    def __init__(self, max_h: int, max_w: int) -> None:
        check_size(type(self).__name__, max_h=max_h, max_w=max_w)
        self.bounds = (max_h, max_w)

    def image(self, mat: Array, fields: Fields) -> Array:
        return sized(mat, *self.fit(mat, fields, up=True))

    def fit(self, mat: Array, fields: Fields, *, up: bool = False) -> tuple[int, int]:
        """The size of the image inside the bounds, as in `fitted`. Sets `inverse_trans`."""
        height, width = fitted(mat, self.bounds, up=up)
        fields["inverse_trans"] = Inverse(mat.shape[1] / width, mat.shape[0] / height)
        return height, width


def padded(mat: Array, height: int, width: int, value: tuple[float, ...], *, top: int = 0, left: int = 0) -> Array:
    """The image in a frame of one color, `[height, width]` in all, with the same axes."""
    h, w = mat.shape[:2]
    if (h, w) == (height, width):
        return mat
    border = (top, height - h - top, left, width - w - left)
    framed = cv2.copyMakeBorder(mat, *border, cv2.BORDER_CONSTANT, value=value)
    return framed.reshape(height, width, *mat.shape[2:])


def four(pad_value: tuple[float, ...], op: str) -> tuple[float, ...]:
    """A color of four channels for OpenCV, with the last given channel repeated. Raises ConfigError."""
    if not 1 <= len(pad_value) <= 4 or not all(map(math.isfinite, pad_value)):
        raise ConfigError(f"{op}: pad_value = {pad_value}, expected 1 to 4 numbers")
    return tuple(map(float, (pad_value + pad_value[-1:] * 4)[:4]))


class ResizePadMat(FixRatioResizeMat):
    """The image scaled to fit, at the upper left of a frame: `[height, width, ...]` -> `[max_h, max_w, ...]`.

    `inverse_trans` maps points back.

    - `max_h`: the height of the frame.
    - `max_w`: the width of the frame.
    - `pad_value`: the color of the padding: a number, or one for each channel.
    """

    def __init__(self, max_h: int, max_w: int, pad_value: tuple[float, ...] = (0.0,)) -> None:
        super().__init__(max_h, max_w)
        self.value = four(pad_value, type(self).__name__)

    def image(self, mat: Array, fields: Fields) -> Array:
        return padded(sized(mat, *self.fit(mat, fields)), *self.bounds, self.value)


class ResizeCenterPadMat(ResizePadMat):
    """The image scaled to fit, at the center of a frame: `[height, width, ...]` -> `[max_h, max_w, ...]`.

    The result is float32 if `pad_value` has a fraction. `inverse_trans` maps points back and clips them to the image.
    """

    def image(self, mat: Array, fields: Fields) -> Array:
        height, width = fitted(mat, self.bounds)
        top, left = (self.bounds[0] - height) // 2, (self.bounds[1] - width) // 2
        h, w = mat.shape[:2]
        fields["inverse_trans"] = Inverse(w / width, h / height, left, top, w, h)
        mat = sized(mat, height, width)
        if (height, width) != self.bounds and not all(map(float.is_integer, self.value)):
            mat = mat.astype(np.float32, copy=False)
        return padded(mat, *self.bounds, self.value, top=top, left=left)


def fixed_height(mat: Array, size: tuple[int, int], value: tuple[float, ...]) -> Array:
    """The image at a height, with the same proportions up to a width, and padded to that width."""
    height, max_w = size
    ratio = np.float32(mat.shape[1]) / np.float32(mat.shape[0])
    width = min(math.ceil(np.float32(height) * ratio), max_w)
    return padded(sized(mat, height, width), height, max_w, value)


class FixHResizePadMat(MatOp):
    """The image at a fixed height, with the same proportions up to `max_w`, padded on the right, for lines of text:
    `[height, width, channels]` -> `[resize_h, max_w, channels]`.

    - `resize_h`: the new height.
    - `max_w`: the new width.
    - `pad_value`: the color of the padding: a number, or one for each channel.
    """

    def __init__(self, resize_h: int, max_w: int, pad_value: tuple[float, ...] = (0.0,)) -> None:
        check_size("FixHResizePadMat", resize_h=resize_h, max_w=max_w)
        self.size = (resize_h, max_w)
        self.value = four(pad_value, "FixHResizePadMat")

    def image(self, mat: Array, fields: Fields) -> Array:
        return fixed_height(mat, self.size, self.value)


def size_in(fields: Fields, op: str, *names: str) -> tuple[int, int]:
    """Height and width from two fields. Raises BadRequest: missing, not 1 to 2**20, or over 100 Mi pixels in all."""
    sides = {}
    for name in names:
        value = field(fields, name, op)
        try:
            sides[name] = int(value)
        except (TypeError, ValueError, OverflowError):
            raise BadRequest(f"{op}: {name} = {value!r}, expected 1 to {MAX_SIDE}") from None
    check_size(op, BadRequest, **sides)
    height, width = sides.values()
    return height, width


class DynamicResizeMat(MatOp):
    """The image at the size in the item's fields `resize_h` and `resize_w`: `[resize_h, resize_w, channels]`."""

    reads = ("resize_h", "resize_w")

    def image(self, mat: Array, fields: Fields) -> Array:
        size = size_in(fields, "DynamicResizeMat", *self.reads)
        return sized(mat, *size)


class DynamicFixHResizePadMat(MatOp):
    """FixHResizePadMat at the size in the item's fields `resize_h` and `max_w`.

    - `pad_value`: the color of the padding: a number, or one for each channel.
    """

    reads = ("resize_h", "max_w")

    def __init__(self, pad_value: tuple[float, ...] = (0.0,)) -> None:
        self.value = four(pad_value, "DynamicFixHResizePadMat")

    def image(self, mat: Array, fields: Fields) -> Array:
        size = size_in(fields, "DynamicFixHResizePadMat", *self.reads)
        return fixed_height(mat, size, self.value)


class AlignMat(BatchOp):
    """The unchanged images; `resize_h` and `resize_w` receive a common size of the batch, for DynamicResizeMat.

    The width is the widest image's at that height, rounded up, and at most `max_w`.

    - `resize_h`: the height.
    - `max_w`: largest width, a multiple of `align`.
    - `align`: the width is a multiple of this.
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
        images = [mat for mat in mats if not isinstance(mat, BadRequest) and mat.ndim < 4]
        widths = [self.height * mat.shape[1] // mat.shape[0] for mat in images]
        width = min(self.max_w, -(-max(widths, default=1) // self.align) * self.align)
        height_name, width_name = self.writes
        for one in fields:
            one[height_name], one[width_name] = self.height, max(width, self.align)
        return mats

    def _mat(self, data: Any) -> Array | BadRequest:
        try:
            return as_mat(data, type(self).__name__)
        except BadRequest as e:  # this item fails alone
            return e


class BatchFixHLimitW(AlignMat):
    """The unchanged images; `resize_h` and `max_w` receive a common size of the batch, for DynamicFixHResizePadMat."""

    writes = ("resize_h", "max_w")


# ---- crops


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
