from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.crop import CropMat, CropResizeMat, PerspectiveTransformMat, PerspectiveTransformMats
from penstock.pipeline.ops.mat import cv2
from penstock.pipeline.ops.tensor import CropTensor


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
