"""Between mats and tensors: Mat2Tensor, Tensor2Mat and their kin."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.ops.arrays import MAT_TYPES, Array, as_mat, as_tensor, found
from penstock.pipeline.ops.base import Fields, ItemOp
from penstock.pipeline.ops.cv import cv2

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
