"""The gRPC codec agrees with the codec of HTTP, and its reader of the wire format with protobuf's."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from penstock.core.wire.regions import TABLE_VARIABLE, Region, publish
from penstock.errors import BadRequest
from penstock.serving.protocols import oip_grpc
from penstock.serving.protocols.oip_binary import OipBinaryCodec
from penstock.serving.protocols.oip_grpc import OipGrpcCodec
from penstock.serving.protocols.oip_messages import decode_answer, encode_arrays
from penstock.serving.protocols.oip_protobuf import open_inference, read_head, set_parameters, split_field
from penstock.serving.protocols.oip_tensors import from_bytes, output_array, to_bytes
from penstock.types import Item, ModelMetadata

Request = open_inference().message("inference.ModelInferRequest")
Response = open_inference().message("inference.ModelInferResponse")
DTYPES = [
    np.bool_,
    *(f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
]


TYPED = ModelMetadata("m", "1", typed_contents=True)


@st.composite
def tensors(draw: Any) -> dict[str, Any]:
    rows = draw(st.integers(1, 4))
    found = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True)):
        shape = (rows, *draw(st.lists(st.integers(1, 3), max_size=2)))
        if draw(st.booleans()):
            cells = st.binary(max_size=5)
            flat = draw(st.lists(cells, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
            array = np.empty(len(flat), object)
            array[:] = flat
            found[name] = array.reshape(shape)
        else:
            found[name] = draw(arrays(draw(st.sampled_from(DTYPES)), shape))
    return found


def message(values: dict[str, Any], typed: bool, **fields: Any) -> bytes:
    request = Request(model_name="m", **fields)
    for name, value in values.items():
        datatype, array = output_array(name, value, None)
        found = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if typed:
            getattr(found.contents, oip_grpc.CONTENTS[datatype]).extend(array.ravel().tolist())
        else:
            request.raw_input_contents.append(bytes(to_bytes(name, datatype, array)))
    data: bytes = request.SerializeToString()
    return data


def has_half(values: dict[str, Any]) -> bool:
    return any(value.dtype == np.float16 for value in values.values())


def outputs_of(body: bytes) -> dict[str, Any]:
    response = Response.FromString(body)
    found = {}
    for n, output in enumerate(response.outputs):
        if response.raw_output_contents:
            data = response.raw_output_contents[n]
            found[output.name] = from_bytes("x", output.datatype, list(output.shape), memoryview(data))
        else:
            values = getattr(output.contents, oip_grpc.CONTENTS[output.datatype])
            array = np.empty(len(values), object)
            array[:] = list(values)
            found[output.name] = array.reshape(tuple(output.shape))
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_array_equal(a[name].astype(b[name].dtype), b[name])


@given(tensors(), st.booleans())
def test_requests_and_responses_carry_what_those_of_http_carry(values, typed):
    typed = typed and not has_half(values)
    codec, http = OipGrpcCodec("m", "1", TYPED), OipBinaryCodec("m", "1")
    item = Item(message(values, typed, id="7"), "oip_grpc")
    head, buffers = encode_arrays(values, binary_outputs=True, id="7")
    length = [(b"inference-header-content-length", b"%d" % len(head))]
    other = Item(head + b"".join(bytes(b) for b in buffers), "oip_binary", headers=length)
    (decoded, context), (expected, http_context) = codec.decode(item), http.decode(other)
    same(decoded, expected)
    assert codec.peek(item, item.payload) == http.peek(other, other.payload)
    answer, result = codec.encode(decoded, item, context), http.encode(expected, other, http_context)
    header = int(dict(result.headers)["Inference-Header-Content-Length"])
    same(outputs_of(answer.body), decode_answer(result.body, header).outputs)
    response = Response.FromString(answer.body)
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "7")
    assert bool(response.raw_output_contents) != typed


@given(tensors(), st.booleans(), st.data())
def test_the_parts_of_a_split_request_join_to_the_whole_response(values, typed, data):
    typed = typed and not has_half(values)
    codec = OipGrpcCodec("m", "1", TYPED)
    body = message(values, typed)
    rows = len(next(iter(values.values())))
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=2))})
    parts = []
    for start, stop in pairwise(cuts):
        item = Item(body, "oip_grpc", start=start, stop=stop)
        value, context = codec.decode(item)
        parts.append(codec.encode(value, item, context))
    whole = Item(body, "oip_grpc")
    value, context = codec.decode(whole)
    assert codec.join(parts).body == codec.encode(value, whole, context).body


@given(tensors(), st.booleans())
def test_the_head_of_a_large_message_is_that_of_a_small_one(values, typed):
    body = message(values, typed and not has_half(values), id="7", model_version="2")
    small = read_head(body)
    head, raw = split_field(body, 7)
    assert [bytes(each) for each in raw] == list(Request.FromString(body).raw_input_contents)
    found = Request.FromString(head)
    assert not found.raw_input_contents
    assert [t.name for t in found.inputs] == [t.name for t in small.inputs] == list(values)
    assert (small.model_name, small.model_version, small.id) == ("m", "2", "7")


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_read_as_protobuf_reads_it(body):
    codec = OipGrpcCodec("m", "1")
    try:
        codec.decode(Item(body, "oip_grpc"))
    except BadRequest:
        pass
    codec.peek(Item(body, "oip_grpc"), body)
    try:
        _, raw = split_field(body, 7)
    except BadRequest:
        return
    try:
        expected = Request.FromString(body)
    except Exception:
        return
    assert [bytes(each) for each in raw] == list(expected.raw_input_contents)


@pytest.mark.parametrize("typed", [False, True])
def test_an_output_in_shared_memory_has_neither_contents_nor_parameters(typed, monkeypatch, tmp_path):
    place = tmp_path / "region"
    place.write_bytes(bytes(16))
    with place.open("r+b") as file:
        region = Region("r", "/r", 0, 16, os.getpid(), file.fileno())
        publish(str(tmp_path / "table"), 16, {"r": region})
        monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "table"))
        codec = OipGrpcCodec("m", "1", ModelMetadata("m", "1", typed_contents=typed))
        request = Request.FromString(message({"x": np.ones(2, np.float32)}, typed))
        asked = {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 8}
        set_parameters(request.outputs.add(name="y").parameters, asked)
        request.outputs.add(name="z")
        item = Item(request.SerializeToString(), "oip_grpc")
        arrays, context = codec.decode(item)
        answer = Response.FromString(codec.encode({"y": arrays["x"], "z": arrays["x"]}, item, context).body)
    assert np.frombuffer(place.read_bytes(), np.float32).tolist() == [0, 0, 1, 1]
    shared, plain = answer.outputs
    assert not shared.parameters
    assert not shared.contents.fp32_contents
    assert [bytes(data) for data in answer.raw_output_contents] == ([] if typed else [b"", np.ones(2, "f4").tobytes()])
    assert list(plain.contents.fp32_contents) == ([1, 1] if typed else [])


def test_too_many_fields_are_refused():
    with pytest.raises(BadRequest):
        read_head(b"\x08\x01" * 100_000)
