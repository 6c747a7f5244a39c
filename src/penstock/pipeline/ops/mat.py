"""Images as mats: color order, number type, and conversion to and from tensors. Also configures OpenCV for all ops."""

import itertools
import os
from pathlib import Path
from typing import Any, Literal

import cv2 as cv2
import numpy as np

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import MAT_TYPES, Array, Fields, ItemOp, MatOp, as_mat, as_tensor, found, is_torch

cv2.setNumThreads(1)  # instances already run concurrently
# OpenCV logs each broken image, which the item's error reports; the function's name changed in OpenCV 5
(getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel)(0)

Color = Literal["rgb", "bgr", "gray"]
DataFormat = Literal["nchw", "hwc", "nhwc"]
CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}


def color_of(fields: Fields, channels: int) -> str:
    """The item's color order from its field `color`, by default OpenCV's. Raises BadRequest."""
    color = fields.get("color", "gray" if channels == 1 else "bgr")
    if not isinstance(color, str) or color not in CHANNELS:
        raise BadRequest(f"the field color is {color!r}, expected one of {', '.join(CHANNELS)}")
    return color


class CvtColorMat(MatOp):
    """The image in another color order: `[height, width, 3]` or gray -> `[height, width, 3]` or gray `[height, width]`.

    Converts from the order in the field `color` (default "bgr"), and updates the field.

    - `color`: "rgb", "bgr" or "gray".
    """

    writes = ("color",)

    def __init__(self, color: Color) -> None:
        self.color = color

    def image(self, mat: Array, fields: Fields) -> Array:
        channels = 1 if mat.ndim == 2 else mat.shape[2]
        now = color_of(fields, channels)
        if channels != CHANNELS[now]:
            raise BadRequest(f"CvtColorMat found {found(mat)}, expected {CHANNELS[now]} channels (color is {now})")
        fields["color"] = self.color
        if now == self.color:
            return mat
        return cv2.cvtColor(mat, getattr(cv2, f"COLOR_{now.upper()}2{self.color.upper()}"))


class FloatMat(MatOp):
    """The image as float32 with the same values: any numbers `[height, width, channels]` -> float32."""

    any_type = True

    def image(self, mat: Array, fields: Fields) -> Array:
        return mat.astype(np.float32, copy=False)


def planes(mat: Any) -> Any:
    """An image as a C-contiguous `[1, channels, height, width]`."""
    if is_torch(mat):
        return channels_first(mat).contiguous()
    if mat.ndim == 2 or mat.shape[2] == 1:
        return np.ascontiguousarray(mat).reshape(1, 1, *mat.shape[:2])
    tensor: Array = np.empty((1, mat.shape[2], *mat.shape[:2]), mat.dtype)
    cv2.split(mat, list(tensor[0]))  # four times as fast as NumPy
    return tensor


def interleaved(mat: Array) -> Array:
    """An image `[height, width, channels]`, C-contiguous."""
    if mat.flags.c_contiguous or mat.dtype.num not in MAT_TYPES:
        return np.ascontiguousarray(mat)
    merged: Array = cv2.merge([mat[:, :, i] for i in range(mat.shape[2])])
    return merged.reshape(mat.shape)


def tensor_of(mat: Any, data_format: str) -> Any:
    """An image as a tensor. It is a view if the channels stay the last axis."""
    if mat.ndim == 4:
        return mat.transpose(0, 3, 1, 2) if data_format == "nchw" else mat
    if data_format == "nchw":
        return planes(mat)
    if mat.ndim == 2:
        mat = mat[:, :, None]
    return mat if data_format == "hwc" else mat[None]


class Mat2Tensor(ItemOp):
    """The image as a tensor: `[height, width, channels]` -> `[1, channels, height, width]`, of the same type.

    A list of images gives a list of tensors. Tensors stay on the CPU until the model takes a whole batch.

    - `data_format`: "nchw"; "nhwc" gives `[1, height, width, channels]`, "hwc" (TorchPipe's) the same without rows.
    - `device`: accepted for TorchPipe's files, without effect.
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
    """Mat2Tensor under TorchPipe's name for the CPU."""


class Mat2GpuTensor(Mat2Tensor):
    """Mat2Tensor under TorchPipe's name for the GPU. The model moves its batch there."""


class Any2Mat(ItemOp):
    """A list of images, each of them checked."""

    def __call__(self, data: Any, fields: Fields) -> list[Array]:
        if not isinstance(data, list | tuple):
            raise BadRequest(f"Any2Mat found {found(data)}, expected a list of images")
        return [as_mat(mat, "Any2Mat") for mat in data]


def channels_first(mat: Any) -> Any:
    """A view `[1, channels, height, width]` of an image `[height, width, channels]`."""
    return getattr(mat, "permute", mat.transpose)(2, 0, 1)[None]


def image_of(data: Any, op: str, *, on_device: bool = False) -> Any:
    """A view `[height, width, channels]` of a tensor `[1, channels, height, width]` or `[height, width, channels]`.

    It has 1, 3 or 4 channels. For a tensor without rows it is black, and the caller drops its result. `on_device`: a
    tensor of PyTorch stays one.

    Raises BadRequest.
    """
    tensor = as_tensor(data, op, on_device=on_device)
    if len(tensor) == 0:
        shape = (1, *tensor.shape[1:])
        tensor = tensor.new_zeros(shape) if is_torch(tensor) else np.zeros(shape, tensor.dtype)
    if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[1] in (1, 3, 4):
        mat = tensor[0]
        return getattr(mat, "permute", mat.transpose)(1, 2, 0)
    if tensor.ndim == 3 and tensor.shape[2] in (1, 3, 4):
        return tensor
    raise BadRequest(f"{op} found {found(data)}, expected [1, 1|3|4, height, width] or [height, width, 1|3|4]")


class Tensor2Mat(ItemOp):
    """The image in a tensor: `[1, channels, height, width]` or `[height, width, channels]`, uint8 or float32,
    -> `[height, width, channels]`, of the same type. No rows give no image, `[0, height, width, channels]`."""

    takes = "tensor"
    gives = "mat"

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = as_mat(image_of(data, "Tensor2Mat"), "Tensor2Mat")
        return interleaved(mat) if len(data) else mat[None][:0]


class Tensor2Vector(ItemOp):
    """All numbers of a tensor, flattened, as a list of floats."""

    takes = "tensor"

    def __call__(self, data: Any, fields: Fields) -> list[float]:
        numbers: list[float] = as_tensor(data, "Tensor2Vector").astype(np.float64).ravel().tolist()
        return numbers


_files = itertools.count()


class SaveMat(MatOp):
    """The unchanged image, after writing it to a directory as a PNG (float32 clipped to 0 to 255). Slow: for debugging.

    - `save_dir`: an existing directory. Existing files are not overwritten.
    """

    waits = True

    def __init__(self, save_dir: str) -> None:
        self.folder = Path(save_dir).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(f"SaveMat: save_dir = '{save_dir}' is not a directory: create it first")

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = as_mat(data, "SaveMat")
        if mat.ndim == 4:
            return mat
        _, png = cv2.imencode(".png", mat if mat.dtype == np.uint8 else mat.clip(0, 255).astype(np.uint8))
        while True:
            path = self.folder / f"{os.getpid()}_{next(_files):06d}.png"
            try:
                with path.open("xb") as file:
                    file.write(png.tobytes())
            except FileExistsError:
                continue
            return mat
