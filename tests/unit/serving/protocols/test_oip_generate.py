"""Triton's generate extension."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.oip_generate import EVENTS, GenerateCodec, GenerateStreamCodec
from penstock.types import Item, Many, ModelMetadata, Parts, TensorSpec, TextPart

INPUTS = (
    TensorSpec("text_input", "BYTES", (-1, 1), True),
    TensorSpec("x", "FP32", (-1, 3), True),
    TensorSpec("n", "INT32", (-1, -1), True),
    TensorSpec("on", "BOOL", (-1, 1), True),
)
WHOLE = (TensorSpec("text_input", "BYTES", (1,)), TensorSpec("m", "INT64", (2, 2), True))
OUTPUTS = (TensorSpec("text_output", "BYTES", (-1, 1)), TensorSpec("a", "FP32", (-1, -1)))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def codec(kind: type[GenerateCodec] = GenerateCodec, **declared: Any) -> GenerateCodec:
    return kind("m", "1", ModelMetadata("m", "1", **{"inputs": INPUTS, "outputs": OUTPUTS, **declared}))


def item(body: Any) -> Item:
    return Item(body if isinstance(body, bytes) else json.dumps(body).encode(), "oip_generate")


def shapes(value: Any) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in value.items()}


# (body, shapes): what Triton 2.51 gives a model with `max_batch_size`
BATCHED = [
    ({"text_input": "hi"}, {"text_input": [1, 1]}),
    ({"text_input": ["hi"]}, {"text_input": [1, 1]}),
    ({"text_input": ["hi", "ho"]}, {"text_input": [2, 1]}),
    ({"text_input": [["hi"], ["ho"]]}, {"text_input": [2, 1]}),
    ({"x": [1, 2, 3]}, {"x": [1, 3]}),
    ({"x": [1, 2, 3, 4, 5, 6]}, {"x": [2, 3]}),
    ({"x": [[1], [2], [3]]}, {"x": [1, 3]}),
    ({"n": 1}, {"n": [1, 1]}),
    ({"n": [1, 2, 3]}, {"n": [1, 3]}),
    ({"n": []}, {"n": [1, 0]}),
    ({"on": True, "n": [1, 2]}, {"n": [1, 2], "on": [1, 1]}),
]


@pytest.mark.parametrize(("body", "expected"), BATCHED)
def test_values_become_tensors_with_the_shapes_of_triton(body, expected):
    value, _ = codec(GenerateStreamCodec).decode(item(body))
    assert shapes(value) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text_input": "hi"}, {"text_input": [1]}),
        ({"text_input": ["hi"], "m": [1, 2, 3, 4]}, {"text_input": [1], "m": [2, 2]}),
    ],
)
def test_values_of_a_model_without_rows_have_its_own_shapes(body, expected):
    value, _ = codec(GenerateStreamCodec, inputs=WHOLE, unbatched=True).decode(item(body))
    assert shapes(value) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"x": [1, 2]},
        {"x": 1},
        {"x": [[1, 2, 3]]},
        {"x": [[1, 2, 3], [4, 5, 6]]},
        {"n": [[1, 2], [3]]},
        {"n": [1, [2]]},
        {"n": [1, "a"]},
        {"n": [1, None]},
        {"n": 1.5},
        {"n": "1"},
        {"n": True},
        {"n": {"a": 1}},
        {"n": None},
        {"n": 2**31},
        {"on": 1},
        {"text_input": 1},
        {"text_input": ["a", 1]},
        {"text_input": "a", "other": [1]},
        {"text_input": "a", "other": {"a": 1}},
        {"text_input": "a", "other": None},
        {"text_input": "a", "parameters": {"a": [1]}},
        {"text_input": "a", "parameters": 5},
        {"text_input": "a", "parameters": None},
        {"text_input": "a", "id": 5},
        {"text_input": "a", "id": None},
        {"text_input": "a", "n": [1, 2], "x": [1, 2, 3, 4, 5, 6]},
        b"",
        b"[]",
        b"[1]",
        b"5",
        b"null",
        b'{"n":NaN}',
        b'{"n":1',
        b'{"n":1}x',
        b'{"n":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"text_input":"\xff"}',
        b"\x80\x04}.",
    ],
)
def test_a_wrong_request_is_refused(body):
    with pytest.raises(BadRequest):
        codec().decode(item(body))


def test_a_missing_input_is_refused():
    with pytest.raises(BadRequest, match="'text_input' is missing"):
        codec(inputs=WHOLE, unbatched=True).decode(item({"m": [1, 2, 3, 4]}))


def test_the_other_members_are_parameters_of_models_that_take_them():
    body = {"text_input": "a", "n": 1, "id": "q", "stop": "x", "parameters": {"top": 0.5, "on_": True, "stop": "y"}}
    asked = item(body)
    _, id = codec(takes_parameters=True).decode(asked)
    assert id == "q"
    assert asked.parameters == {"id": "q", "stop": "x", "top": 0.5, "on_": True}
    plain = item(body)
    codec().decode(plain)
    assert plain.parameters is None
    with pytest.raises(BadRequest, match="'top'"):
        codec(strict_parameters=True).decode(plain)


def test_a_model_without_inputs_receives_the_object():
    body = {"prompt": "a", "nested": {"list": [1, None]}, "parameters": 5}
    assert codec(GenerateStreamCodec, inputs=()).decode(item(body)) == (body, "")


def answer(value: Any, id: str = "", **declared: Any) -> bytes:
    return codec(**declared).encode([value], item({}), id).body


def test_an_answer_has_its_outputs_flat_and_its_members_sorted():
    value = {
        "text_output": np.array([["hé\0"]], object),
        "a": np.array([[0.1, 2], [3, 4]], np.float32),
        "Z": np.zeros((0,), np.int8),
        "model_name": np.array([1]),
        "b": np.array([[True]]),
    }
    text = b'"model_name":"m","model_version":"1"'
    outputs = b'{"Z":[],"a":[0.10000000149011612,2.0,3.0,4.0],"b":true,"id":"q",'
    assert answer(value, "q") == outputs + text + ',"text_output":"hé\\u0000"}'.encode()
    assert answer({"a": np.array([np.nan])}) == b'{"a":NaN,' + text + b"}"
    with pytest.raises(BadOutput):
        answer({"a": np.array([np.nan])}, strict_json=True)


def test_what_a_model_without_tensors_returns_is_its_answer():
    plain: dict[str, Any] = {"inputs": (), "outputs": ()}
    about = {"model_name": "m", "model_version": "1"}
    assert json.loads(answer({"usage": {"tokens": [3]}, "y": np.array([2])}, **plain)) == {
        "usage": {"tokens": [3]},
        "y": 2,
        **about,
    }
    assert json.loads(answer("hi", **plain)) == {"text_output": "hi", **about}
    assert json.loads(answer(TextPart("hi"), **plain)) == {"text_output": "hi", **about}
    assert json.loads(answer([1, [2]], **plain)) == {"output_0": [1, [2]], **about}
    with pytest.raises(BadOutput):
        answer(None, **plain)
    with pytest.raises(BadOutput):
        answer({"y": object()}, **plain)


@pytest.mark.parametrize("parts", [[], [{"a": np.array([1])}] * 2])
def test_another_number_of_responses_than_one_is_an_error(parts):
    with pytest.raises(BadRequest, match="generate_stream"):
        answer(Parts(parts))


def test_a_stream_of_one_response_is_answered_as_a_whole():
    assert isinstance(codec().decode(item({"n": 1}))[0], Many)
    assert json.loads(answer(Parts([{"a": np.array([1])}])))["a"] == 1


def test_a_stream_has_an_event_for_each_response():
    stream = codec(GenerateStreamCodec)
    part = stream.encode_part({"a": np.array([1])}, item({}), "", True)
    assert (part.body, part.content_type) == (b'data: {"a":1,"model_name":"m","model_version":"1"}\n\n', EVENTS)
    end = stream.encode_end(item({}), "")
    assert (end.body, end.content_type) == (b"", EVENTS)


@given(st.binary() | anything.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_read_or_refused(body):
    for inputs in (INPUTS, ()):
        try:
            value, _ = codec(GenerateStreamCodec, inputs=inputs).decode(item(body))
        except BadRequest:
            continue
        assert isinstance(value, dict)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1), st.text())
def test_values_return_unchanged(numbers, text):
    stream = codec(GenerateStreamCodec)
    value, id = stream.decode(item({"n": numbers, "text_input": text}))
    body = stream.encode({"a": value["n"], "text_output": value["text_input"]}, item({}), id).body
    found = json.loads(body.removeprefix(b"data: "))
    assert found["a"] == (numbers if len(numbers) > 1 else numbers[0])
    assert found["text_output"] == text
