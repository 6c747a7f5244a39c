from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.align import AlignMat, BatchFixHLimitW
from penstock.pipeline.ops.resize import DynamicFixHResizePadMat, DynamicResizeMat


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
def test_what_resizes_behind_it_makes_all_of_one_size(cls, then):
    data = mats((40, 90), (20, 33), (7, 60))
    fields = [{} for _ in data]
    results = [then(mat, one) for mat, one in zip(cls(32, 640)(data, fields), fields, strict=True)]
    assert {result.shape for result in results} == {(32, 288, 3)}


def test_what_is_no_image_fails_alone():
    good = mats((64, 128))[0]
    fields = [{}, {}]
    bad, first = AlignMat(32, 320)([b"bytes", good], fields)
    assert isinstance(bad, BadRequest)
    assert first is good
    assert fields[1]["resize_w"] == 64
    (bad,) = AlignMat(32, 320)([None], [{}])
    assert isinstance(bad, BadRequest)


@pytest.mark.parametrize(("max_w", "align"), [(100, 32), (320, 0), (320, -1)])
def test_a_width_that_is_no_multiple_is_told(max_w, align):
    with pytest.raises(
        ConfigError, match=f"AlignMat: max_w = {max_w} and align = {align}, expected max_w to be a multiple"
    ):
        AlignMat(32, max_w, align)
