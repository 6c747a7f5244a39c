"""Open Inference Protocol in JSON."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.serving.protocols.oip_heads import peek_json
from penstock.types import DTYPES, Item, ModelMetadata, TensorSpec

CODEC = OipJsonCodec("m", "1")
STRICT = OipJsonCodec("m", "1", ModelMetadata("m", "1", strict_parameters=True))
DECLARED = OipJsonCodec(
    "m", "1", ModelMetadata("m", "1", inputs=(TensorSpec("x", "FP32", (-1, 2)), TensorSpec("y", "INT8", (-1,))))
)


def tensor(name="x", shape=(2,), datatype="FP32", data=(1, 2), **more):
    return {"name": name, "shape": list(shape), "datatype": datatype, "data": list(data), **more}


def item(*inputs, start=0, stop=-1, **more):
    return Item(json.dumps({"inputs": list(inputs), **more}).encode(), "oip_json", start=start, stop=stop)


@pytest.mark.parametrize("datatype", [d for d in DTYPES if d != "BF16"])
def test_every_datatype_becomes_its_array(datatype):
    data = {"BOOL": [True, False], "BYTES": ["a", "é"]}.get(datatype, [1, 2])
    arrays, _ = CODEC.decode(item(tensor(datatype=datatype, data=data)))
    assert arrays["x"].dtype == np.dtype(DTYPES[datatype])
    assert arrays["x"].tolist() == ([b"a", "é".encode()] if datatype == "BYTES" else data)


KNOWN = {("timeout", ""), ("priority", ""), ("classification", r" of outputs\[0\]")}


@pytest.mark.parametrize(
    ("parameter", "advice"),
    [
        ("timeout", "send the header x-deadline-ms"),
        ("priority", "send the header x-priority"),
        ("classification", "request the whole output"),
        ("sequence_id", "every request of this model is independent"),
        ("sequence_start", "every request of this model is independent"),
        ("sequence_end", "every request of this model is independent"),
        ("my_own", "a request takes binary_data_output, timeout and priority, an input binary_data_size, "),
    ],
)
def test_a_parameter_that_nothing_reads_is_ignored_or_refused_wherever_it_is(parameter, advice):
    parameters = {"parameters": {parameter: parameter in ("sequence_start", "sequence_end") or 1}}
    for place, request in {
        "": item(tensor(), **parameters),
        r" of inputs\[1\]": item(tensor(), tensor("y", **parameters)),
        r" of outputs\[0\]": item(tensor(), outputs=[{"name": "y", **parameters}]),
    }.items():
        found, _ = CODEC.decode(request)
        assert found["x"].tolist() == [1, 2]
        assert request.parameters is None, "the model takes none"
        if (parameter, place) in KNOWN:
            STRICT.decode(request)
            continue
        with pytest.raises(BadRequest, match=f"^parameter '{parameter}'{place} is not supported; {advice}"):
            STRICT.decode(request)


@pytest.mark.parametrize("takes", [False, True])
def test_names_of_parameters_that_begin_with_triton_are_reserved(takes):
    codec = OipJsonCodec("m", "1", ModelMetadata("m", "1", takes_parameters=takes))
    with pytest.raises(BadRequest, match=r"^parameter 'triton_mine': names that begin with triton_ are reserved"):
        codec.decode(item(tensor(), parameters={"triton_mine": 1}))


def test_a_strict_model_that_takes_parameters_takes_those_of_requests_alone():
    codec = OipJsonCodec("m", "1", ModelMetadata("m", "1", strict_parameters=True, takes_parameters=True))
    request = item(tensor(), parameters={"mine": 1, "timeout": 5})
    codec.decode(request)
    assert request.parameters == {"mine": 1}
    with pytest.raises(BadRequest, match=r"^parameter 'mine' of inputs\[0\] is not supported"):
        codec.decode(item(tensor(parameters={"mine": 1})))


@pytest.mark.parametrize("parameter", ["shared_memory_offset", "shared_memory_byte_size"])
def test_a_place_in_shared_memory_belongs_to_a_tensor_and_needs_a_region(parameter):
    parameters = {"parameters": {parameter: 1}}
    with pytest.raises(BadRequest, match=f"^parameter '{parameter}' is not supported"):
        STRICT.decode(item(tensor(), **parameters))
    for request in (item(tensor(**parameters)), item(tensor(), outputs=[{"name": "y", **parameters}])):
        with pytest.raises(BadRequest, match="place in shared memory without the parameter shared_memory_region"):
            CODEC.decode(request)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6), st.booleans())
def test_flat_and_nested_data_are_the_same_tensor(cells, nested):
    data = [[cells[:3]], [cells[3:]]] if nested else cells
    arrays, _ = CODEC.decode(item(tensor(shape=(2, 1, 3), datatype="INT64", data=data)))
    assert arrays["x"].shape == (2, 1, 3)
    assert arrays["x"].ravel().tolist() == cells


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([], "inputs is empty"),
        ([tensor(datatype="BF16")], "BF16 has no form in JSON"),
        ([tensor(datatype="FLOAT")], "unknown datatype 'FLOAT', expected one of BOOL"),
        ([tensor(shape=(-1,))], "negative axis"),
        ([tensor(), tensor("y", (0,), data=[])], "'x' 2, 'y' 0"),
        ([tensor(shape=(2, -1))], "negative axis"),
        ([tensor(shape=())], "0 axes"),
        ([tensor(shape=[1] * 40, data=[1])], "40 axes"),
        ([tensor(shape=(3,))], "needs 3 elements, found 2"),
        ([tensor(shape=(10**15, 10**15))], "needs 1000000000000000000000000000000 elements, found 2"),
        ([tensor(), tensor()], "'x' is given twice"),
        ([tensor(), tensor("y", (3,), data=[1, 2, 3])], "'x' 2, 'y' 3"),
        ([tensor(datatype="INT8", data=[1, 300])], "outside the range of INT8"),
        ([tensor(datatype="UINT8", data=[1, -1])], "outside the range of UINT8"),
        ([tensor(datatype="FP16", data=[1, 1e6])], "outside the range of FP16"),
        ([tensor(datatype="INT32", data=[1.5, 2])], "INT32 data holds fractions"),
        ([tensor(datatype="UINT64", data=[1.5, 2**63])], "UINT64 data holds fractions"),
        ([tensor(datatype="FP32", data=["1", "2"])], "holds strings"),
        ([tensor(datatype="BYTES", data=[1, 2])], "holds integers"),
        ([tensor(datatype="BOOL", data=[1, 0])], "holds integers"),
        ([tensor(data=[1, None])], "null or mixed"),
        ([tensor(datatype="BYTES", data=["a", None])], "null or mixed"),
        ([tensor(datatype="BYTES", data=["a", 1])], "null or mixed"),
        ([tensor(datatype="BYTES", data=[["a"], ["b", "c"]])], "ragged"),
        ([tensor(datatype="BYTES", data=["a", ["b"]])], "ragged"),
        ([tensor(datatype="FP32", data=[[1], ["a"]])], "holds strings"),
        ([tensor(data=[[1], [2, 3]])], "ragged"),
        ([{"name": "x", "shape": [1], "datatype": "FP32"}], "missing required field `data`"),
        ([{**tensor(), "data": 5}], "data must be an array"),
        ([{**tensor(), "shape": "2"}], r"\$.inputs\[0\].shape"),
    ],
)
def test_an_invalid_tensor_is_refused_with_the_found_and_expected_values(inputs, why):
    with pytest.raises(BadRequest, match=why):
        CODEC.decode(item(*inputs))


def test_strings_keep_trailing_nuls():
    texts = [["a\0", ""], ["\0", "é\0\0"]]
    arrays, _ = CODEC.decode(item(tensor(shape=(2, 2), datatype="BYTES", data=texts)))
    assert arrays["x"].tolist() == [[text.encode() for text in row] for row in texts]


@pytest.mark.parametrize("datatype", ["BYTES", "FP32"])
def test_a_long_text_takes_its_own_memory_and_not_that_for_each_element(datatype):
    rest = [""] * 1000 if datatype == "BYTES" else [0] * 1000
    request = item(tensor(shape=(1001,), datatype=datatype, data=["x" * 100_000, *rest]))
    tracemalloc.start()
    try:
        with contextlib.nullcontext() if datatype == "BYTES" else pytest.raises(BadRequest, match="holds strings"):
            CODEC.decode(request)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000  # of 400 MB
    finally:
        tracemalloc.stop()


def test_truncated_json_is_refused_with_the_byte_offset():
    body = item(tensor()).payload[:-5]
    with pytest.raises(BadRequest, match=f"byte {len(body)}"):
        CODEC.decode(Item(body))


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([tensor(shape=(1, 2))], "'y' is missing; the model needs x, y"),
        ([tensor("z")], "unknown input 'z'; the model has x, y"),
        ([tensor(datatype="FP64", shape=(1, 2))], "datatype must be FP32, found 'FP64'"),
        ([tensor(shape=(2,))], r"shape must be \[-1, 2\] \(-1 is any size\), found \[2\]"),
        ([tensor(shape=(2, 3), data=range(6))], r"found \[2, 3\]"),
    ],
)
def test_requests_are_checked_against_the_declared_inputs(inputs, why):
    with pytest.raises(BadRequest, match=why):
        DECLARED.decode(item(*inputs))


def test_declared_inputs_are_accepted():
    arrays, _ = DECLARED.decode(item(tensor(shape=(1, 2)), tensor("y", (1,), "INT8", [7])))
    assert arrays["y"].tolist() == [7]


def test_a_part_of_a_split_request_has_its_rows_and_the_answers_are_joined():
    request = item(tensor(shape=(5, 2), data=range(10)), id="q")
    parts = []
    for start, stop in ((0, 2), (2, 4), (4, 5)):
        request.start, request.stop = start, stop
        arrays, context = CODEC.decode(request)
        assert len(arrays["x"]) == stop - start
        parts.append(CODEC.encode({"y": arrays["x"] * 2, "s": [str(start)] * (stop - start)}, request, context))
    answer = json.loads(CODEC.join(parts).body)
    assert answer["id"] == "q"
    assert answer["outputs"][0] == {
        "name": "y",
        "shape": [5, 2],
        "datatype": "FP32",
        "data": [float(2 * n) for n in range(10)],
    }
    assert answer["outputs"][1]["data"] == ["0", "0", "2", "2", "4"]


def test_parts_with_different_outputs_cannot_be_joined():
    parts = [CODEC.encode(value, Item(b""), None) for value in ({"a": [1]}, {"b": [1]})]
    with pytest.raises(BadOutput, match="'a' differs"):
        CODEC.join(parts)


def test_a_bare_array_is_output_0_and_only_requested_outputs_are_sent():
    _, context = CODEC.decode(item(tensor()))
    answer = json.loads(CODEC.encode(np.zeros((2, 1), np.uint8), Item(b""), context).body)
    assert answer == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "output_0", "shape": [2, 1], "datatype": "UINT8", "data": [0, 0]}],
    }
    _, context = CODEC.decode(item(tensor(), outputs=[{"name": "b"}]))
    answer = json.loads(CODEC.encode({"a": [1], "b": [2.5]}, Item(b""), context).body)
    assert [output["name"] for output in answer["outputs"]] == ["b"]
    with pytest.raises(BadRequest, match="unknown output 'b' requested; the model returned a"):
        CODEC.encode({"a": [1]}, Item(b""), context)


def test_nan_and_infinity_are_written_as_triton_does():
    value = {"a": np.array([1.5, np.nan, np.inf, -np.inf]), "b": np.array([[np.nan]], np.float16)}
    body = bytes(CODEC.encode(value, Item(b""), None).body)
    assert b'"data":[1.5,NaN,Infinity,-Infinity]' in body
    assert b'"data":[NaN]' in body
    strict = OipJsonCodec("m", "1", ModelMetadata("m", "1", strict_json=True))
    with pytest.raises(BadOutput, match="output 'a' holds NaN or infinity"):
        strict.encode(value, Item(b""), None)
    assert strict.encode({"a": value["a"][:1]}, Item(b""), None).body


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "returned None"),
        ({"a": np.array([1j])}, "complex128"),
        ({"a": object()}, "holds a object"),
        ({"a": [b"\xff"]}, "not UTF-8"),
        ({"a": [[1], [2, 3]]}, "is not an array"),
    ],
)
def test_an_invalid_result_is_a_bad_output(value, why):
    with pytest.raises(BadOutput, match=why):
        CODEC.encode(value, Item(b""), None)


def test_peek_returns_rows_and_shape_of_valid_requests_only():
    body = item(tensor("b", (3, 4, 5), data=range(60)), tensor("a", (3,), "INT8", [1, 2, 3])).payload

    def peek(body):
        return OipJsonCodec.peek(Item(body), body)

    assert peek(body) == (3, "a:INT8:;b:FP32:4x5")
    for bad in (b"", b"{", b"[]", body[:-1], item().payload):
        assert peek(bad) is None
    assert peek(item(tensor(shape=())).payload)[0] == 1
    assert peek(item(tensor(shape=(-3,))).payload)[0] == 1
    many = item(tensor(shape=(10**9, 0), data=[])).payload
    assert peek(many)[0] == 1  # it claims more rows than it has bytes
    assert peek_json(many, 10**9)[0] == 10**9
    assert peek(body + b" " * 70_000) is None
