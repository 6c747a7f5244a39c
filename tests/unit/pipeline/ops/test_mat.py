from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.mat import (
    Any2Mat,
    CvtColorMat,
    FloatMat,
    Mat2GpuTensor,
    Mat2Tensor,
    SaveMat,
    Tensor2Mat,
    Tensor2Vector,
    cv2,
)

BGR = np.array([[[200, 100, 50], [1, 2, 3]]], np.uint8)
RGB = BGR[:, :, ::-1]
GRAY = cv2.cvtColor(BGR, cv2.COLOR_BGR2GRAY)
IMAGES = {"bgr": BGR, "rgb": RGB, "gray": GRAY}


@pytest.mark.parametrize("now", IMAGES)
@pytest.mark.parametrize("then", IMAGES)
def test_colors_are_converted_from_the_order_in_the_item(now, then):
    fields = {"color": now}
    mat = CvtColorMat(then)(IMAGES[now], fields)
    want = IMAGES[then] if now != "gray" or then == "gray" else np.repeat(GRAY[:, :, None], 3, axis=2)
    assert np.array_equal(mat, want)
    assert fields == {"color": then}


def test_nothing_is_copied_where_the_colours_are_right():
    assert CvtColorMat("bgr")(BGR, {}) is BGR


def test_an_image_without_a_color_field_is_in_opencvs_order():
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
def test_a_wrong_number_of_channels_is_an_error(data, color, found):
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
def test_values_that_are_not_numbers_are_an_error(data):
    with pytest.raises(BadRequest, match="FloatMat found "):
        FloatMat()(data, {})


MAT = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)


@pytest.mark.parametrize(
    ("data_format", "want"), [("nchw", MAT.transpose(2, 0, 1)[None]), ("nhwc", MAT[None]), ("hwc", MAT)]
)
def test_an_image_becomes_a_tensor(data_format, want):
    fields = {}
    tensor = Mat2Tensor(data_format)(MAT, fields)
    assert np.array_equal(tensor, want)
    assert tensor.dtype == np.uint8
    assert tensor.flags.c_contiguous
    assert np.shares_memory(tensor, MAT) == (data_format != "nchw")
    assert fields == {"data_format": data_format}


def test_a_gray_image_has_one_channel():
    for mat in (MAT[:, :, 0], MAT[:, :, :1]):
        tensor = Mat2Tensor()(mat, {})
        assert np.array_equal(tensor, MAT[:, :, 0].reshape(1, 1, 2, 4))
        assert tensor.flags.c_contiguous


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize("view", [np.s_[:], np.s_[::-1], np.s_[:, ::-1], np.s_[:, :, ::-1], np.s_[1:, ::2]])
def test_views_of_images_of_any_kind_become_tensors(dtype, channels, view):
    mat = np.random.default_rng(1).integers(0, 255, (6, 8, channels)).astype(dtype)[view]
    tensor = Mat2Tensor()(mat, {})
    assert np.array_equal(tensor[0].transpose(1, 2, 0), mat)
    assert tensor.dtype == dtype
    assert tensor.flags.c_contiguous


def test_images_in_a_list_become_tensors_in_a_list():
    one, two = Mat2Tensor()([MAT, MAT.astype(np.float32)], {})
    assert one.shape == two.shape == (1, 3, 2, 4)
    assert two.dtype == np.float32


def test_the_device_of_a_mat_is_of_no_effect():
    assert np.array_equal(Mat2GpuTensor(device="gpu")(MAT, {}), Mat2Tensor()(MAT, {}))


@pytest.mark.parametrize(
    ("op", "data", "found"),
    [
        (Mat2Tensor(), b"bytes", "Mat2Tensor found bytes"),
        (Mat2Tensor(), [MAT, None], "Mat2Tensor found NoneType"),
        (Mat2GpuTensor(), MAT[None], "Mat2GpuTensor found uint8 array"),
        (Any2Mat(), MAT, r"Any2Mat found uint8 array \[2, 4, 3\], expected a list of images"),
        (Any2Mat(), [MAT, 3], "Any2Mat found int, expected an image"),
        (Tensor2Mat(), MAT.astype(np.float64), "Tensor2Mat found float64 array"),
        (Tensor2Mat(), np.zeros((2, 3, 4, 4), np.uint8), r"found uint8 array \[2, 3, 4, 4\], expected \[1, 1\|3\|4,"),
        (Tensor2Mat(), np.zeros((1, 2, 4, 4), np.uint8), r"found uint8 array \[1, 2, 4, 4\]"),
        (Tensor2Mat(), np.zeros((3, 4, 5), np.uint8), r"found uint8 array \[3, 4, 5\]"),
        (Tensor2Mat(), np.zeros((1, 3, 0, 4), np.uint8), "no axis of 0 after the first"),
        (Tensor2Mat(), "text", "found str, expected a tensor"),
        (Tensor2Vector(), np.array(["a"]), "found <U1 array"),
        (Tensor2Vector(), np.array(3.0), "found float64 array"),
    ],
)
def test_bad_parameters_are_an_error(op, data, found):
    with pytest.raises(BadRequest, match=found):
        op(data, {})


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_tensor_becomes_the_image_that_it_was(dtype):
    mat = MAT.astype(dtype)
    for tensor in (Mat2Tensor()(mat, {}), mat):
        back = Tensor2Mat()(tensor, {})
        assert np.array_equal(back, mat)
        assert back.dtype == dtype
        assert back.flags.c_contiguous


def test_a_tensor_becomes_a_list_of_its_numbers():
    vector = Tensor2Vector()(np.array([[[1, 2]], [[3, 4]]], np.uint8), {})
    assert vector == [1.0, 2.0, 3.0, 4.0]
    assert all(type(number) is float for number in vector)


# ---- SaveMat


def test_an_image_is_written_and_passed_on(tmp_path, rgb):
    op = SaveMat(str(tmp_path))
    assert op(rgb, {}) is rgb
    (path,) = tmp_path.iterdir()
    assert np.array_equal(cv2.imread(str(path)), rgb)


def test_floats_are_cut_to_what_a_png_holds(tmp_path):
    SaveMat(str(tmp_path))(np.array([[-5.0, 3.7, 999.0]], np.float32), {})
    (path,) = tmp_path.iterdir()
    assert cv2.imread(str(path), cv2.IMREAD_GRAYSCALE).tolist() == [[0, 3, 255]]


def test_two_instances_overwrite_neither_each_other_nor_what_is_there(tmp_path, rgb):
    ops = [SaveMat(str(tmp_path)), SaveMat(str(tmp_path))]
    ops[0](rgb, {})
    (first,) = tmp_path.iterdir()
    process, number = first.stem.split("_")
    there = tmp_path / f"{process}_{int(number) + 1:06d}.png"
    there.write_bytes(b"mine")
    for op in ops:
        op(rgb, {})
    assert there.read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 4


def test_fields_of_an_item_do_not_set_the_directory(tmp_path, rgb):
    (tmp_path / "in").mkdir()
    SaveMat(str(tmp_path / "in"))(rgb, {"node_name": "../out", "save_dir": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"save_dir = .* is not a directory: create it first"):
        SaveMat(str(tmp_path / "none"))


def test_an_invalid_image_is_not_written(tmp_path):
    with pytest.raises(BadRequest, match="SaveMat found bytes"):
        SaveMat(str(tmp_path))(b"bytes", {})
    assert not list(tmp_path.iterdir())
