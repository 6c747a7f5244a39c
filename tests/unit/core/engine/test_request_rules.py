from __future__ import annotations

import json

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.engine.rules import bucket_rule, length_rule, rows_rule
from penstock.core.wire.slabs import SlabPool
from penstock.errors import BadRequest, ConfigError
from penstock.serving.protocols.oip_binary import write_npy_head
from penstock.serving.protocols.oip_messages import encode_request
from penstock.types import Item, TensorSpec

INFER = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3,2],"data":[1,2,3,4,5,6]}]}'


def test_rows_of_an_open_inference_request_are_axis_0_of_its_first_input() -> None:
    for rows, count in (("auto", 3), ("axis0", 3), ("none", 1)):
        assert rows_rule(BatchingConfig(rows=rows))(Item(INFER, codec="oip_json")) == count


def test_a_body_over_64_kib_is_not_looked_into() -> None:
    assert rows_rule(BatchingConfig())(Item(INFER + b" " * 70_000, codec="oip_json")) == 1


def test_rows_can_be_read_from_a_header() -> None:
    rows = rows_rule(BatchingConfig(rows="header:X-Rows"))
    assert rows(Item(b"", codec="native", headers=[(b"x-rows", b"5")])) == 5
    assert rows(Item(b"", codec="native")) == 1
    for wrong in (b"0", b"-1", b"1e3", b"9" * 5000):
        with pytest.raises(BadRequest, match="x-rows"):
            rows(Item(b"", codec="native", headers=[(b"X-Rows", wrong)]))


def test_buckets_by_shape_content_type_and_header() -> None:
    assert bucket_rule(BatchingConfig()) is None
    shape = bucket_rule(BatchingConfig(bucket="shape"))
    other = INFER.replace(b"[3,2]", b"[2,3]")
    same = INFER.replace(b"[3,2]", b"[7,2]")
    assert shape is not None
    assert shape(Item(INFER, codec="oip_json")) == shape(Item(same, codec="oip_json"))
    assert shape(Item(INFER, codec="oip_json")) != shape(Item(other, codec="oip_json"))
    kind = bucket_rule(BatchingConfig(bucket="content-type"))
    assert kind is not None
    assert kind(Item(b"", content_type="image/png")) == "image/png"
    header = bucket_rule(BatchingConfig(bucket="header:X-Bucket"))
    assert header is not None
    assert header(Item(b"", headers=[(b"x-bucket", b"big")])) == "big"


@pytest.mark.parametrize("key", ["rows", "bucket"])
def test_an_unknown_rule_is_refused(key: str) -> None:
    make = {"rows": rows_rule, "bucket": bucket_rule}[key]
    with pytest.raises(ConfigError, match=key):
        make(BatchingConfig(**{key: "header:"}))


@pytest.mark.parametrize("in_slab", [False, True])
def test_rows_and_shape_of_binary_tensors_of_any_size_are_read(in_slab):
    pool = SlabPool(2**20)

    def item(rows, side, codec):
        if codec == "oip_npy":
            head, buffers = write_npy_head("UINT8", (rows, side)), [bytes(rows * side)]
        else:
            head, buffers = encode_request([("x", "UINT8", (rows, side), bytes(rows * side))])
        body = b"".join([head, *buffers])
        if in_slab:
            slab = pool.allocate(len(body))
            slab.view[:] = body
            body = slab
        return Item(body, codec, headers=[(b"Inference-Header-Content-Length", b"%d" % len(head))])

    rows, shape = rows_rule(BatchingConfig()), bucket_rule(BatchingConfig(bucket="shape"))
    for codec in ("oip_binary", "oip_npy"):
        assert rows(item(7, 20_000, codec)) == 7
        assert shape(item(7, 20, codec)) == shape(item(3, 20, codec)) != shape(item(7, 21, codec))
    broken = item(7, 20, "oip_binary")
    broken.headers = [(b"Inference-Header-Content-Length", b"-1")]
    assert (rows(broken), shape(broken)) == (1, "")


IDS = TensorSpec("ids", "INT64", (-1, -1), pad=0)
OTHER = TensorSpec("x", "FP32", (-1, 3))


def oip(**shapes: list[int]) -> Item:
    inputs = [{"name": name, "datatype": "INT64", "shape": shape, "data": []} for name, shape in shapes.items()]
    return Item(json.dumps({"inputs": inputs}).encode() + b" " * 40, codec="oip_json")


def test_the_length_of_a_request_is_that_of_its_padded_inputs() -> None:
    assert length_rule(BatchingConfig(), (IDS,)) is None
    of = length_rule(BatchingConfig(bucket="length"), (IDS, OTHER))
    assert of is not None
    assert of(oip(ids=[2, 17], x=[2, 3])) == ("ids:INT64:-1;x:INT64:3", 17)
    assert of(oip(x=[2, 3], ids=[2, 9]))[0] == of(oip(ids=[2, 17], x=[2, 3]))[0]
    assert of(oip(INPUT__0=[1, 5]))[1] == 5
    liar = oip(ids=[1, 10**18])
    assert of(liar)[1] == len(liar.payload)
    assert of(oip(ids=[0, 0], x=[0]))[1] >= 1
    assert of(oip(**{"a;b": [1, 3]}))[0] == of(oip(**{"a;b:c:d": [1, 3]}))[0] == ""
    instances = b'{"instances": [[1, 2, 3, 4], [5, 6, 7, 8]]}'
    assert of(Item(instances, codec="kserve"))[1] in (3, 4)
    for value in ({"ids": np.zeros((2, 6))}, {"x": [1], "ids": [[1] * 6]}, {"ids": [1] * 6}, [1] * 6, [[1] * 6] * 2):
        assert of(Item(value)) == ("", 6)
    assert of(Item([[1], [1, 2]], many=True))[1] == 2
    assert of(Item({"x": 1}))[1] == 0


def test_without_padded_inputs_a_length_is_that_of_the_items() -> None:
    of = length_rule(BatchingConfig(bucket="length"), ())
    assert of is not None
    assert of(Item("four")) == ("", 4)
    assert of(Item(["a", "abc", ""], many=True, rows=3))[1] == 3
    assert of(Item({"ids": [1, 2], "mask": [1, 1]}))[1] == 2
    assert of(Item(b"x" * 30, codec="native"))[1] == 30
    with pytest.raises(BadRequest, match=r"an item is a int, which has no length; .* expects texts, lists or arrays"):
        of(Item(5))
