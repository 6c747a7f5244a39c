"""Operations on images as tensors: arrays on the CPU, or tensors of PyTorch where these are, such as on a GPU.

Tensors are `[1, channels, height, width]` unless stated otherwise. `[height, width, channels]` is also accepted, and no
rows, `[0, channels, height, width]`, which give no rows.
"""

from typing import Any, Literal

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.ops.base import BOX, Array, Fields, TensorOp, as_tensor, found, is_torch
from penstock.pipeline.ops.geometry import ResizeMat, ResizePadMat, cropped, pillow_sized, sized
from penstock.pipeline.ops.mat import channels_first, image_of, interleaved, planes
from penstock.runtimes.torch_files import import_torch


class CvtColorTensor(TensorOp):
    """The image in another color order: `[rows, 3, height, width]` or `[height, width, 3]`, a view.

    Converts from the order in the field `color` (default "bgr"), and updates the field.

    - `color`: "rgb" or "bgr".
    """

    writes = ("color",)

    def __init__(self, color: Literal["rgb", "bgr"]) -> None:
        self.color = color

    def __call__(self, data: Any, fields: Fields) -> Any:
        tensor = as_tensor(data, "CvtColorTensor", on_device=True)
        now = fields.get("color", "bgr")
        if now not in ("rgb", "bgr"):
            raise BadRequest(f"CvtColorTensor found the field color = {now!r}, expected 'rgb' or 'bgr'")
        axis = {3: 2, 4: 1}.get(tensor.ndim, -1)
        if axis < 0 or tensor.shape[axis] != 3:
            raise BadRequest(
                f"CvtColorTensor found {found(tensor)}, expected [rows, 3, height, width] or [height, width, 3]"
            )
        fields["color"] = self.color
        if now == self.color:
            return tensor
        return tensor.flip(axis) if is_torch(tensor) else np.flip(tensor, axis)


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


def resized(mat: Any, height: int, width: int, align_corners: bool) -> Any:
    """The image `[height, width, channels]` at another size, float32, where it is."""
    if is_torch(mat):
        interpolate: Any = import_torch().nn.functional.interpolate
        floats = channels_first(mat).float()
        found = interpolate(floats, (height, width), mode="bilinear", align_corners=align_corners)
        return found[0].permute(1, 2, 0)
    return aligned(mat, height, width) if align_corners else sized(interleaved(float32(mat)), height, width)


def float32(tensor: Any) -> Any:
    """The same values as float32."""
    return tensor.float() if is_torch(tensor) else tensor.astype(np.float32, copy=False)


class ResizeTensor(TensorOp, ResizeMat):
    """The image at another size: -> float32 `[1, channels, resize_h, resize_w]`; `[height, width, channels]` stays so.

    - `align_corners`: whether the corner pixels stay unchanged, as in TorchPipe; false is faster.
    """

    def __init__(self, resize_h: int, resize_w: int, align_corners: bool = True) -> None:
        super().__init__(resize_h, resize_w)
        self.align_corners = align_corners

    def __call__(self, data: Any, fields: Fields) -> Any:
        mat = resized(image_of(data, "ResizeTensor", on_device=True), *self.size, self.align_corners)
        return mat if data.ndim == 3 else planes(mat)[: len(data)]


class PillowResizeTensor(TensorOp, ResizeMat):
    """The image at another size, bit-identical to Pillow's bilinear filter: uint8, 1 or 3 channels,
    -> uint8 `[1, channels, resize_h, resize_w]`."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        mat = pillow_sized(image_of(data, "PillowResizeTensor"), *self.size, "PillowResizeTensor")
        return planes(mat)[: len(data)]


class ResizePadTensor(TensorOp, ResizePadMat):
    """The image scaled to fit, at the upper left of a frame: -> float32 `[1, channels, max_h, max_w]`.

    `inverse_trans` maps points back.

    - `pad_value`: the value of the padding; only the first of several counts.
    """

    def __call__(self, data: Any, fields: Fields) -> Any:
        mat = image_of(data, "ResizePadTensor", on_device=True)
        height, width = self.fit(mat, fields)
        image = channels_first(resized(mat, height, width, align_corners=True))
        frame = image.new_empty if is_torch(image) else np.empty
        padded: Array = frame((1, mat.shape[2], *self.bounds), dtype=image.dtype)
        padded[:] = self.value[0]
        padded[:, :, :height, :width] = image
        return padded[: len(data)]


class CropTensor(TensorOp):
    """The part of the image in the box: -> `[1, channels, y2 - y1, x2 - x1]`, a view.

    `_box` is [x1, y1, x2, y2] in pixels, without x2 and y2. An empty box, or one outside the image, is an error.
    """

    reads = (BOX,)

    def __call__(self, data: Any, fields: Fields) -> Any:
        mat = image_of(data, "CropTensor", on_device=True)
        return channels_first(cropped(mat, fields, "CropTensor"))[: len(data)]


class FloatTensor(TensorOp):
    """The tensor as float32 with the same values: any shape."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        return float32(as_tensor(data, "FloatTensor", on_device=True))


class NCHWTensor(TensorOp):
    """The image as `[1, channels, height, width]`, of the same type; a view."""

    writes = ("data_format",)

    def __call__(self, data: Any, fields: Fields) -> Any:
        fields["data_format"] = "nchw"
        return channels_first(image_of(data, type(self).__name__, on_device=True))[: len(data)]


class FloatNCHWTensor(NCHWTensor):
    """The image as float32 `[1, channels, height, width]`, C-contiguous."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        tensor = float32(super().__call__(data, fields))
        return tensor.contiguous() if is_torch(tensor) else np.ascontiguousarray(tensor)


class CpuTensor(TensorOp):
    """The tensor, or list of tensors, as arrays on the CPU."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        name = type(self).__name__
        return [as_tensor(one, name) for one in data] if isinstance(data, list | tuple) else as_tensor(data, name)


class GpuTensor(TensorOp):
    """The unchanged tensor, or list of tensors. The model moves a whole batch to its device."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        for tensor in data if isinstance(data, list | tuple) else [data]:
            as_tensor(tensor, "GpuTensor", on_device=True)
        return data
