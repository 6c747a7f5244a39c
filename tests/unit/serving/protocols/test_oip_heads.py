"""What the server process reads of the parameters of a request."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.protocols.oip import OipJsonCodec
from penstock.serving.protocols.oip_heads import large_parameters, terms_of
from penstock.types import Item, SequenceRequest

TENSOR: dict[str, Any] = {"name": "x", "shape": [1, 30_000], "datatype": "FP32", "data": [0.5] * 30_000}
CONFUSING = st.sampled_from(["parameters", "inputs", "timeout", '"parameters": {"timeout": 9}', "\\", "é"])
OTHERS = {
    "id": st.text(max_size=5) | CONFUSING,
    "outputs": st.lists(
        st.fixed_dictionaries({"name": CONFUSING, "parameters": st.sampled_from([{}, {"binary_data": False}])}),
        max_size=2,
    ),
    "parameters": st.fixed_dictionaries(
        {}, optional={"timeout": st.integers(0, 9), "priority": st.integers(0, 9), "sequence_id": st.integers(1, 9)}
    ),
    "mine": CONFUSING | st.dictionaries(CONFUSING, st.integers(0, 9), max_size=2),
}


@given(st.fixed_dictionaries({}, optional=OTHERS), st.data())
def test_the_parameters_of_large_json_are_found_wherever_they_are(others: dict[str, Any], data: st.DataObject) -> None:
    tensor = {**TENSOR, "parameters": {"timeout": 8}} if data.draw(st.booleans()) else TENSOR
    keys = data.draw(st.permutations([*others, "inputs"]))
    request = {key: [tensor] if key == "inputs" else others[key] for key in keys}
    body = json.dumps(request, indent=data.draw(st.sampled_from([None, 1]))).encode()
    assert len(body) > 2 * 64 * 1024
    given = others.get("parameters") or {}
    found = msgspec.json.decode(large_parameters(memoryview(body))).get("parameters")
    assert found == given or (not found and not given)
    terms = terms_of(large_parameters(body))
    assert (terms and terms.wait_s) == (given["timeout"] / 1e6 if given.get("timeout") else None)
    id = given.get("sequence_id")
    assert OipJsonCodec.peek_sequence(Item(body), body) == (id and SequenceRequest(str(id)))


def test_large_json_that_is_malformed_has_no_parameters() -> None:
    for text in ("{", '{"timeout": 1}}', '{"parameters": {"timeout": 5}', '"parameters": {"timeout": 1}}'):
        assert large_parameters(b'{"data": [' + text.encode().ljust(200_000)) == b"{}"
