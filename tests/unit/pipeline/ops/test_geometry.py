from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import make_op, parameters_of
from penstock.pipeline.ops.geometry import (
    AlignMat,
    BatchFixHLimitW,
    CropMat,
    CropResizeMat,
    DynamicFixHResizePadMat,
    DynamicResizeMat,
    FixHResizePadMat,
    FixRatioResizeMat,
    PerspectiveTransformMat,
    PerspectiveTransformMats,
    PillowResizeMat,
    ResizeCenterPadMat,
    ResizeMat,
    ResizePadMat,
    fitted,
)
from penstock.pipeline.ops.mat import cv2
from penstock.pipeline.ops.tensor import CropTensor

OPS = [
    ResizeMat(8, 9),
    PillowResizeMat(8, 9),
    FixRatioResizeMat(8, 9),
    ResizePadMat(8, 9),
    ResizeCenterPadMat(8, 9),
    FixHResizePadMat(8, 9),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 array \[0, 4, 3\]"),
        (np.zeros(4, np.uint8), r"uint8 array \[4\]"),
        (np.zeros((4, 4, 5), np.uint8), r"uint8 array \[4, 4, 5\]"),
        (np.zeros((1, 3, 4, 4), np.uint8), r"uint8 array \[1, 3, 4, 4\]"),
        (np.zeros((4, 4, 3), np.float64), r"float64 array \[4, 4, 3\]"),
        (np.zeros((4, 4, 3), np.uint16), r"uint16 array \[4, 4, 3\]"),
        (np.zeros((4, 4), object), r"object array \[4, 4\]"),
        ([np.zeros((4, 4), np.uint8)], "list of uint8 array"),
    ],
)
def test_an_invalid_image_is_reported_with_the_expected_shape(op, data, found):
    with pytest.raises(BadRequest, match=f"{type(op).__name__} found {found}.*, expected "):
        op(data, {})


def test_another_number_type_is_an_error_with_a_hint():
    with pytest.raises(BadRequest, match="expected uint8 or float32: put FloatMat before it"):
        ResizeMat(2, 2)(np.zeros((4, 4)), {})


@pytest.mark.parametrize("cls", [ResizeMat, PillowResizeMat])
@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, 5), (5, 2**20 + 1)])
def test_no_image_is_made_without_a_side_or_with_a_huge_one(cls, height, width):
    with pytest.raises(ConfigError, match=rf"{cls.__name__}: resize_[hw] = .*, expected 1 to 1048576"):
        cls(height, width)


def test_no_image_is_made_with_too_many_pixels():
    with pytest.raises(ConfigError, match="max_h = 100000 and max_w = 100000 are 10000000000 pixels, expected at most"):
        ResizePadMat(100_000, 100_000)


def test_an_image_is_resized_as_opencv_does(rgb):
    assert np.array_equal(ResizeMat(31, 44)(rgb, {}), cv2.resize(rgb, (44, 31)))
    assert ResizeMat(31, 44)(rgb.astype(np.float32), {}).dtype == np.float32
    assert ResizeMat(31, 44)(rgb[:, :, 0], {}).shape == (31, 44)


def test_an_image_that_has_its_size_is_not_copied(rgb):
    assert ResizeMat(*rgb.shape[:2])(rgb, {}) is rgb


@pytest.mark.parametrize("view", [np.s_[::-1], np.s_[:, ::-1], np.s_[:, :, ::-1], np.s_[::2, 1::3]])
def test_views_of_images_are_images(rgb, view):
    for op in OPS:
        assert np.array_equal(op(rgb[view], {}), op(np.ascontiguousarray(rgb[view]), {}))


