"""Operations on images as tensors. TorchPipe runs them on the GPU, this module on the CPU.

Tensors are `[1, channels, height, width]` unless stated otherwise. `[height, width, channels]` is also accepted, and no
rows, `[0, channels, height, width]`, which give no rows.
"""

from typing import Any, Literal

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.ops.base import BOX, Array, Fields, TensorOp, as_tensor, found
from penstock.pipeline.ops.geometry import ResizeMat, ResizePadMat, cropped, pillow_sized, sized
from penstock.pipeline.ops.mat import image_of, interleaved, planes


class CvtColorTensor(TensorOp):
    """The image in another color order: `[rows, 3, height, width]` or `[height, width, 3]`, a view.

    Converts from the order in the field `color` (default "bgr"), and updates the field.

    - `color`: "rgb" or "bgr".
    """

    writes = ("color",)

    def __init__(self, color: Literal["rgb", "bgr"]) -> None:
        self.color = color

    def __call__(self, data: Any, fields: Fields) -> Array:
        tensor = as_tensor(data, "CvtColorTensor")
        now = fields.get("color", "bgr")
        if now not in ("rgb", "bgr"):
            raise BadRequest(f"CvtColorTensor found the field color = {now!r}, expected 'rgb' or 'bgr'")
        axis = {3: 2, 4: 1}.get(tensor.ndim, -1)
        if axis < 0 or tensor.shape[axis] != 3:
            raise BadRequest(
                f"CvtColorTensor found {found(tensor)}, expected [rows, 3, height, width] or [height, width, 3]"
            )
        fields["color"] = self.color
        return tensor if now == self.color else np.flip(tensor, axis)


def aligned(mat: Array, height: int, width: int) -> Array:
    """The image `[height, width, channels]` at another size, float32, with its corner pixels unchanged.

    It equals torch's `interpolate` with `align_corners`, which OpenCV does not have.
    """
    mat = interleaved(mat)
    for axis, size in ((0, height), (1, width)):
        if (old := mat.shape[axis]) == size:
            continue
        at = np.arange(size, dtype=np.float32) * np.float32((old - 1) / (size - 1) if size > 1 else 0)
        low = np.minimum(at.astype(np.intp), old - 1)
        part = (at - low).astype(np.float32).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        first = mat.take(low, axis).astype(np.float32, copy=False)
        mat = mat.take(np.minimum(low + 1, old - 1), axis).astype(np.float32, copy=False)
        mat -= first
        mat *= part
        mat += first
    return mat.astype(np.float32, copy=False)


class ResizeTensor(TensorOp, ResizeMat):
    """The image at another size: -> float32 `[1, channels, resize_h, resize_w]`; `[height, width, channels]` stays so.

    - `align_corners`: whether the corner pixels stay unchanged, as in TorchPipe; false is faster.
    """

    def __init__(self, resize_h: int, resize_w: int, align_corners: bool = True) -> None:
        super().__init__(resize_h, resize_w)
        self.align_corners = align_corners

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = image_of(data, "ResizeTensor")
        if self.align_corners:
            mat = aligned(mat, *self.size)
        else:
            mat = sized(interleaved(mat).astype(np.float32, copy=False), *self.size)
        return mat if data.ndim == 3 else planes(mat)[: len(data)]


class PillowResizeTensor(TensorOp, ResizeMat):
    """The image at another size, bit-identical to Pillow's bilinear filter: uint8, 1 or 3 channels,
    -> uint8 `[1, channels, resize_h, resize_w]`."""

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = pillow_sized(image_of(data, "PillowResizeTensor"), *self.size, "PillowResizeTensor")
        return planes(mat)[: len(data)]


class ResizePadTensor(TensorOp, ResizePadMat):
    """The image scaled to fit, at the upper left of a frame: -> float32 `[1, channels, max_h, max_w]`.

    `inverse_trans` maps points back.

    - `pad_value`: the value of the padding; only the first of several counts.
    """

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = image_of(data, "ResizePadTensor")
        height, width = self.fit(mat, fields)
        frame = np.full((1, mat.shape[2], *self.bounds), self.value[0], np.float32)
        frame[0, :, :height, :width] = aligned(mat, height, width).transpose(2, 0, 1)
        return frame[: len(data)]


class CropTensor(TensorOp):
    """The part of the image in the box: -> `[1, channels, y2 - y1, x2 - x1]`, a view.

    `_box` is [x1, y1, x2, y2] in pixels, without x2 and y2. An empty box, or one outside the image, is an error.
    """

    reads = (BOX,)

    def __call__(self, data: Any, fields: Fields) -> Array:
        return cropped(image_of(data, "CropTensor"), fields, "CropTensor").transpose(2, 0, 1)[None][: len(data)]


class FloatTensor(TensorOp):
    """The tensor as float32 with the same values: any shape."""

    def __call__(self, data: Any, fields: Fields) -> Array:
        return as_tensor(data, "FloatTensor").astype(np.float32, copy=False)


class NCHWTensor(TensorOp):
    """The image as `[1, channels, height, width]`, of the same type; a view."""

    writes = ("data_format",)

    def __call__(self, data: Any, fields: Fields) -> Array:
        fields["data_format"] = "nchw"
        return image_of(data, type(self).__name__).transpose(2, 0, 1)[None][: len(data)]


class FloatNCHWTensor(NCHWTensor):
    """The image as float32 `[1, channels, height, width]`, C-contiguous."""

    def __call__(self, data: Any, fields: Fields) -> Array:
        return np.ascontiguousarray(super().__call__(data, fields), np.float32)


class CpuTensor(TensorOp):
    """The unchanged tensor, or list of tensors. Tensors between nodes are always on the CPU."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        name = type(self).__name__
        for tensor in data if isinstance(data, list | tuple) else [data]:
            as_tensor(tensor, name)
        return data


class GpuTensor(CpuTensor):
    """The unchanged tensor, or list of tensors. The model moves a whole batch to its device."""
