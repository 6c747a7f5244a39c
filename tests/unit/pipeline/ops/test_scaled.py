from __future__ import annotations

import logging

import numpy as np
import pytest
from PIL import Image

from penstock.errors import ConfigError
from penstock.pipeline.ops.cv import cv2
from penstock.pipeline.ops.decode import DecodeMat
from penstock.pipeline.ops.scaled import accuracy, picture


def jpeg(height, width):
    _, data = cv2.imencode(".jpg", picture(height, width, 3))
    return data.tobytes()


@pytest.mark.parametrize("decoder", ["opencv", "simplejpeg"])
@pytest.mark.parametrize(
    ("size", "wanted", "found"),
    [
        ((100, 200), (50, 100), (50, 100)),
        ((100, 200), (51, 100), (100, 200)),
        ((101, 201), (51, 101), (51, 101)),
        ((400, 200), (50, 50), (100, 50)),
        ((400, 400), (51, 50), (100, 100)),
        ((400, 400), (50, 50), (50, 50)),
        ((900, 900), (3, 3), (113, 113)),
        ((40, 30), (50, 10), (40, 30)),
    ],
)
def test_a_jpeg_is_never_decoded_smaller_than_it_is_wanted(decoder, size, wanted, found):
    mat = DecodeMat(decoder=decoder, scale_h=wanted[0], scale_w=wanted[1])(jpeg(*size), {})
    assert mat.shape == (*found, 3)


@pytest.mark.parametrize("decoder", ["opencv", "simplejpeg"])
def test_what_lies_on_its_side_is_scaled_by_its_own_sides(decoder):
    import io

    marks, out = Image.Exif(), io.BytesIO()
    marks[0x0112] = 6
    Image.fromarray(picture(200, 400, 1)).save(out, "JPEG", exif=marks)
    assert DecodeMat(decoder, scale_h=200, scale_w=100)(out.getvalue(), {}).shape == (200, 100, 3)
    assert DecodeMat(decoder, scale_h=100, scale_w=200)(out.getvalue(), {}).shape == (400, 200, 3)


def test_what_is_no_jpeg_is_not_scaled(encode):
    assert DecodeMat(scale_h=8, scale_w=8)(encode("PNG"), {}).shape == (67, 90, 3)


def test_both_sides_are_told_or_none():
    with pytest.raises(ConfigError, match="scale_h = 224 and scale_w = 0: set both"):
        DecodeMat(scale_h=224)


def test_its_accuracy_is_measured_and_told_when_it_is_loaded(caplog):
    caplog.set_level(logging.INFO, "penstock.ops")
    DecodeMat().load("cpu")
    assert DecodeMat().note() == ""
    assert not caplog.records
    op = DecodeMat(scale_h=32, scale_w=32)
    op.load("cpu")
    assert op.note() in caplog.text
    assert f"{accuracy(32, 32).mean:.1f} of 255" in caplog.text


def test_the_measure_is_of_the_size_of_that_on_photographs():
    """One photograph is busy and one is blurred; what is generated, between."""
    datasets = pytest.importorskip("sklearn.datasets")
    found = []
    for image in datasets.load_sample_images().images:
        _, data = cv2.imencode(".jpg", image[:, :, ::-1])
        full, scaled = (
            cv2.resize(op(data.tobytes(), {}), (160, 160)).astype(int)
            for op in (DecodeMat(), DecodeMat(scale_h=160, scale_w=160))
        )
        found.append(np.abs(full - scaled).mean())
    measured = accuracy(160, 160)
    assert min(found) < measured.mean < max(found)
    assert measured.within > measured.mean


def test_a_picture_is_the_same_for_the_same_seed():
    assert np.array_equal(picture(20, 30, 1), picture(20, 30, 1))
    assert not np.array_equal(picture(20, 30, 1), picture(20, 30, 2))