@pytest.mark.parametrize(
    "cls",
    [CropResizeMat, FixHResizePadMat, FixRatioResizeMat, PillowResizeMat, ResizeCenterPadMat, ResizeMat, ResizePadMat],
)
def test_an_image_keeps_its_axis_of_one_channel(rgb, cls):
    sides = parameters_of(cls)
    op = make_op(cls, {name: 20 for name in ("resize_h", "resize_w", "max_h", "max_w") if name in sides})
    assert op(rgb[:, :, :1], {"_box": [0, 0, 0.5, 0.5]}).shape[2:] == (1,)
    assert op(rgb[:, :, 0], {"_box": [0, 0, 0.5, 0.5]}).ndim == 2


@pytest.mark.parametrize("size", [(31, 44), (120, 200), (1, 1), (67, 44)])
def test_pillows_resize_is_bit_for_bit_pillows(rgb, size):
    want = Image.fromarray(rgb).resize(size[::-1], Image.Resampling.BILINEAR)
    assert np.array_equal(PillowResizeMat(*size)(rgb, {}), np.asarray(want))
    gray = PillowResizeMat(*size)(rgb[:, :, :1], {})
    assert gray.shape == (*size, 1)
    assert np.array_equal(gray[:, :, 0], Image.fromarray(rgb[:, :, 0]).resize(size[::-1], Image.Resampling.BILINEAR))


@pytest.mark.parametrize(
    "data", [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 2), np.uint8)]
)
def test_pillows_resize_takes_what_it_is_the_same_for(data):
    with pytest.raises(BadRequest, match=r"PillowResizeMat found .*, expected uint8 with 1 or 3 channels"):
        PillowResizeMat(2, 2)(data, {})


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 700), st.integers(1, 700), st.booleans())
def test_a_fitted_image_touches_its_bounds_and_is_never_empty(height, width, max_h, max_w, up):
    h, w = fitted(np.empty((height, width), np.uint8), (max_h, max_w), up=up)
    assert 1 <= h <= max_h
    assert 1 <= w <= max_w
    assert h == max_h or w == max_w
    assert abs(h * width - w * height) <= max(height, width) * 1.01


def test_a_side_between_two_pixels_is_rounded_as_torchpipe_does(rgb):
    """5 / 2 = 2.5: to 3 where it is rounded, as C does it, and where it is rounded up."""
    image = np.zeros((10, 5), np.uint8)
    assert fitted(image, (5, 9)) == (5, 3)
    assert fitted(np.zeros((100, 41), np.uint8), (10, 9)) == (10, 4)
    assert fitted(np.zeros((100, 41), np.uint8), (10, 9), up=True) == (10, 5)


def test_points_of_a_fitted_image_are_mapped_back(rgb):
    fields = {}
    mat = FixRatioResizeMat(max_h=33, max_w=200)(rgb, fields)
    assert mat.shape == (33, 45, 3)
    assert np.allclose(fields["inverse_trans"](45, 33), (90, 67))


def test_an_image_is_put_at_the_upper_left_of_its_frame(rgb):
    fields = {}
    mat = ResizePadMat(max_h=100, max_w=90, pad_value=(1, 2))(rgb, fields)
    assert mat.shape == (100, 90, 3)
    assert np.array_equal(mat[:67], rgb)
    assert (mat[67:] == (1, 2, 2)).all()
    assert fields["inverse_trans"](7, 8) == (7, 8)


def test_an_image_is_put_in_the_middle_of_its_frame(rgb):
    fields = {}
    mat = ResizeCenterPadMat(max_h=100, max_w=90, pad_value=(114,))(rgb, fields)
    assert mat.dtype == np.uint8
    assert np.array_equal(mat[16:83], rgb)
    assert (mat[:16] == 114).all()
    assert (mat[83:] == 114).all()
    assert fields["inverse_trans"](7, 20) == (7, 4)
    assert fields["inverse_trans"](-3, 0) == (0, 0)
    assert fields["inverse_trans"](500, 99) == (89, 66)


