"""Each op on tensors gives what its sibling on images gives, for arrays and for tensors of PyTorch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.ops.base import Fields
from penstock.pipeline.ops.decode import DecodeMat, DecodeTensor, picture
from penstock.pipeline.ops.geometry import CropMat, PillowResizeMat, ResizeMat, ResizePadMat
from penstock.pipeline.ops.mat import CvtColorMat, FloatMat, Tensor2Mat, cv2
from penstock.pipeline.ops.tensor import (
    CpuTensor,
    CropTensor,
    CvtColorTensor,
    FloatNCHWTensor,
    FloatTensor,
    GpuTensor,
    NCHWTensor,
    PillowResizeTensor,
    ResizePadTensor,
    ResizeTensor,
)

torch = pytest.importorskip("torch")
Array = np.ndarray[Any, Any]

SIDES = st.integers(2, 40)
LEVELS = 0.02  # of 255: torch and OpenCV weight the pixels around a point in different orders


@st.composite
def images(draw: st.DrawFn) -> Array:
    return picture(draw(SIDES), draw(SIDES), draw(st.integers(0, 3)))


def both(mat: Array, last: bool) -> list[Any]:
    """The image as a tensor: an array, and a tensor of PyTorch; with the channels `last`, without rows."""
    array = np.ascontiguousarray(mat if last else mat.transpose(2, 0, 1)[None])
    return [array, torch.from_numpy(array)]


def back(found: Any, like: Any) -> Array:
    """The result as an image. It is what was given: an array or a tensor of PyTorch."""
    assert type(found) is type(like)
    return Tensor2Mat()(found, {})


@given(images(), st.booleans(), SIDES, SIDES)
def test_resized_tensors_are_resized_images(mat: Array, last: bool, height: int, width: int) -> None:
    want = ResizeMat(height, width)(mat.astype(np.float32), {})
    for tensor in both(mat, last):
        assert np.abs(back(ResizeTensor(height, width, False)(tensor, {}), tensor) - want).max() < LEVELS
    array, other = (ResizeTensor(height, width)(tensor, {}) for tensor in both(mat, last))
    assert np.abs(array - other.numpy()).max() < LEVELS, "with aligned corners, which OpenCV lacks"
    whole = [PillowResizeTensor(height, width)(tensor, {}) for tensor in both(mat, False)]
    assert all(np.array_equal(Tensor2Mat()(one, {}), PillowResizeMat(height, width)(mat, {})) for one in whole)


@given(images(), st.booleans(), SIDES, SIDES)
def test_padded_tensors_are_padded_images(mat: Array, last: bool, height: int, width: int) -> None:
    mat, placed = mat.clip(16), Fields()
    want = ResizePadMat(height, width, pad_value=(7.0,))(mat.astype(np.float32), placed)
    results = []
    for tensor in both(mat, last):
        fields: Fields = {}
        results.append(back(ResizePadTensor(height, width, pad_value=(7.0,))(tensor, fields), tensor))
        assert results[-1].shape == want.shape
        assert np.array_equal(results[-1] == 7, want == 7)
        assert fields == placed
    assert np.abs(results[0] - results[1]).max() < LEVELS


@given(images(), st.booleans(), st.data())
def test_cropped_and_recoloured_tensors_are_those_of_images(mat: Array, last: bool, data: st.DataObject) -> None:
    x1, y1 = (data.draw(st.integers(0, side - 1)) for side in mat.shape[1::-1])
    box = [x1, y1, data.draw(st.integers(x1 + 1, mat.shape[1])), data.draw(st.integers(y1 + 1, mat.shape[0]))]
    for tensor in both(mat, last):
        part = CropTensor()(tensor, {"_box": box})
        assert np.array_equal(back(part, tensor), CropMat()(mat, {"_box": box}))
        fields: Fields = {"color": "bgr"}
        recoloured = CvtColorTensor("rgb")(tensor, fields)
        assert np.array_equal(back(recoloured, tensor), CvtColorMat("rgb")(mat, {"color": "bgr"}))
        assert fields == {"color": "rgb"}


@given(images(), st.booleans())
def test_tensors_change_their_type_their_layout_and_their_place(mat: Array, last: bool) -> None:
    for tensor in both(mat, last):
        assert np.array_equal(back(FloatTensor()(tensor, {}), tensor), FloatMat()(mat, {}))
        assert np.array_equal(back(NCHWTensor()(tensor, {}), tensor), mat)
        floats = FloatNCHWTensor()(tensor, {})
        assert tuple(floats.shape) == (1, 3, *mat.shape[:2])
        assert np.array_equal(back(floats, tensor), mat.astype(np.float32))
        assert GpuTensor()(tensor, {}) is tensor
        assert np.array_equal(back(CpuTensor()(tensor, {}), mat), mat)
        for op in (ResizeTensor(3, 4), ResizePadTensor(3, 4), CropTensor(), NCHWTensor()):
            empty = op(
                tensor[:0] if not last else tensor.reshape(1, *mat.shape)[:0].swapaxes(1, 3), {"_box": [0, 0, 1, 1]}
            )
            assert len(empty) == 0


@given(images())
def test_a_decoded_tensor_is_a_decoded_image(mat: Array) -> None:
    for kind in (".png", ".jpg"):
        file = cv2.imencode(kind, mat)[1].tobytes()
        assert np.array_equal(Tensor2Mat()(DecodeTensor("bgr")(file, {}), {}), DecodeMat()(file, {}))
