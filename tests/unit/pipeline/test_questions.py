"""Values of the protocols become items of a pipeline, and outcomes become values again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import BadOutput, BadRequest, ItemFailed
from penstock.pipeline.graph import Graph, Node, Step
from penstock.pipeline.outcome import Hop, Outcome
from penstock.pipeline.questions import Question, answer_of, server_timing
from penstock.pipeline.questions import question_of as ask

TAKES = ("data", "node_name", "other", "box")
GRAPH = Graph("net", {"a": Node("a", (Step("Identity"),))}, "a", takes=TAKES)
ONE, ROWS = Question([{}]), Question([{}, {}], rows=True)


def question_of(value: Any, kind: str) -> Question:
    return ask(value, GRAPH, kind)


def outcome(**fields: Any) -> Outcome:
    return Outcome(fields, node="last")


@pytest.mark.parametrize("value", [b"\xff\xd8", memoryview(b"x"), "text", 3, None, [1, 2], [{"data": 1}]])
def test_a_value_is_the_data_of_one_item(value: Any) -> None:
    assert question_of(value, "bytes") == Question([{"data": value}])


def test_an_object_is_the_fields_of_one_item_and_names_where_it_begins() -> None:
    question = question_of({"data": "x", "node_name": "b", "other": [1]}, "any")
    assert question == Question([{"data": "x", "other": [1]}], "b")
    array = np.zeros(3)
    mixed = question_of({"data": array, "other": 1}, "any")
    assert (len(mixed.fields), mixed.rows) == (1, False), "arrays beside other values are fields of one item"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, "found no 'data' among the fields of the request"),
        ({"other": 2}, "found no 'data' among the fields of the request"),
        (
            {"data": 1, "result": 2},
            "found the field 'result', which the pipeline does not take; it takes data, node_name",
        ),
        ({"data": 1, "node_name": 3}, "node_name: found a int, expected the name of a node"),
        ({"input_1": np.zeros((2, 2))}, "found the field 'input_1'"),
        ({"data": np.zeros((0, 3))}, "found data [0, 3]; expected arrays of as many rows (axis 0), 1 or more"),
        ({"input_0": np.zeros(())}, "found data []; expected"),
        ({"data": np.zeros((2, 3)), "box": np.zeros((1, 4))}, "found data [2, 3], box [1, 4]; expected"),
    ],
)
def test_a_request_without_data_is_refused(value: Any, told: str) -> None:
    with pytest.raises(BadRequest) as info:
        question_of(value, "any")
    assert told in info.value.message


def test_a_caller_says_only_what_the_pipeline_asks_for() -> None:
    closed = Graph("net", GRAPH.nodes, "a")
    assert ask({"data": 1}, closed, "any") == Question([{"data": 1}])
    for value in ({"data": 1, "node_name": "a"}, {"data": 1, "_box": 2}, {"data": np.zeros(1), "other": np.zeros(1)}):
        with pytest.raises(BadRequest, match=r"which the pipeline does not take; it takes data$"):
            ask(value, closed, "any")


def test_rows_of_a_request_are_bounded() -> None:
    assert len(question_of({"data": np.zeros((4096, 1))}, "tensor").fields) == 4096
    with pytest.raises(BadRequest, match="found 4097 rows, expected at most 4096 in one request"):
        question_of({"data": np.zeros((4097, 1))}, "tensor")


def test_rows_of_tensors_are_items_of_their_own() -> None:
    images = np.array([b"a", b"bc"], object)
    question = question_of({"data": images, "box": np.arange(8).reshape(2, 4)}, "bytes")
    assert question.rows
    assert [fields["data"] for fields in question.fields] == [b"a", b"bc"]
    assert [fields["box"].tolist() for fields in question.fields] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    tensors = question_of({"data": np.zeros((2, 3, 8, 8), np.float32)}, "tensor")
    assert [fields["data"].shape for fields in tensors.fields] == [(1, 3, 8, 8)] * 2
    assert len(question_of({"input_0": np.zeros((2, 3))}, "tensor").fields) == 2, "an array alone has no name"
    mats = question_of({"data": np.zeros((2, 5, 4, 3), np.uint8)}, "mat")
    assert [fields["data"].shape for fields in mats.fields] == [(5, 4, 3)] * 2


def test_one_output_is_itself_and_several_are_an_object() -> None:
    array = np.zeros((1, 3))
    assert answer_of(ONE, [outcome(result=array)], ("result",)) is array
    assert answer_of(ONE, [outcome(result=0, label="cat")], ("label", "result")) == {"label": "cat", "result": 0}
    assert answer_of(ONE, [outcome(result=0)], ("label", "result")) == {"label": None, "result": 0}


def test_an_item_without_any_output_failed() -> None:
    with pytest.raises(ItemFailed, match=r"^the item ended at node 'last' without result or label$"):
        answer_of(ONE, [outcome(data=1)], ("result", "label"))


def test_the_error_of_an_item_is_that_of_its_request() -> None:
    bad = Outcome({}, BadRequest("wrong"))
    for question, outcomes in ((ONE, [bad]), (ROWS, [outcome(result=1), bad])):
        with pytest.raises(BadRequest, match="wrong"):
            answer_of(question, outcomes, ("result",))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([np.array([[1.0, 2]]), np.array([[3.0, 4]])], [[1, 2], [3, 4]]),
        ([np.array([1.0, 2]), np.array([3.0, 4])], [[1, 2], [3, 4]]),
        ([1, 2], [1, 2]),
        (["cat", "dog"], ["cat", "dog"]),
        ([b"a", b"bc"], [b"a", b"bc"]),
    ],
)
def test_rows_are_put_together_along_the_first_axis(values: list[Any], wanted: Any) -> None:
    answer = answer_of(ROWS, [outcome(result=value) for value in values], ("result",))
    assert answer.keys() == {"result"}
    assert answer["result"].tolist() == wanted


def test_several_tensors_of_a_model_are_outputs_with_names_of_their_own() -> None:
    rows = [outcome(result=[np.array([[i]]), np.array([[i, i]])]) for i in (1, 2)]
    answer = answer_of(ROWS, rows, ("result",))
    assert {name: array.tolist() for name, array in answer.items()} == {
        "result_0": [[1], [2]],
        "result_1": [[1, 1], [2, 2]],
    }
    named = answer_of(ROWS, [outcome(result={"score": 0.5}), outcome(result={"score": 1.0})], ("result",))
    assert named["score"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([np.zeros((2, 3)), np.zeros((4, 3))], "rows of different shapes"),
        ([{"a": 1}, {"b": 1}], "has other parts for some rows"),
        ([{"a": 1}, 2], "has other parts for some rows"),
    ],
)
def test_rows_that_make_no_array_are_told(values: list[Any], told: str) -> None:
    with pytest.raises(BadOutput, match=told):
        answer_of(ROWS, [outcome(result=value) for value in values], ("result",))


def test_tensors_of_torch_are_arrays() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1, 2, requires_grad=True)
    assert answer_of(ONE, [outcome(result=tensor)], ("result",)).tolist() == [[1, 1]]


def test_the_way_of_an_item_is_a_header_of_the_standard() -> None:
    hops = [Hop("decode", 12, 4, 0.0003, 0.00193), Hop('a "b",c', 1, 1, 0.0, 0.5)]
    assert server_timing(hops) == (
        'decode;dur=1.930;desc="batch 12 of 4, waited 0.300 ms", '
        'a__b__c;dur=500.000;desc="batch 1 of 1, waited 0.000 ms"'
    )