def test_a_fractional_pad_value_makes_the_image_float(rgb):
    mat = ResizeCenterPadMat(max_h=100, max_w=90, pad_value=(0.5,))(rgb, {})
    assert mat.dtype == np.float32
    assert (mat[0] == 0.5).all()
    assert ResizePadMat(max_h=100, max_w=90, pad_value=(0.5,))(rgb, {}).dtype == np.uint8


def test_gray_images_are_padded_too(rgb):
    for op in (ResizePadMat, ResizeCenterPadMat):
        assert op(100, 100, (7,))(rgb[:, :, 0], {}).shape == (100, 100)


@pytest.mark.parametrize("value", [(), (1.0,) * 5, (float("nan"),)])
def test_an_invalid_color_is_an_error(value):
    with pytest.raises(ConfigError, match=r"ResizePadMat: pad_value = .*, expected 1 to 4 numbers"):
        ResizePadMat(8, 8, value)


def test_a_line_of_text_keeps_its_proportions_up_to_the_width(rgb):
    op = FixHResizePadMat(resize_h=32, max_w=60, pad_value=(9,))
    mat = op(rgb, {})
    assert mat.shape == (32, 60, 3)
    assert np.array_equal(mat[:, :43], cv2.resize(rgb, (43, 32)))  # 32 * 90 / 67 = 42.99
    assert (mat[:, 43:] == 9).all()
    assert np.array_equal(op(rgb[:20], {}), cv2.resize(rgb[:20], (60, 32)))


def test_an_item_may_set_its_own_size(rgb):
    assert DynamicResizeMat()(rgb, {"resize_h": "8", "resize_w": 9.0}).shape == (8, 9, 3)
    mat = DynamicFixHResizePadMat()(rgb, {"resize_h": 32, "max_w": 60})
    assert np.array_equal(mat, FixHResizePadMat(32, 60)(rgb, {}))


@pytest.mark.parametrize("value", [0, -3, 2**21, "x", None, float("nan"), float("inf"), [1, 2]])
def test_an_invalid_size_in_an_item_is_an_error(rgb, value):
    with pytest.raises(BadRequest, match=r"DynamicResizeMat: resize_h = .*, expected 1 to 1048576"):
        DynamicResizeMat()(rgb, {"resize_h": value, "resize_w": 4})


def test_an_item_may_not_request_a_size_beyond_memory(rgb):
    with pytest.raises(
        BadRequest, match="resize_h = 1000000 and resize_w = 1000000 are 1000000000000 pixels, expected at most"
    ):
        DynamicResizeMat()(rgb, {"resize_h": 10**6, "resize_w": 10**6})


def test_a_missing_field_is_reported_with_the_existing_ones(rgb):
    with pytest.raises(BadRequest, match="DynamicResizeMat found no field 'resize_w', only: data, resize_h"):
        DynamicResizeMat()(rgb, {"resize_h": 4, "data": rgb})


def mats(*sizes):
    return [np.zeros((height, width, 3), np.uint8) for height, width in sizes]


@pytest.mark.parametrize(
    ("sizes", "width"),
    [
        ([(64, 100)], 64),
        ([(64, 128)], 64),
        ([(64, 131)], 96),
        ([(64, 100), (32, 100)], 128),
        ([(10, 1000)], 320),
        ([(900, 1)], 32),
    ],
)
def test_the_width_is_that_of_the_widest_rounded_up_and_bounded(sizes, width):
    data, fields = mats(*sizes), [{} for _ in sizes]
    assert AlignMat(resize_h=32, max_w=320)(data, fields) == data
    assert fields == [{"resize_h": 32, "resize_w": width}] * len(sizes)


@pytest.mark.parametrize(
    ("cls", "then"), [(AlignMat, DynamicResizeMat()), (BatchFixHLimitW, DynamicFixHResizePadMat())]
)
def test_a_resize_after_align_gives_all_images_one_size(cls, then):
    data = mats((40, 90), (20, 33), (7, 60))
    fields = [{} for _ in data]
    results = [then(mat, one) for mat, one in zip(cls(32, 640)(data, fields), fields, strict=True)]
    assert {result.shape for result in results} == {(32, 288, 3)}


