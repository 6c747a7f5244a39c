from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadRequest
from penstock.pipeline.ops.color import CvtColorMat, FloatMat
from penstock.pipeline.ops.cv import cv2

BGR = np.array([[[200, 100, 50], [1, 2, 3]]], np.uint8)
RGB = BGR[:, :, ::-1]
GRAY = cv2.cvtColor(BGR, cv2.COLOR_BGR2GRAY)
IMAGES = {"bgr": BGR, "rgb": RGB, "gray": GRAY}


@pytest.mark.parametrize("now", IMAGES)
@pytest.mark.parametrize("then", IMAGES)
def test_colours_are_converted_from_what_the_item_says(now, then):
    fields = {"color": now}
    mat = CvtColorMat(then)(IMAGES[now], fields)
    want = IMAGES[then] if now != "gray" or then == "gray" else np.repeat(GRAY[:, :, None], 3, axis=2)
    assert np.array_equal(mat, want)
    assert fields == {"color": then}


def test_nothing_is_copied_where_the_colours_are_right():
    assert CvtColorMat("bgr")(BGR, {}) is BGR


def test_an_image_that_says_nothing_is_as_opencv_has_it():
    assert np.array_equal(CvtColorMat("rgb")(BGR, {}), RGB)
    assert CvtColorMat("rgb")(GRAY, {}).shape == (1, 2, 3)


def test_float_images_are_converted_too():
    assert np.array_equal(CvtColorMat("rgb")(BGR.astype(np.float32), {}), RGB)


@pytest.mark.parametrize(
    ("data", "color", "found"),
    [
        (np.zeros((2, 2, 4), np.uint8), "bgr", r"uint8 array \[2, 2, 4\], expected 3 channels \(color is bgr\)"),
        (GRAY, "rgb", r"uint8 array \[1, 2\], expected 3 channels \(color is rgb\)"),
        (BGR, "gray", r"uint8 array \[1, 2, 3\], expected 1 channels \(color is gray\)"),
        (BGR, "hsv", "color is 'hsv', expected one of rgb, bgr, gray"),
        (BGR, ["rgb"], r"color is \['rgb'\], expected one of"),
        (BGR.astype(np.float64), "bgr", "float64 array"),
    ],
)
def test_what_does_not_have_these_colours_is_told(data, color, found):
    with pytest.raises(BadRequest, match=found):
        CvtColorMat("rgb")(data, {"color": color})


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.uint16, np.int32, np.bool_, np.float16])
def test_any_numbers_become_float(dtype):
    mat = FloatMat()(BGR.astype(dtype), {})
    assert mat.dtype == np.float32
    assert np.array_equal(mat, BGR.astype(dtype))


def test_floats_are_not_copied():
    mat = BGR.astype(np.float32)
    assert FloatMat()(mat, {}) is mat


@pytest.mark.parametrize("data", [np.zeros((2, 2), complex), np.zeros((2, 2), "U1"), b"bytes", np.float32(3)])
def test_what_are_no_numbers_is_told(data):
    with pytest.raises(BadRequest, match="FloatMat found "):
        FloatMat()(data, {})
