"""Inputs as tables: texts and shapes that they stand for, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.config.inputs import image_shape, images_in, input_texts
from penstock.config.load import load_config
from penstock.config.schema import InputConfig
from penstock.errors import ConfigError
from penstock.types import TensorSpec
from penstock.values import check_pad, tensor_specs

RGB = (123.675, 116.28, 103.53)
SOURCE = """
[models.net]
target = "net.onnx"
[models.net.inputs]
ids = "INT64[-1,-1]"
mask = {datatype = "BOOL", shape = [-1, 7]}
"""
IMAGE = """
[models.net.inputs.image]
datatype = "UINT8"
shape = [-1, 224, 224, -1]
layout = "NHWC"
mean = [123.675, 116.28, 103.53]
std = 255
"""


def image(**keys: Any) -> InputConfig:
    return msgspec.convert({"datatype": "UINT8", "layout": "NHWC", **keys}, InputConfig)


def test_a_file_may_hold_texts_and_tables(toml: Callable[[str], str]) -> None:
    found = load_config(toml(SOURCE + IMAGE), env={}, sets=["models.net.inputs.image.layout=NHWC"]).models["net"].inputs
    texts = {"ids": "INT64[-1,-1]", "mask": "BOOL[-1,7]", "image": "UINT8[-1,224,224,3]"}
    assert input_texts(found, "inputs") == texts
    assert images_in(found) == {"image": image(shape=[-1, 224, 224, -1], mean=RGB, std=255)}
    over = load_config(toml(SOURCE + IMAGE), env={}, sets=["models.net.inputs.image=FP32[-1,4]"])
    assert over.models["net"].inputs["image"] == "FP32[-1,4]"


@pytest.mark.parametrize(
    ("keys", "network", "shape"),
    [
        ({}, None, (-1, -1, -1, -1)),
        ({"mean": RGB}, None, (-1, -1, -1, 3)),
        ({"std": [2], "layout": "NCHW", "mean": RGB}, None, (-1, 3, -1, -1)),
        ({}, (-1, 3, 8, 9), (-1, 8, 9, 3)),
        ({"layout": "NCHW"}, (-1, 3, 8, 9), (-1, 3, 8, 9)),
        ({"shape": [-1, 8, -1, 3]}, (1, -1, -1, 9), (1, 8, 9, 3)),
    ],
)
def test_the_shape_of_an_image_comes_from_the_table_and_the_network(keys: Any, network: Any, shape: Any) -> None:
    assert image_shape(image(**keys), "x", *([network] if network else [])) == shape


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("layuot = 'NHWC'", r"models.net.inputs.image: unknown key 'layuot'; did you mean.*layout"),
        ("layout = 'HWC'", 'image.layout: found the string .HWC., expected "NCHW" or "NHWC"'),
        ("std = ['a']", r"image.std\[0\]: found the string 'a', expected a number or"),
        ("datatype = 'UINT9'", "image.datatype: found the string 'UINT9', expected BOOL, .*; did you mean 'UINT8'"),
        ("shape = [-1, 4]", "image.datatype: found nothing, expected BOOL"),
        ("datatype = 'UINT8'", r"image.shape: found none, expected for instance \[-1, 4\]"),
        ("datatype = 'UINT8'\nshape = [1, 4]", r"image.shape: found \[1, 4\], expected -1 for the rows"),
        ("datatype = 'UINT8'\nshape = [-1, 4]\nstd = 255", 'image.std: found without layout, expected layout = "NHWC"'),
        ("datatype = 'UINT8'\nlayout = 'NHWC'\nmean = nan", "image.mean: found (nan|.nan.), expected"),
        ("datatype = 'UINT8'\nlayout = 'NHWC'\nstd = 1e-50", "image.std: found .*, expected numbers, and none of 0"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(toml: Callable[[str], str], line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(toml(f"{SOURCE}[models.net.inputs.image]\n{line}\n"), env={})


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"datatype": "BYTES"},
            "x.datatype: found the string 'BYTES', expected UINT8, .*, because layout, mean and std",
        ),
        ({"datatype": "BOOL", "layout": None, "mean": 1}, "x.datatype: found the string 'BOOL', expected UINT8"),
        ({"shape": [-1, 224, 224]}, r"x.shape: found \[-1, 224, 224\], expected 4 sizes for the layout NHWC"),
        ({"shape": [-1, 8, 8, 3], "mean": [1, 2]}, r"x.mean: found 2 numbers, expected one, .* NHWC \[-1, 8, 8, 3\]"),
        ({"shape": [-1, 3, 8, 8], "std": [1, 2, 3]}, r"x.std: found 3 numbers"),
        ({"mean": [1, 2], "std": [1, 2, 3]}, r"x.std: found 3 numbers, .* NHWC \[-1, -1, -1, 2\]"),
        ({"std": 0}, r"x.std: found \[0.0\], expected numbers, and none of 0, in the units of the pixels"),
        ({"std": [1, 0, 1]}, "x.std: found"),
        ({"std": []}, r"x.std: found \[\], expected"),
        ({"mean": float("nan")}, r"x.mean: found \[nan\], expected numbers, in the units"),
        ({"std": float("inf")}, "x.std: found"),
        ({"mean": 1e39}, "x.mean: found"),
    ],
)
def test_an_image_that_makes_no_sense_is_refused(keys: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        input_texts({"x": image(**keys)}, "inputs")


@pytest.mark.parametrize(
    ("keys", "network", "told"),
    [
        ({}, (-1, 7), r"x.layout: found NHWC, but the network takes no images: \[-1, 7\]"),
        (
            {"shape": [-1, 9, 9, 3]},
            (-1, 3, 8, 8),
            r"x.shape: found \[-1, 9, 9, 3\], but the network takes \[-1, 8, 8, 3\]",
        ),
        ({"mean": RGB}, (-1, 8, 8, 3), r"x.mean: found 3 numbers, .* NHWC \[-1, 8, 3, 8\]"),
    ],
)
def test_an_image_that_the_network_does_not_take_is_refused(keys: Any, network: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        image_shape(image(**keys), "x", network)


def test_a_table_with_pad_is_a_padded_tensor() -> None:
    tables = {"ids": InputConfig(datatype="INT64", shape=(-1, -1), pad=0), "x": "FP32[-1,4]"}
    found = input_texts(tables, "inputs")
    assert found == {"ids": TensorSpec("ids", "INT64", (-1, -1), pad=0), "x": "FP32[-1,4]"}
    assert tensor_specs(found, "inputs")[0].pad == 0


@pytest.mark.parametrize(
    ("datatype", "fits", "wrong", "wanted"),
    [
        ("INT8", (-128, 127), (128, 0.0, True, "0"), "a whole number from -128 to 127"),
        ("UINT64", (0, 2**64 - 1), (-1, 2**64), "a whole number from 0 to 18446744073709551615"),
        ("FP16", (0, 65504.0, -math.inf), (65505, math.nan, False), "a number that FP16 has"),
        ("FP64", (1e300,), (10**400, "x"), "a number that FP64 has"),
        ("BOOL", (True,), (1,), "true or false"),
        ("BYTES", ("", "[PAD]"), (0,), "a text"),
    ],
)
def test_a_pad_must_be_a_value_of_the_datatype(datatype: str, fits: Any, wrong: Any, wanted: str) -> None:
    for pad in fits:
        check_pad(TensorSpec("x", datatype, (-1, 3, -1), pad=pad), "inputs.x")
    for pad in wrong:
        with pytest.raises(ConfigError, match=rf"inputs.x.pad: found .* for {datatype}, expected {wanted}"):
            check_pad(TensorSpec("x", datatype, (-1, -1), pad=pad), "inputs.x")


@pytest.mark.parametrize("shape", [(-1,), (-1, 4), (-1, -1, -1)])
def test_a_pad_needs_one_free_axis(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"inputs.x.pad: found for the shape .*, expected one free axis"):
        tensor_specs(input_texts({"x": InputConfig(datatype="INT64", shape=shape, pad=0)}, "inputs"), "inputs")
    with pytest.raises(ConfigError, match="images are not padded"):
        input_texts({"x": image(pad=0)}, "inputs")