def test_an_invalid_image_fails_alone():
    good = mats((64, 128))[0]
    fields = [{}, {}]
    bad, first = AlignMat(32, 320)([b"bytes", good], fields)
    assert isinstance(bad, BadRequest)
    assert first is good
    assert fields[1]["resize_w"] == 64
    (bad,) = AlignMat(32, 320)([None], [{}])
    assert isinstance(bad, BadRequest)


@pytest.mark.parametrize(("max_w", "align"), [(100, 32), (320, 0), (320, -1)])
def test_a_width_that_is_not_a_multiple_is_an_error(max_w, align):
    with pytest.raises(
        ConfigError, match=f"AlignMat: max_w = {max_w} and align = {align}, expected max_w to be a multiple"
    ):
        AlignMat(32, max_w, align)


# ---- crops


@pytest.mark.parametrize("box", [[10, 20, 40, 50], (10, 20, 40, 50, 0.99), np.array([10.9, 20.2, 40.0, 50.7])])
def test_the_box_is_cut_out(rgb, box):
    assert np.array_equal(CropMat()(rgb, {"_box": box}), rgb[20:50, 10:40])
    tensor = rgb.transpose(2, 0, 1)[None]
    assert np.array_equal(CropTensor()(tensor, {"_box": box}), tensor[:, :, 20:50, 10:40])


def test_the_box_may_be_the_whole_image(rgb):
    assert np.array_equal(CropMat()(rgb, {"_box": [0, 0, 90, 67]}), rgb)


@pytest.mark.parametrize("op", [CropMat(), CropTensor()], ids=["mat", "tensor"])
@pytest.mark.parametrize(
    "box",
    [[-1, 0, 5, 5], [0, 0, 91, 5], [0, 0, 5, 68], [5, 5, 5, 9], [9, 5, 5, 9], [0, 0, 0.5, 9], [100, 100, 200, 200]],
)
def test_an_empty_or_outside_box_is_an_error(rgb, op, box):
    with pytest.raises(BadRequest, match=r"_box = .*, expected 0 <= x1 < x2 <= 90 and 0 <= y1 < y2 <= 67"):
        op(rgb, {"_box": box})


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([1, 2, 3], r"expected \[x1, y1, x2, y2\]"),
        ([[1, 2, 3, 4]], r"expected \[x1, y1, x2, y2\]"),
        ("1,2,3,4", r"expected \[x1, y1, x2, y2\]"),
        (None, r"expected \[x1, y1, x2, y2\]"),
        ([[1], [2, 3]], r"expected \[x1, y1, x2, y2\]"),
        ({"x": 1}, r"expected \[x1, y1, x2, y2\]"),
        ([0, 0, float("nan"), 5], "expected finite numbers"),
        ([0, 0, float("inf"), 5], "expected finite numbers"),
        ([0, 0, 1e300, 5], "expected finite numbers"),
        ([0, 0, 10**400, 5], r"expected \[x1, y1, x2, y2\]"),
    ],
)
@pytest.mark.parametrize("op", [CropMat(), CropResizeMat(4, 4)], ids=["crop", "resize"])
def test_an_invalid_box_is_an_error(rgb, op, box, expected):
    with pytest.raises(BadRequest, match=rf"{type(op).__name__} found _box = .*{expected}"):
        op(rgb, {"_box": box})


def test_a_missing_box_is_an_error(rgb):
    with pytest.raises(BadRequest, match="CropMat found no field '_box', only: data"):
        CropMat()(rgb, {"data": rgb})


def test_a_long_value_is_abbreviated(rgb):
    with pytest.raises(BadRequest) as caught:
        CropMat()(rgb, {"_box": ["x" * 10_000]})
    assert len(caught.value.message) < 200


