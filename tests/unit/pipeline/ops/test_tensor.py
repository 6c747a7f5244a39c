from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.geometry import PillowResizeMat
from penstock.pipeline.ops.mat import cv2
from penstock.pipeline.ops.tensor import (
    CpuTensor,
    CvtColorTensor,
    FloatNCHWTensor,
    FloatTensor,
    GpuTensor,
    NCHWTensor,
    PillowResizeTensor,
    ResizePadTensor,
    ResizeTensor,
)


@pytest.fixture(scope="module")
def tensor(rgb):
    return np.ascontiguousarray(rgb.transpose(2, 0, 1))[None]


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("size", [(31, 44), (150, 200), (67, 44), (1, 1), (1, 90), (2, 2)])
def test_a_tensor_is_resized_as_torch_does(tensor, size, align_corners):
    torch = pytest.importorskip("torch")
    want = torch.nn.functional.interpolate(
        torch.from_numpy(tensor.astype(np.float32)), size, mode="bilinear", align_corners=align_corners
    )
    found = ResizeTensor(*size, align_corners=align_corners)(tensor, {})
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.allclose(found, want.numpy(), atol=2e-3)


def test_without_aligned_corners_a_tensor_is_resized_as_opencv_does(tensor, rgb):
    found = ResizeTensor(31, 44, align_corners=False)(tensor, {})
    want = cv2.resize(rgb.astype(np.float32), (44, 31))
    assert np.allclose(found[0].transpose(1, 2, 0), want, atol=2e-3)


@pytest.mark.parametrize("align_corners", [True, False])
def test_numbers_of_any_type_keep_their_values(align_corners):
    large = np.full((1, 3, 4, 4), 2**40)  # more than OpenCV has room for
    assert (ResizeTensor(3, 5, align_corners=align_corners)(large, {}) == np.float32(2**40)).all()


def test_an_image_with_channels_last_keeps_them_last(tensor, rgb):
    found = ResizeTensor(31, 44)(rgb, {})
    assert found.shape == (31, 44, 3)
    assert np.array_equal(found.transpose(2, 0, 1)[None], ResizeTensor(31, 44)(tensor, {}))


def test_pillows_resize_of_a_tensor_is_that_of_its_image(tensor, rgb):
    found = PillowResizeTensor(31, 44)(tensor, {})
    assert found.dtype == np.uint8
    assert np.array_equal(found[0].transpose(1, 2, 0), PillowResizeMat(31, 44)(rgb, {}))
    with pytest.raises(BadRequest, match="PillowResizeTensor found float32 array"):
        PillowResizeTensor(31, 44)(tensor.astype(np.float32), {})


def test_a_tensor_is_put_at_the_upper_left_of_its_frame(tensor):
    fields = {}
    found = ResizePadTensor(max_h=100, max_w=90, pad_value=(0.5, 9))(tensor, fields)
    assert found.shape == (1, 3, 100, 90)
    assert np.array_equal(found[:, :, :67], tensor.astype(np.float32))
    assert (found[:, :, 67:] == 0.5).all()
    assert fields["inverse_trans"](3, 4) == (3, 4)
    small = ResizePadTensor(max_h=20, max_w=90)(tensor, {})
    assert np.array_equal(small[:, :, :, :27], ResizeTensor(20, 27)(tensor, {}))
    assert (small[:, :, :, 27:] == 0).all()


@pytest.mark.parametrize("cls", [ResizeTensor, PillowResizeTensor, ResizePadTensor])
def test_no_tensor_is_made_without_a_side(cls):
    with pytest.raises(ConfigError, match=f"{cls.__name__}: .* = 0, expected 1 to"):
        cls(0, 5)


def test_the_color_order_is_reversed(tensor, rgb):
    fields = {"color": "rgb"}
    found = CvtColorTensor("bgr")(tensor, fields)
    assert np.array_equal(found, tensor[:, ::-1])
    assert fields == {"color": "bgr"}
    assert CvtColorTensor("rgb")(tensor, {"color": "rgb"}) is tensor
    assert np.array_equal(CvtColorTensor("rgb")(rgb, {}), rgb[:, :, ::-1])
    many = np.repeat(tensor, 4, axis=0)
    assert np.array_equal(CvtColorTensor("rgb")(many, {}), many[:, ::-1])


@pytest.mark.parametrize(
    ("data", "color", "found"),
    [
        (np.zeros((1, 4, 2, 2)), "rgb", r"found float64 array \[1, 4, 2, 2\], expected \[rows, 3, height, width\]"),
        (np.zeros((2, 2)), "rgb", r"found float64 array \[2, 2\]"),
        (np.zeros((1, 3, 2, 2)), "gray", "color = 'gray', expected 'rgb' or 'bgr'"),
        (b"bytes", "rgb", "found bytes, expected a tensor"),
    ],
)
def test_a_wrong_color_is_an_error(data, color, found):
    with pytest.raises(BadRequest, match=found):
        CvtColorTensor("bgr")(data, {"color": color})


def test_types_and_axes_are_changed_and_nothing_else(tensor, rgb):
    floats = FloatTensor()(tensor, {})
    assert floats.dtype == np.float32
    assert FloatTensor()(floats, {}) is floats
    fields = {"data_format": "hwc"}
    assert np.array_equal(NCHWTensor()(rgb, fields), tensor)
    assert fields == {"data_format": "nchw"}
    assert np.array_equal(NCHWTensor()(tensor, {}), tensor)
    both = FloatNCHWTensor()(rgb, {})
    assert both.dtype == np.float32
    assert both.flags.c_contiguous
    assert np.array_equal(both, tensor)
    assert CpuTensor()(tensor, {}) is tensor
    assert GpuTensor()([tensor, rgb], {})[1] is rgb


@pytest.mark.parametrize("op", [FloatTensor(), NCHWTensor(), CpuTensor(), GpuTensor(), ResizeTensor(2, 2)])
@pytest.mark.parametrize("data", [b"bytes", None, np.zeros((3, 0)), [1.0]])
def test_an_invalid_tensor_is_an_error(op, data):
    with pytest.raises(BadRequest, match=f"{type(op).__name__} found "):
        op(data, {})
