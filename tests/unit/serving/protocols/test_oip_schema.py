"""The schemas of requests state the sizes that the codecs check, with rows and without."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from penstock.errors import BadRequest
from penstock.serving.protocols.kserve import KServeCodec
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.types import Item, ModelMetadata, TensorSpec

SPECS = (TensorSpec("x", "FP32", (2, 3)), TensorSpec("wait", "FP32", (1,)))


def oip(shape: tuple[int, ...], waits: int) -> dict[str, Any]:
    given = (("x", shape), ("wait", (waits,)))
    return {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": list(sizes), "data": np.ones(sizes).ravel().tolist()}
            for name, sizes in given
        ]
    }


def kserve(shape: tuple[int, ...], waits: int) -> dict[str, Any]:
    return {"instances": [{"x": np.ones(shape).tolist(), "wait": np.ones(waits).tolist()}]}


@pytest.mark.parametrize(
    ("codec", "unbatched", "body", "valid"),
    [
        (OipJsonCodec, True, oip((2, 3), 1), True),
        (OipJsonCodec, True, oip((4, 3), 1), False),
        (OipJsonCodec, True, oip((2, 3), 2), False),
        (OipJsonCodec, False, oip((4, 3), 4), True),
        (KServeCodec, True, kserve((2, 3), 1), True),
        (KServeCodec, True, kserve((4, 3), 1), False),
        (KServeCodec, False, {"instances": [{"x": [1, 2, 3], "wait": 1}] * 4}, True),
        (KServeCodec, False, kserve((2, 3), 1), False),
    ],
)
def test_what_the_schema_admits_the_codec_takes(codec: Any, unbatched: bool, body: Any, valid: bool) -> None:
    model = ModelMetadata("m", "1", inputs=SPECS, unbatched=unbatched)
    schema = codec.request_content(model)["application/json"]
    assert Draft202012Validator(schema).is_valid(body) is valid
    item = Item(json.dumps(body).encode(), content_type="application/json")
    if valid:
        codec("m", "1", model).decode(item)
    else:
        with pytest.raises(BadRequest, match="shape must be"):
            codec("m", "1", model).decode(item)
