"""PipelineRunner with named inputs of the request, and with outputs that are fields of nodes."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from penstock.errors import BadRequest
from penstock.pipeline.check import check
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import parse_graph

BRANCHES = """
[pipeline.inputs]
A = "BYTES[-1]"
B = "BYTES[-1]"

[pipeline.outputs]
first = {tensor = "BYTES[-1]", from = "a"}
echo = {tensor = "BYTES[-1]", from = "B"}
last = "BYTES[-1]"

[a]
inputs = ["A"]
backend = "Picky"

[b]
inputs = {data = "B", other = "A"}
backend = "Words(word=b)"

[both]
inputs = ["a", "b.other", "b"]
backend = "Words(word=!)"
"""


def read(text: str) -> Graph:
    graph = parse_graph(tomllib.loads(text), name="x", folder="/")
    check(graph)
    return graph


async def test_an_item_begins_at_all_nodes_that_take_fields_of_the_request(stage: Any, known: None) -> None:
    s = await stage(read(BRANCHES))
    outcome = await s.send({"A": "1", "B": "2"})
    assert outcome.error is None
    assert outcome.fields["result"] == "['1', '1', '2b']!"
    assert (outcome.fields["first"], outcome.fields["echo"]) == ("1", "2")


async def test_a_failure_in_one_branch_fails_its_item_alone(stage: Any, known: None) -> None:
    s = await stage(read(BRANCHES))
    bad, good = s.send({"A": "x", "B": "2"}), s.send({"A": "y", "B": "2"})
    assert (await bad).error.code == "item_failed"
    assert (await good).fields["first"] == "y"
    assert s.runner.in_flight == 0


async def test_a_missing_input_is_named(stage: Any, known: None) -> None:
    s = await stage(read(BRANCHES))
    with pytest.raises(BadRequest, match="input 'B' is missing; the pipeline needs A, B"):
        s.send({"A": "1"})
    assert s.runner.in_flight == 0


@pytest.mark.parametrize(
    ("inputs", "result"), [('["B"]', "2b"), ('["A", "B"]', "['1', '2']b"), ('["data", "B"]', "0b")]
)
async def test_the_data_of_a_node_without_inputs_is_the_only_input_or_all(
    stage: Any, known: None, inputs: str, result: str
) -> None:
    s = await stage(read(f'[pipeline]\ninputs = {inputs}\n[a]\nbackend = "Words(word=b)"\n'))
    fields = {"A": "1", "B": "2"} | ({"data": "0"} if "data" in inputs else {})
    assert (await s.send(fields)).fields["result"] == result


async def test_children_of_a_fan_out_take_fields_of_the_request(stage: Any, known: None) -> None:
    text = """
    [pipeline]
    inputs = ["items", "word"]
    [a]
    inputs = ["items"]
    each = "result"
    body = "b"
    [b]
    inputs = {data = "a.data", word = "pipeline.word"}
    backend = "Words(word=b)"
    [c]
    inputs = {data = "a"}
    backend = "Words(word=c)"
    """
    s = await stage(read(text.replace("    ", "")))
    outcome = await s.send({"items": ["1", "2"], "word": "w"})
    assert (outcome.error, outcome.fields.get("result")) == (None, "['1b', '2b']c")


async def test_outputs_of_nodes_that_conditions_skip_are_left_out(stage: Any, known: None) -> None:
    s = await stage(read(BRANCHES.replace("[a]", '[a]\nwhen = "data != \'no\'"\nelse = "stop"')))
    outcome = await s.send({"A": "no", "B": "2"})
    assert "first" not in outcome.fields
    assert outcome.fields["echo"] == "2"
