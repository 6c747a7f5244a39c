"""OpenCV, as ops use it.

One thread a call: instances are what runs at once, and more threads would only fight them. And no lines of its own on
stderr for each broken image: the item's error says it. What libpng and libjpeg write there cannot be turned off.
"""

from __future__ import annotations

from typing import Any, Literal

import cv2
import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.ops.base import MAT_TYPES, Array, Fields, ItemOp, as_mat, as_tensor, found

cv2.setNumThreads(1)
_set_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # before OpenCV 5, and since
_set_level(0)

__all__ = ["cv2"]


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


DataFormat = Literal["nchw", "hwc", "nhwc"]


def planes(mat: Array) -> Array:
    """An image as `[1, channels, height, width]`, C-contiguous: one channel after the other."""
    if mat.ndim == 2 or mat.shape[2] == 1:
        return np.ascontiguousarray(mat).reshape(1, 1, *mat.shape[:2])
    tensor: Array = np.empty((1, mat.shape[2], *mat.shape[:2]), mat.dtype)
    cv2.split(mat, list(tensor[0]))  # a quarter of the time that NumPy takes for it
    return tensor


def interleaved(mat: Array) -> Array:
    """An image `[height, width, channels]`, C-contiguous: one pixel after the other."""
    if mat.flags.c_contiguous or mat.dtype.name not in MAT_TYPES:
        return np.ascontiguousarray(mat)
    merged: Array = cv2.merge([mat[:, :, i] for i in range(mat.shape[2])])
    return merged.reshape(mat.shape)


def tensor_of(mat: Array, data_format: str) -> Array:
    """An image as a tensor; a view, where its channels stay the last axis."""
    if data_format == "nchw":
        return planes(mat)
    if mat.ndim == 2:
        mat = mat[:, :, None]
    return mat if data_format == "hwc" else mat[None]


class Mat2Tensor(ItemOp):
    """The image as a tensor: `[height, width, channels]` -> `[1, channels, height, width]`, of the same type.

    A list of images gives a list of tensors. The device is the model's affair: the tensor stays on the CPU until the
    model takes a whole batch of them.

    - `data_format`: "nchw"; "nhwc" gives `[1, height, width, channels]`, "hwc" (TorchPipe's) the same without rows.
    - `device`: taken as TorchPipe's files have it, and of no effect.
    """

    takes = "mat"
    gives = "tensor"
    writes = ("data_format",)

    def __init__(self, data_format: DataFormat = "nchw", device: str = "cpu") -> None:
        self.data_format = data_format

    def __call__(self, data: Any, fields: Fields) -> Any:
        name = type(self).__name__
        fields["data_format"] = self.data_format
        if isinstance(data, list | tuple):
            return [tensor_of(as_mat(mat, name), self.data_format) for mat in data]
        return tensor_of(as_mat(data, name), self.data_format)


class Mat2CpuTensor(Mat2Tensor):
    """Mat2Tensor, as TorchPipe names it for the CPU."""


class Mat2GpuTensor(Mat2Tensor):
    """Mat2Tensor, as TorchPipe names it for the GPU: the model moves its batch there."""


class Any2Mat(ItemOp):
    """The list of images that the data is, each of them checked."""

    def __call__(self, data: Any, fields: Fields) -> list[Array]:
        if not isinstance(data, list | tuple):
            raise BadRequest(f"Any2Mat found {found(data)}, expected a list of images")
        return [as_mat(mat, "Any2Mat") for mat in data]


def image_of(data: Any, op: str) -> Array:
    """A view `[height, width, channels]` of an image tensor, `[1, channels, height, width]` or already like that.

    1, 3 or 4 channels. Raises BadRequest.
    """
    tensor = as_tensor(data, op)
    if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[1] in (1, 3, 4):
        mat: Array = tensor[0]
        return mat.transpose(1, 2, 0)
    if tensor.ndim == 3 and tensor.shape[2] in (1, 3, 4):
        return tensor
    raise BadRequest(f"{op} found {found(tensor)}, expected [1, 1|3|4, height, width] or [height, width, 1|3|4]")


class Tensor2Mat(ItemOp):
    """The image that a tensor holds: `[1, channels, height, width]` or `[height, width, channels]`, uint8 or float32,
    -> `[height, width, channels]`, of the same type."""

    takes = "tensor"
    gives = "mat"

    def __call__(self, data: Any, fields: Fields) -> Array:
        return interleaved(as_mat(image_of(data, "Tensor2Mat"), "Tensor2Mat"))


class Tensor2Vector(ItemOp):
    """All numbers of a tensor, one after the other, as a list of floats."""

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> list[float]:
        numbers: list[float] = as_tensor(data, "Tensor2Vector").astype(np.float64).ravel().tolist()
        return numbers
