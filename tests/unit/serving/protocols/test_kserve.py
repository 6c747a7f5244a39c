"""KServe's V1 protocol."""

from __future__ import annotations

import json
from base64 import b64encode
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.kserve import KServeCodec, KServeExplainCodec
from penstock.types import Item, Many, ModelMetadata, Parts, TensorSpec

PLAIN = KServeCodec("m", "1")
INPUTS = (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("s", "BYTES", (-1,), True))
NAMED = KServeCodec("m", "1", ModelMetadata("m", "1", inputs=INPUTS))
ONE = KServeCodec("m", "1", ModelMetadata("m", "1", inputs=INPUTS[:1]))

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def item(start: int = 0, stop: int = -1, **body: object) -> Item:
    return Item(json.dumps(body).encode(), "kserve", start=start, stop=stop)


def sent(value: object) -> object:
    """The JSON form of a value with bytes."""
    if isinstance(value, bytes):
        return {"b64": b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: sent(each) for name, each in value.items()}
    return [sent(each) for each in value] if isinstance(value, list) else value


def answered(codec: KServeCodec, body: dict[str, object], cuts: list[int], model=lambda value: value) -> object:
    """The answer to a request that is split at these rows; `model` makes the result of each part."""
    rows = codec.peek(item(), item(**body).payload)[0]
    bounds = sorted({0, rows, *(cut % (rows + 1) for cut in cuts)})
    parts = []
    for start, stop in pairwise(bounds):
        part = item(start, stop, **body)
        value, context = codec.decode(part)
        parts.append(codec.encode(model(value), part, context))
    return json.loads(codec.join(parts).body)


@given(
    st.lists(values.filter(lambda v: v is not None and not isinstance(v, dict)), min_size=1), st.lists(st.integers())
)
def test_instances_come_back_in_their_order_however_the_request_is_split(instances, cuts):
    body = {"instances": sent(instances), "signature_name": "serving_default"}
    value, _ = PLAIN.decode(item(**body))
    assert type(value) is Many
    assert value == instances
    found = answered(PLAIN, body, cuts, lambda rows: [repr(row) for row in rows])
    assert found == {"predictions": [repr(instance) for instance in instances]}
    assert answered(PLAIN, {"inputs": body["instances"]}, cuts, lambda rows: list(map(repr, rows))) == found


@given(st.lists(st.tuples(numbers, st.text()), min_size=1), st.lists(st.integers()))
def test_columns_become_instances_and_back(rows, cuts):
    columns = {"a": [row[0] for row in rows], "b": [row[1] for row in rows]}
    body = {"inputs": columns}
    assert PLAIN.decode(item(**body))[0] == [{"a": a, "b": b} for a, b in rows]
    assert answered(PLAIN, body, cuts) == {"outputs": columns}
    assert answered(PLAIN, body, cuts, lambda rows: [row["b"] for row in rows]) == {"outputs": columns["b"]}


@given(
    st.lists(st.tuples(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), st.binary()), min_size=1),
    st.lists(st.integers()),
)
def test_a_model_with_inputs_receives_named_arrays(rows, cuts):
    instances = [{"x": list(x), "s": sent(s)} for x, s in rows]
    columns = {name: [each[name] for each in instances] for name in ("x", "s")}
    for body in ({"instances": instances}, {"inputs": columns}):
        arrays, _ = NAMED.decode(item(**body))
        assert (arrays["x"].dtype, arrays["s"].dtype) == (np.float32, object)
        assert arrays["x"].tolist() == [list(x) for x, _ in rows]
        assert arrays["s"].tolist() == [s for _, s in rows]

        def both(arrays):
            return {"sum": arrays["x"].sum(axis=1), "name": np.array([b"\xff"] * len(arrays["x"]), object)}

        def one(arrays):
            return arrays["x"]

        sums, odd = [float(sum(x)) for x, _ in rows], {"b64": "/w=="}
        by_row = "instances" in body
        predictions = [{"sum": each, "name": odd} for each in sums]
        outputs = {"sum": sums, "name": [odd] * len(rows)}
        assert answered(NAMED, body, cuts, both) == ({"predictions": predictions} if by_row else {"outputs": outputs})
        assert answered(NAMED, body, cuts, one) == {"predictions" if by_row else "outputs": arrays["x"].tolist()}


def test_the_only_input_needs_no_name():
    assert ONE.decode(item(instances=[[1, 2], [3, 4]]))[0]["x"].tolist() == [[1, 2], [3, 4]]


