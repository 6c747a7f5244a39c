"""Open Inference Protocol with binary tensors."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.serving.protocols.oip_binary import OipBinaryCodec
from penstock.serving.protocols.oip_messages import (
    HEADER_LENGTH,
    decode_answer,
    encode_arrays,
    encode_request,
    parse_length,
)
from penstock.types import Item, ItemResult, ModelMetadata, TensorSpec

CODEC = OipBinaryCodec("m", "1")
FRAMES = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)


def packed(head: bytes, buffers, **more) -> Item:
    body = b"".join([head, *buffers])
    return Item(body, "oip_binary", headers=[(b"Inference-Header-Content-Length", b"%d" % len(head))], **more)


def raw(inputs, data=b"", length=None, **more) -> Item:
    head = json.dumps({"inputs": inputs, **more}).encode()
    return Item(head + data, "oip_binary", headers=[(b"inference-header-content-length", length or b"%d" % len(head))])


def tensor(name="x", shape=(2,), datatype="FP32", size=8, **more):
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": {"binary_data_size": size}, **more}


def answered(result: ItemResult):
    length = dict(result.headers or ()).get(HEADER_LENGTH)
    return decode_answer(result.body, None if length is None else int(length))


def test_frames_and_their_numbers_are_read_only_views_of_the_body():
    index = np.arange(2)
    head, buffers = encode_arrays({"frames": FRAMES, "frame_index": index})
    assert len(head) % 64 == 0
    item = packed(head, buffers)
    item.payload = memoryview(bytearray(item.payload)).toreadonly()
    arrays, _ = CODEC.decode(item)
    assert np.array_equal(arrays["frames"], FRAMES)
    assert arrays["frame_index"].tolist() == [0, 1]
    whole = np.frombuffer(item.payload, np.uint8)
    for array in arrays.values():
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable


def test_a_tensor_at_an_odd_address_is_copied():
    head = b'{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}'
    for pad in range(4):
        padded = head + b" " * pad
        arrays, _ = CODEC.decode(packed(padded, [struct.pack("<2f", 1.5, -2)]))
        assert arrays["x"].flags.aligned
        assert arrays["x"].tolist() == [1.5, -2]


def test_inputs_in_json_and_in_bytes_mix():
    plain = {"name": "n", "shape": [2], "datatype": "INT64", "data": [7, 8]}
    arrays, context = CODEC.decode(raw([tensor(), plain], struct.pack("<2f", 1, 2), id="q"))
    assert arrays["x"].tolist() == [1, 2]
    assert arrays["n"].tolist() == [7, 8]
    assert context.id == "q"


def test_bytes_have_their_length_before_them():
    head, buffers = encode_request([("jpeg", "BYTES", (3,), [b"", b"\xff\xd8", b"x" * 300])])
    assert b"".join(buffers)[:10] == b"\0\0\0\0\2\0\0\0\xff\xd8"
    arrays, _ = CODEC.decode(packed(head, buffers))
    assert arrays["jpeg"].tolist() == [b"", b"\xff\xd8", b"x" * 300]


def test_every_byte_of_bool_other_than_0_is_true():
    arrays, _ = CODEC.decode(raw([tensor(shape=(4,), datatype="BOOL", size=4)], b"\0\1\2\xff"))
    assert arrays["x"].tolist() == [False, True, True, True]
    assert arrays["x"].tobytes() == b"\0\1\1\1"


def test_bf16_is_an_array_of_float32():
    arrays, _ = CODEC.decode(raw([tensor(datatype="BF16", size=4)], bytes.fromhex("803f20c0")))
    assert arrays["x"].dtype == np.float32
    assert arrays["x"].tolist() == [1.0, -2.5]


def test_declared_bf16_outputs_are_rounded_to_the_nearest_even():
    codec = OipBinaryCodec("m", "1", ModelMetadata("m", "1", outputs=(TensorSpec("y", "BF16", (-1,)),)))
    _, context = codec.decode(raw([tensor()], bytes(8), parameters={"binary_data_output": True}))
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    values.view(np.uint32)[5] = 0x7F800001  # a NaN whose upper half alone is infinity
    got = answered(codec.encode({"y": values}, Item(b""), context)).outputs["y"]
    assert got[:5].tolist() == [1, 1, 1 + 2**-6, np.inf, -np.inf]
    assert np.isnan(got[5])
    assert got[6] == np.inf
    with pytest.raises(BadRequest, match="'y': BF16 has no form in JSON"):
        codec.encode({"y": values}, Item(b""), None)


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (raw([tensor(size=9)], bytes(9)), r"shape \[2\] of FP32 needs 8 bytes, found 9"),
        (raw([tensor(size=8)], bytes(7)), "binary_data_size is 8, but only 7 bytes remain"),
        (raw([tensor(size=8)], bytes(9)), "9 bytes follow the JSON, but the binary_data_size of every input adds"),
        (raw([tensor(size=8), tensor("y", size=8)], bytes(12)), "'y': binary_data_size is 8, but only 4 bytes"),
        (raw([tensor(size=-8)], bytes(8)), "the wrong form"),
        (raw([tensor(size=1.5)], bytes(8)), "the wrong form"),
        (raw([tensor(shape=(2**62, 4), size=0)]), "needs 73786976294838206464 bytes, found 0"),
        (raw([tensor(shape=(2**63, 2**63), size=0)]), "needs"),
        (raw([tensor(shape=(1, 0, 2**62), size=0)]), "is too large"),
        (raw([tensor(shape=(2**20 + 1, 0), size=0)]), "is too large"),
        (raw([tensor(shape=(2**20 + 1, 0), data=[], parameters={})]), "is too large"),
        (raw([tensor(shape=(2, -1), size=0)]), "negative axis"),
        (raw([tensor(shape=(-2,), size=8)], bytes(8)), "negative axis"),
        (raw([tensor(shape=(1,) * 33, size=4)], bytes(4)), "33 axes"),
        (raw([tensor(shape=(), size=4)], bytes(4)), "0 axes"),
        (raw([tensor(datatype="FP8", size=2)], bytes(2)), "unknown datatype 'FP8'"),
        (raw([tensor(datatype="OBJECT", size=2)], bytes(2)), "unknown datatype"),
        (raw([tensor(data=[1, 2])], bytes(8)), "both `data` and parameters.binary_data_size"),
        (raw([{"name": "x", "shape": [1], "datatype": "FP32"}]), "missing required field `data`"),
        (
            raw([tensor(datatype="BYTES", size=7)], b"\1\0\0\0a\1\0"),
            "2 elements of BYTES need at least 8 bytes, found 7",
        ),
        (raw([tensor(datatype="BYTES", size=9)], b"\5\0\0\0a\0\0\0\0"), "element 1 of BYTES ends beyond the 9 bytes"),
        (raw([tensor(datatype="BYTES", size=9)], b"\xff\xff\xff\xff\0\0\0\0a"), "element 0 of BYTES ends beyond"),
        (raw([tensor(datatype="BYTES", size=9)], b"\0\0\0\0\0\0\0\0a"), "1 bytes follow the last of 2"),
        (raw([tensor(shape=(2**60,), datatype="BYTES", size=8)], bytes(8)), "need at least 4611686018427387904 bytes"),
        (raw([tensor()], bytes(8), b"100000"), "from 0 to 65536"),
        (raw([tensor()], bytes(8), b"60000"), "is 60000, but the body has"),
        (raw([tensor()], bytes(8), b"5"), "not valid JSON"),
        (Item(b"{}", "oip_binary"), "the model declares 0 inputs"),
    ],
)
def test_an_inconsistent_request_is_refused_with_the_found_and_expected_values(item, why):
    with pytest.raises(BadRequest, match=why):
        CODEC.decode(item)


@pytest.mark.parametrize("value", [b"", b"-1", b"+5", b"1.0", b"0x10", b" 5", b"65537", b"9" * 5000, b"\xb2"])
def test_a_header_length_is_a_whole_number_up_to_64_kib(value):
    with pytest.raises(BadRequest, match="Inference-Header-Content-Length must be"):
        parse_length(value)


def test_binary_outputs_are_requested_one_by_one_or_for_all():
    value = {"a": np.array([[1, 2]], np.int16), "s": ["é"], "f": [0.5]}
    for wishes, binary in (
        ({}, []),
        ({"parameters": {"binary_data_output": True}}, ["a", "s", "f"]),
        ({"outputs": [{"name": "s", "parameters": {"binary_data": True}}, {"name": "a"}]}, ["s"]),
        (
            {
                "outputs": [{"name": "s", "parameters": {"binary_data": False}}, {"name": "a"}],
                "parameters": {"binary_data_output": True},
            },
            ["a"],
        ),
    ):
        _, context = CODEC.decode(raw([tensor()], bytes(8), **wishes))
        result = CODEC.encode(value, Item(b""), context)
        length = int(dict(result.headers or ()).get(HEADER_LENGTH, len(result.body)))
        said = json.loads(result.body[:length])["outputs"]
        assert [o["name"] for o in said if "data" not in o] == binary
        assert result.content_type == ("application/octet-stream" if binary else "application/json")
        got = answered(result).outputs
        assert list(got) == [w["name"] for w in wishes.get("outputs", [{"name": n} for n in value])]
        assert got["a"].tolist() == [[1, 2]]
        assert got["s"].tolist() == ["é".encode()]


def test_a_request_in_json_may_ask_for_binary_outputs():
    head = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    codec = OipJsonCodec("m", "1")
    _, context = codec.decode(Item(json.dumps({**head, "parameters": {"binary_data_output": True}}).encode()))
    result = codec.encode(np.array([np.nan], ">f4"), Item(b""), context)
    assert result.content_type == "application/octet-stream"
    assert np.isnan(answered(result).outputs["output_0"]).all()


def test_the_revision_of_the_model_stands_in_every_answer():
    known = ModelMetadata("m", "1", parameters={"revision": "r7", "height": 224})
    for codec in (OipBinaryCodec("m", "1", known), OipJsonCodec("m", "1", known)):
        for binary in (False, True):
            context = OipBinaryCodec("m", "1").decode(
                raw([tensor()], bytes(8), parameters={"binary_data_output": binary})
            )[1]
            answer = answered(codec.encode([1], Item(b""), context))
            assert answer.parameters == {"revision": "r7"}


@pytest.mark.parametrize("binary", [False, True])
def test_joined_parts_equal_the_whole_answer(binary):
    head, buffers = encode_request(
        [
            ("x", "INT32", (5, 2), np.arange(10, dtype=np.int32).tobytes()),
            ("s", "BYTES", (5,), [b"a", b"", b"c", b"dd", b"e"]),
        ],
        binary_outputs=binary,
        id="q",
    )
    request = packed(head, buffers)

    def answer(start=0, stop=-1):
        request.start, request.stop = start, stop
        arrays, context = CODEC.decode(request)
        return CODEC.encode({"y": arrays["x"] * 2, "s": arrays["s"]}, request, context)

    whole = answer()
    assert CODEC.join([answer(0, 2), answer(2, 3), answer(3, 5)]) == whole
    assert answered(whole).outputs["y"].shape == (5, 2)


def test_joined_parts_hold_nan_and_infinity_and_texts_as_the_whole_answer_does():
    values = np.array([np.nan, 1.5, np.inf, -np.inf], np.float32)
    texts = np.array([b'"NaN"', b"Infinity", b"", b"x"], object)
    head, buffers = encode_request([("x", "FP32", (4,), values.tobytes()), ("s", "BYTES", (4,), texts.tolist())])
    request = packed(head, buffers)

    def answer(start=0, stop=-1):
        request.start, request.stop = start, stop
        arrays, context = CODEC.decode(request)
        return CODEC.encode(arrays, request, context)

    whole = answer()
    assert b"[NaN,1.5,Infinity,-Infinity]" in whole.body
    assert CODEC.join([answer(0, 1), answer(1, 3), answer(3, 4)]) == whole


def raw_codec(datatype: str, *shape: int, unbatched: bool = False) -> OipBinaryCodec:
    inputs = (TensorSpec("x", datatype, shape),)
    return OipBinaryCodec("m", "1", ModelMetadata("m", "1", inputs=inputs, unbatched=unbatched))


@pytest.mark.parametrize(
    ("codec", "body", "shape"),
    [
        (raw_codec("FP32", -1, 4), bytes(16), (1, 4)),
        (raw_codec("FP32", -1), bytes(4), (1,)),
        (raw_codec("INT16", -1, 2, -1), bytes(12), (1, 2, 3)),
        (raw_codec("INT16", -1, 2, -1), b"", (1, 2, 0)),
        (raw_codec("UINT8", -1, 3, unbatched=True), bytes(12), (4, 3)),
        (raw_codec("BYTES", -1, 1), b"\2\0", (1, 1)),
        (raw_codec("BYTES", 1, unbatched=True), b"", (1,)),
    ],
)
def test_a_raw_body_is_the_only_input_of_one_row(codec, body, shape):
    """As Triton reads it: no JSON, and no length before a text."""
    item = Item(body, "oip_binary", headers=[(b"inference-header-content-length", b"0")])
    assert codec.peek(item, body) is None
    arrays, context = codec.decode(item)
    assert arrays["x"].shape == shape
    assert (arrays["x"].ravel().tolist() == [body]) if arrays["x"].dtype == object else arrays["x"].tobytes() == body
    result = codec.encode(arrays, item, context)
    assert dict(result.headers)[HEADER_LENGTH]
    assert answered(result).outputs["x"].shape == shape


TWO = ModelMetadata("m", "1", inputs=tuple(TensorSpec(name, "FP32", (-1, 1), name == "b") for name in "ab"))


@pytest.mark.parametrize(
    ("codec", "body", "why"),
    [
        (raw_codec("FP32", -1, 4), bytes(32), r"shape \[1, 4\] of FP32 needs 16 bytes, found 32"),
        (raw_codec("FP32", -1, 4), b"", "needs 16 bytes, found 0"),
        (raw_codec("FP32", -1, 2, -1), bytes(12), r"shape \[1, 2, 1\] of FP32 needs 8 bytes, found 12"),
        (raw_codec("FP32", -1, 0, -1), bytes(4), "needs 0 bytes, found 4"),
        (raw_codec("FP32", -1, -1, -1), bytes(4), "several axes of 'x' are of any size"),
        (raw_codec("BYTES", -1, 2), b"a", r"a text has the shape \[1\], and 'x' has \[1, 2\]"),
        (raw_codec("BYTES", -1, unbatched=True), b"a", "a text has the shape"),
        (OipBinaryCodec("m", "1", TWO), bytes(4), "the model declares 2 inputs"),
    ],
)
def test_a_raw_body_whose_shape_is_not_known_is_refused(codec, body, why):
    with pytest.raises(BadRequest, match=why):
        codec.decode(Item(body, "oip_binary"))


def test_a_request_may_omit_all_inputs_only_if_all_are_optional():
    optional = OipJsonCodec("m", "1", ModelMetadata("m", "1", inputs=(TensorSpec("x", "FP32", (-1,), True),)))
    for body in (b"{}", b'{"inputs": []}'):
        assert optional.decode(Item(body))[0] == {}
        for codec in (OipJsonCodec("m", "1", TWO), OipJsonCodec("m", "1")):
            with pytest.raises(BadRequest, match="inputs is empty"):
                codec.decode(Item(body))


def test_only_an_optional_input_can_be_omitted():
    inputs = (
        TensorSpec("frames", "UINT8", (-1, -1, -1, 3), True),
        TensorSpec("jpeg", "BYTES", (-1,), True),
        TensorSpec("n", "INT64", (-1,)),
    )
    codec = OipBinaryCodec("m", "1", ModelMetadata("m", "1", inputs=inputs))
    one = ("n", "INT64", (1,), bytes(8))
    assert list(codec.decode(packed(*encode_request([one])))[0]) == ["n"]
    assert list(codec.decode(packed(*encode_request([("jpeg", "BYTES", (1,), [b""]), one])))[0]) == ["jpeg", "n"]
    with pytest.raises(BadRequest, match="input 'n' is missing; the model needs n"):
        codec.decode(packed(*encode_request([("jpeg", "BYTES", (1,), [b""])])))


def test_the_rows_are_peeked_from_the_json_alone():
    head, buffers = encode_arrays({"frames": FRAMES})
    item = packed(head, buffers)
    assert OipBinaryCodec.peek(item, memoryview(item.payload))[0] == 2
    assert OipBinaryCodec.peek(item, item.payload[:10]) is None
    for headers in ([(b"Inference-Header-Content-Length", b"x")], None):
        assert OipBinaryCodec.peek(Item(item.payload, headers=headers), item.payload) is None


def test_a_request_that_does_not_fit_itself_is_not_written():
    for data in (bytes(7), [b"a"]):
        with pytest.raises(ValueError, match="'x': FP32 of shape"):
            encode_request([("x", "FP32", (2,), data)])
    with pytest.raises(ValueError, match="'x': BYTES of shape"):
        encode_request([("x", "BYTES", (2,), [b"a"])])


@pytest.mark.parametrize(
    ("body", "length", "why"),
    [
        (b"", None, "0 bytes"),
        (b"{}", 3, "2 bytes, but its header gives 3"),
        (b"{}", 0, "gives 0"),
        (b"[]", None, "does not follow the Open Inference"),
        (b'{"outputs": 5}', None, "does not follow the Open Inference"),
        (b'{"model_name":"m","model_version":"1","outputs":[]}x', 51, "1 bytes follow"),
        (
            b'{"model_name":"m","model_version":"1","outputs":[{"name":"a","shape":[2],"datatype":"FP32","data":[1]}]}',
            None,
            "output 'a': shape .2. needs 2 elements, found 1",
        ),
        (
            b'{"model_name":"m","model_version":"1","outputs":[{"name":"a","shape":[0],"datatype":"FP32","data":[]},'
            b'{"name":"a","shape":[0],"datatype":"FP32","data":[]}]}',
            None,
            "'a' is given twice",
        ),
    ],
)
def test_an_invalid_answer_is_a_bad_output(body, length, why):
    with pytest.raises(BadOutput, match=why):
        decode_answer(body, length)


def test_a_pickle_or_a_missing_header_has_its_own_error():
    codec = OipJsonCodec("m", "1")
    with pytest.raises(BadRequest, match="is a pickle, which is never loaded"):
        codec.decode(Item(b"\x80\x04K\x01."))
    with pytest.raises(BadRequest, match="need the header Inference-Header-Content-Length"):
        codec.decode(Item(b"\0\0", content_type="application/octet-stream"))