def test_a_fractional_box_is_clipped_to_the_image_and_resized(rgb):
    """(0.1, 0.5) of 90 x 67 is (9, 33); with 50 % more at each side, of 28 and 34 pixels, 14 and 17."""
    op = CropResizeMat(16, 24, enlarge_ratio=0.5)
    mat = op(rgb, {"_box": [0.1, 0.5, 0.4, 1.0]})
    assert np.array_equal(mat, cv2.resize(rgb[33 - 17 : 67, 0 : 36 + 14], (24, 16)))
    plain = CropResizeMat(16, 24)(rgb, {"_box": [0.1, 0.5, 0.4, 1.0]})
    assert np.array_equal(plain, cv2.resize(rgb[33:67, 9:36], (24, 16)))


def test_a_box_outside_the_image_is_an_error(rgb):
    with pytest.raises(BadRequest, match=r"CropResizeMat found _box = .*, which contains nothing of the image"):
        CropResizeMat(4, 4)(rgb, {"_box": [1.5, 0, 2, 1]})


def test_a_box_cannot_shrink_to_nothing():
    with pytest.raises(ConfigError, match=r"enlarge_ratio = -0\.5, expected above -0\.5"):
        CropResizeMat(4, 4, -0.5)


UPRIGHT = [[10, 20], [40, 20], [40, 50], [10, 50]]


def test_an_upright_quadrangle_is_its_crop(rgb):
    want = rgb[20:50, 10:40]
    assert np.array_equal(PerspectiveTransformMat()(rgb, {"_box": UPRIGHT}), want)
    (mat,) = PerspectiveTransformMats()(rgb, {"_box": [UPRIGHT]})
    assert np.array_equal(mat, want)


def test_a_rotated_quadrangle_becomes_upright(rgb):
    mat = PerspectiveTransformMat()(rgb, {"_box": [UPRIGHT[1], UPRIGHT[2], UPRIGHT[3], UPRIGHT[0]]})
    assert np.abs(mat[1:, 1:].astype(int) - np.rot90(rgb[20:50, 10:40])[:-1, 1:]).mean() < 25
    assert mat.shape == (30, 30, 3)


def test_no_quadrangle_gives_no_image(rgb):
    assert PerspectiveTransformMats()(rgb, {"_box": []}) == []


@pytest.mark.parametrize("box", [[[1, 2]] * 3, [1, 2, 3, 4], [[1], [2], [3], [4]], "text"])
def test_an_invalid_quadrangle_is_an_error(rgb, box):
    with pytest.raises(BadRequest, match=r"PerspectiveTransformMat found _box = .*, expected four points \[x, y\]"):
        PerspectiveTransformMat()(rgb, {"_box": box})


@pytest.mark.parametrize("box", [5, None, "text", [[[1, 2]] * 3]])
def test_an_invalid_list_of_quadrangles_is_an_error(rgb, box):
    with pytest.raises(BadRequest, match=r"PerspectiveTransformMats found _box = .*, expected a list of four points"):
        PerspectiveTransformMats()(rgb, {"_box": box})


@pytest.mark.parametrize("box", [[[5, 5]] * 4, [[0, 0], [10**6, 0], [10**6, 10**6], [0, 10**6]]])
def test_an_empty_or_huge_quadrangle_is_an_error(rgb, box):
    with pytest.raises(BadRequest, match=r"PerspectiveTransformMat found a _box of .* pixels, expected 1 to"):
        PerspectiveTransformMat()(rgb, {"_box": box})


def test_a_quadrangle_keeps_its_axis_of_one_channel(rgb):
    corners = [[10, 20], [40, 20], [40, 50], [10, 50]]
    assert PerspectiveTransformMat()(rgb[:, :, :1], {"_box": corners}).shape == (30, 30, 1)
    assert PerspectiveTransformMat()(rgb[:, :, 0], {"_box": corners}).shape == (30, 30)
