"""Between mats and tensors: Mat2Tensor, Tensor2Mat and their kin."""

from __future__ import annotations

from typing import Any, Literal

from penstock.ops.arrays import Array, as_mat
from penstock.ops.base import Fields, ItemOp

DataFormat = Literal["nchw", "hwc", "nhwc"]


class Mat2Tensor(ItemOp):
    """The image as a tensor: `[height, width, channels]` -> `[1, channels, height, width]`, of the same type; a view.

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
        result = [self.tensor(mat) for mat in data] if isinstance(data, list | tuple) else self.tensor(data)
        fields["data_format"] = self.data_format
        return result

    def tensor(self, data: Any) -> Array:
        mat = as_mat(data, type(self).__name__)
        if mat.ndim == 2:
            mat = mat[:, :, None]
        if self.data_format == "nchw":
            return mat.transpose(2, 0, 1)[None]
        return mat if self.data_format == "hwc" else mat[None]


class Mat2CpuTensor(Mat2Tensor):
    """Mat2Tensor, as TorchPipe names it for the CPU."""


class Mat2GpuTensor(Mat2Tensor):
    """Mat2Tensor, as TorchPipe names it for the GPU: the model moves its batch there."""