def test_parameters_are_read_for_a_model_that_takes_them():
    takes = KServeCodec("m", "1", ModelMetadata("m", "1", takes_parameters=True))
    for given_, expected in (({"a": [1, None]}, {"a": [1, None]}), ({}, {}), (None, None)):
        request = item(instances=[1], parameters=given_)
        takes.decode(request)
        assert request.parameters == expected
    request = item(start=1, stop=2, inputs={"x": [1, 2]}, parameters={"a": 1})
    takes.decode(request)
    assert request.parameters == {"a": 1}
    wrong = item(instances=[1], parameters=[1])
    with pytest.raises(BadRequest, match=r"the JSON body has the wrong form: Expected `object \| null`, got `array`"):
        takes.decode(wrong)
    PLAIN.decode(wrong)  # clients of all models send them
    assert wrong.parameters is None


def test_streamed_parts_are_answered_as_a_whole():
    _, context = PLAIN.decode(item(instances=[1, 2]))
    found = PLAIN.encode([Parts(["a", "b"]), Parts([{"n": 1}, b"x"])], item(), context)
    assert json.loads(found.body) == {"predictions": ["ab", [{"n": 1}, {"b64": "eA=="}]]}
    with pytest.raises(BadRequest, match="streams"):
        NAMED.encode_part({}, item(), False, True)


@pytest.mark.parametrize(
    ("codec", "body", "message"),
    [
        (PLAIN, {}, "either the key"),
        (PLAIN, {"instances": [1], "inputs": [1]}, "either the key"),
        (PLAIN, {"instances": 1}, "must be a list"),
        (PLAIN, {"instances": []}, "at least one"),
        (PLAIN, {"inputs": {"a": [1], "b": [1, 2]}}, "the same length"),
        (PLAIN, {"inputs": {}}, "the same length"),
        (PLAIN, {"inputs": 7}, "must be a list"),
        (PLAIN, {"instances": [{"b64": "?"}]}, "not Base64"),
        (PLAIN, {"instances": [{"b64": None}]}, "not Base64"),
        (NAMED, {"instances": [7]}, "instance 0 is no object; the model has the inputs x, s"),
        (NAMED, {"instances": [{"x": [1, 2]}, {"x": [1, 2], "s": "a"}]}, "instance 1 has other inputs"),
        (NAMED, {"instances": [{"y": 1}]}, "unknown input 'y'"),
        (NAMED, {"instances": [{"s": "a"}]}, "input 'x' is missing"),
        (NAMED, {"instances": [{"x": [1, "2"]}]}, "FP32 data holds strings"),
        (NAMED, {"instances": [{"x": [1, 2, 3]}]}, "shape must be"),
        (NAMED, {"instances": [{"x": [1, 2]}, {"x": [1]}]}, "ragged"),
        (NAMED, {"inputs": {"x": [[1, 2]], "s": ["a", "b"]}}, "same number of rows"),
    ],
)
def test_a_wrong_body_is_refused(codec, body, message):
    with pytest.raises(BadRequest, match=message):
        codec.decode(item(**body))


@pytest.mark.parametrize("value", [[None], 7, [object()], [float("nan")]])
def test_results_that_json_cannot_hold_are_refused(value):
    with pytest.raises(BadOutput):
        PLAIN.encode(value, item(), False)
    with pytest.raises(BadOutput, match="different numbers of rows"):
        NAMED.encode({"a": [1, 2], "b": [1]}, item(), False)


@given(
    st.binary()
    | st.builds(
        lambda body, n: json.dumps(body).encode()[:n],
        st.dictionaries(st.sampled_from(["instances", "inputs"]), values.map(sent)),
        st.integers(0, 40),
    )
)
def test_peek_never_raises(body):
    found = PLAIN.peek(item(), body)
    assert found is None or found[0] >= 1


def test_very_many_instances_are_not_counted_in_the_server_process():
    body = b'{"instances":[%b]}' % b",".join([b"1"] * 2**17)
    assert PLAIN.peek(item(), body) == (2**17, "")
    assert PLAIN.peek(item(), memoryview(body.replace(b"[1", b"[1,1"))) is None
    image = b'{"instances":[{"b64":"%b"}]}' % (b"A" * (8 * 2**20 - 30))
    assert PLAIN.peek(item(), image) == (1, "")
    assert PLAIN.peek(item(), image + b" " * 30) is None


def test_explanations_have_their_own_key():
    codec = KServeExplainCodec("m", "1")
    parts = [codec.encode([k], item(), False) for k in range(2)]
    assert json.loads(codec.join(parts).body) == {"explanations": [0, 1]}
