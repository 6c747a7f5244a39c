"""Fields at each node of a graph with fan-outs. Those of other graphs: test_check.py."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.pipeline.fields import edges_of, fields_of
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import parse_graph
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp

BOXES = """
[boxes]
ops = ["DecodeMat", "Boxes"]
next = "read"
[read]
each = "box"
body = "crop"
gather = ["text", "box"]
next = "end"
[crop]
ops = ["Text"]
[end]
"""
CALL = BOXES.replace('each = "box"\n', "").replace('gather = ["text", "box"]\n', "")


class Boxes(ItemOp):
    takes, gives, writes = "mat", "mat", ("box",)

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        return data


class Text(Boxes):
    writes = ("text",)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog._registered, "Boxes", Boxes)
    monkeypatch.setitem(catalog._registered, "Text", Text)


def read(text: str) -> Graph:
    return parse_graph(tomllib.loads(text), name="g", folder="/")


def test_children_have_the_fields_of_their_item_and_the_item_has_the_gathered_ones() -> None:
    graph = read(BOXES)
    fields = fields_of(graph)
    assert fields["crop"] == {"data": "mat", "color": "any", "box": "any", "text": "any", "result": "mat"}
    assert fields["read"] == fields["crop"]
    assert ("read", "crop", {"data": "mat", "color": "any", "box": "any"}) in edges_of(graph)


def test_a_call_of_a_sub_graph_leaves_its_fields_also_if_two_nodes_share_it() -> None:
    assert fields_of(read(CALL))["end"] == fields_of(read(BOXES))["end"]
    twice = CALL.replace('next = "end"\n', 'next = "more"\n[more]\nbody = "crop"\nnext = "end"\n')
    assert fields_of(read(twice))["crop"]["text"] == "any"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            BOXES.replace('each = "box"', 'each = "boxes"'),
            "g: [read] each: there is no field 'boxes'; there are data, color, box, result",
        ),
        (
            BOXES.replace('"text", "box"', '"text", "score"'),
            "g: [read] gather: the body, which begins at [crop], leaves the field 'score' out; it",
        ),
        (BOXES.replace('["Text"]', '["SoftmaxCpu"]'), "[crop] SoftmaxCpu takes 'tensor' as data, but gets 'mat'"),
    ],
)
def test_a_fan_out_that_could_never_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        fields_of(read(text))
    assert message in str(e.value)
