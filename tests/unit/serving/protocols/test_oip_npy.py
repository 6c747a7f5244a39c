"""Arrays of numpy's file format on the Open Inference routes."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.oip_binary import NPY, OipNpyCodec, read_npy_head, write_npy_head
from penstock.types import Item, ModelMetadata, Response, TensorSpec

CODEC = OipNpyCodec("m", "1")
WANTS_NPY = [(b"Accept", b"application/json;q=0.5, application/x-npy")]


def saved(array, version=None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), version=version, allow_pickle=True)
    return file.getvalue()


def head(text: str, size: int | None = None) -> bytes:
    return b"\x93NUMPY\1\0" + (len(text) if size is None else size).to_bytes(2, "little") + text.encode("latin-1")


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_from_numpy_save_arrives_unchanged(dtype, version, order):
    array = np.asarray(np.arange(24).reshape(2, 3, 4) % 2, dtype, order)
    arrays, _ = CODEC.decode(Item(saved(array, version)))
    assert list(arrays) == ["input_0"]
    assert arrays["input_0"].dtype == array.dtype
    assert np.array_equal(arrays["input_0"], array)
    assert arrays["input_0"].flags.c_contiguous


def test_the_array_is_a_view_of_the_body():
    body = memoryview(bytearray(saved(np.arange(6, dtype=np.float32)))).toreadonly()
    arrays, _ = CODEC.decode(Item(body))
    assert np.shares_memory(arrays["input_0"], np.frombuffer(body, np.uint8))


def test_it_is_the_first_input_that_the_model_declares():
    inputs = (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("y", "INT8", (-1,), True))
    codec = OipNpyCodec("m", "1", ModelMetadata("m", "1", inputs=inputs))
    assert codec.decode(Item(saved(np.ones((3, 2), np.float32)), start=1, stop=3))[0]["x"].shape == (2, 2)
    with pytest.raises(BadRequest, match="'x': datatype must be FP32, found 'FP64'"):
        codec.decode(Item(saved(np.ones((3, 2)))))
    with pytest.raises(BadRequest, match=r"'x': shape must be \[-1, 2\]"):
        codec.decode(Item(saved(np.ones((3, 3), np.float32))))


class Canary:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not an array in the format of numpy.save"),
        (b"\x80\x04K\x01.", "not an array in the format of numpy.save"),
        (b"\x93NUMPY", "not an array in the format of numpy.save"),
        (b"\x93NUMPY\4\0" + bytes(200), "version 1 to 3"),
        (saved(np.array([Canary()], object)), "dtype '|O'"),
        (saved(np.zeros(2, [("a", "i4")])), "the head of the array is invalid"),
        (saved(np.zeros(2, ">f4")), "dtype '>f4', expected one of"),
        (saved(np.zeros(2, "c8")), "dtype '<c8'"),
        (saved(np.zeros(2, "M8[s]")), "dtype '<M8"),
        (saved(np.array(["a"])), "dtype '<U1'"),
        (saved(np.float32(1)), "0 axes"),
        (saved(np.zeros(2))[:-1], "needs 16 bytes, found 15"),
        (saved(np.zeros(2)) + b"x", "needs 16 bytes, found 17"),
        (head(GOOD.replace("2,", "9" * 18 + ", " + "9" * 18)), "needs"),
        (head(GOOD.replace("2,", "9" * 19)), "expected whole numbers"),
        (head(GOOD.replace("2,", "1 2")), "expected whole numbers"),
        (head(GOOD.replace("2,", "-2")), "the head of the array is invalid"),
        (head(GOOD.replace("2,", "1, 0, 999999999999999999")), "is too large"),
        (head(GOOD.replace("2,", "9999999, 0")), "is too large"),
        (head(GOOD.replace("'shape'", "'shapes'")), "the head of the array is invalid"),
        (head("{'descr': '<f4', 'shape': (2,)}"), "the head of the array is invalid"),
        (head("[" * 5000), "the head of the array is invalid"),
        (head("{" + "," * 9000 + "'descr'"), "the head of the array is invalid"),
        (head(GOOD, 60000), "has 60000 bytes, expected at most 10000"),
        (head(GOOD, 1000), "inside the body"),
    ],
)
def test_a_body_other_than_a_plain_array_is_refused(body, why):
    with pytest.raises(BadRequest, match=why):
        CODEC.decode(Item(body))


def test_a_client_that_accepts_arrays_gets_a_single_output_as_an_array():
    item = Item(b"", headers=WANTS_NPY)
    for value in (np.arange(6, dtype=">i2").reshape(2, 3), {"y": np.array([np.nan])}, [True, False]):
        result = CODEC.encode(value, item, None)
        assert result.content_type == NPY
        found = np.load(io.BytesIO(result.body))
        wanted = np.asarray(next(iter(value.values())) if isinstance(value, dict) else value)
        assert found.dtype == wanted.dtype.newbyteorder("<")
        assert np.array_equal(found, wanted, equal_nan=wanted.dtype.kind == "f")


@pytest.mark.parametrize("value", [{"a": [1], "b": [2]}, {"a": ["text"]}])
def test_several_or_textual_outputs_are_answered_in_json(value):
    answer = json.loads(CODEC.encode(value, Item(b"", headers=WANTS_NPY), None).body)
    assert [output["name"] for output in answer["outputs"]] == list(value)


def test_the_default_answer_is_json():
    assert CODEC.encode([1], Item(b"", headers=[(b"accept", b"*/*")]), None).content_type == "application/json"
    assert CODEC.encode(Response("own"), Item(b"", headers=WANTS_NPY), None).body == b"own"
    with pytest.raises(BadOutput, match="returned None"):
        CODEC.encode(None, Item(b"", headers=WANTS_NPY), None)


def test_joined_parts_equal_the_whole_answer():
    whole = np.arange(10, dtype=np.float16).reshape(5, 2)
    for headers in (WANTS_NPY, None):
        item = Item(b"", headers=headers)
        parts = [CODEC.encode(part, item, None) for part in (whole[:2], whole[2:])]
        assert CODEC.join(parts) == CODEC.encode(whole, item, None)
    other = CODEC.encode(np.zeros((1, 3)), Item(b"", headers=WANTS_NPY), None)
    with pytest.raises(BadOutput, match="differs between the parts"):
        CODEC.join([CODEC.encode(whole, Item(b"", headers=WANTS_NPY), None), other])


def test_rows_and_shape_are_peeked_from_the_head():
    body = saved(np.zeros((7, 2, 3), np.uint8))
    peek = OipNpyCodec.peek
    assert peek(Item(b""), body) == (7, ":UINT8:2x3")
    assert peek(Item(b""), body[:20]) is None
    assert peek(Item(b""), head("{'descr': '|u1', 'fortran_order': False, 'shape': (99999999, 0), }"))[0] == 1


def test_a_written_head_can_be_read():
    assert read_npy_head(write_npy_head("FP16", (3, 4))).shape == [3, 4]
    assert len(write_npy_head("BOOL", (3,))) % 64 == 0
