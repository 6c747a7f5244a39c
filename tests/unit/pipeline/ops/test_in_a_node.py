"""Items that an op rejects, among good ones in a node's batch: each fails alone, and the others are unchanged."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from penstock.errors import DecodeError
from penstock.pipeline.graph import Node, NodeStep
from penstock.pipeline.handover import Visit
from penstock.pipeline.node import NodeModel

PREPARE = (
    NodeStep("DecodeMat"),
    NodeStep("ResizeMat", {"resize_h": "20", "resize_w": "30"}, "swap"),
    NodeStep("CvtColorMat", {"color": "rgb"}, "swap"),
    NodeStep("Mat2Tensor", {}, "swap"),
)


@pytest.fixture
def node():
    made = []

    def make(*steps: NodeStep) -> NodeModel:
        model = NodeModel(Node("prepare", steps=steps))
        model.load("cpu")
        made.append(model)
        return model

    yield make
    for model in made:
        model.unload()


def bad_images(encode):
    jpeg, png = encode("JPEG"), encode("PNG")
    at = jpeg.find(b"\xff\xc0")
    return {
        "empty": b"",
        "no bytes": "text",
        "nothing": None,
        "no image": b"<html></html>",
        "a cut JPEG": jpeg[: len(jpeg) // 2],
        "a cut PNG": png[: len(png) // 2],
        "a bomb": jpeg[: at + 5] + struct.pack(">HH", 20_000, 20_000) + jpeg[at + 9 :],
        "an array": np.zeros((4, 4, 3), np.uint8),
    }


def odd_images(encode, rgb):
    """Items that look bad but are valid."""
    one = io.BytesIO()
    Image.new("RGB", (1, 1)).save(one, "PNG")
    deep = io.BytesIO()
    Image.fromarray(rgb[:, :, 0].astype(np.uint16) * 257).save(deep, "PNG")
    return {
        "one pixel": one.getvalue(),
        "CMYK": encode("JPEG", "CMYK"),
        "gray": encode("JPEG", "L"),
        "gray and alpha": encode("PNG", "LA"),
        "alpha": encode("PNG", "RGBA"),
        "16 bits": deep.getvalue(),
        "a PNG named JPEG": encode("PNG"),
    }


def results(model, items):
    """The result or error of each item."""
    answers = model.predict([Visit(fields, False) for fields in items])
    return [answer if isinstance(answer, Exception) else answer[0]["result"] for answer in answers]


def test_bad_images_fail_alone_and_odd_ones_do_not_fail(node, encode, rgb, capfd):
    model = node(*PREPARE)
    good, bad, odd = encode("JPEG"), bad_images(encode), odd_images(encode, rgb)
    (alone,) = results(model, [{"data": good}])
    assert alone.shape == (1, 3, 20, 30)
    items = [{"data": good}]
    for data in [*bad.values(), *odd.values()]:
        items += [{"data": data}, {"data": good}]
    found = results(model, items)
    assert all(np.array_equal(result, alone) for result in found[::2])
    for name, error in zip(bad, found[1::2], strict=False):
        assert isinstance(error, DecodeError), name
        assert error.code == "undecodable"
        assert "node 'prepare', op 'DecodeMat', item " in error.detail
    for name, result in zip(odd, found[1 + 2 * len(bad) :: 2], strict=True):
        assert getattr(result, "shape", None) == (1, 3, 20, 30), name
