"""Every key is read, every op has a line, and graphs as trees, Mermaid and SVG."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.pipeline.describe import NodeLoad, mermaid, ops_text, svg, trace_text
from penstock.pipeline.graph import Graph
from penstock.pipeline.keys import NODE, PIPELINE, Size
from penstock.pipeline.load import parse_graph
from penstock.pipeline.model import server_timing
from penstock.pipeline.traversal import Hop
from penstock.values import bare


def test_every_op_has_a_line() -> None:
    lines = ops_text().splitlines()
    assert len(lines) > 50
    assert all(len(line.split()) > 2 for line in lines)


FAN_OUT = {"each": "boxes", "body": "last"}
VALUES = {
    "backend": "DecodeMat",
    "body": "other",
    "device": "cuda:1",
    "else": "stop",
    "filter": "or",
    "inputs": {"data": "first.result"},
    "next": ["last"],
    "on_error": "skip",
    "on_item_error": "drop",
    "ops": ["DecodeMat"],
    "require": "any",
}
KINDS: dict[object, Any] = {bool: False, int: 3, float: 3.5, str: "text", tuple[Size, ...]: [9], tuple[str, ...]: ["x"]}


@pytest.mark.parametrize("key", [*NODE])
def test_every_key_of_a_node_is_read(key: str) -> None:
    model = {"ops": [{"op": "OnnxTensor", "model": "m.onnx"}], "max_batch": 9}
    of_each = (*FAN_OUT, "gather", "max_fanout", "on_item_error")
    plain: dict[str, Any] = (
        FAN_OUT if key in of_each else {"when": "x"} if key == "else" else {} if key in ("ops", "backend") else model
    )
    changed = {**plain, key: VALUES.get(key, KINDS.get(bare(NODE[key].type)))}
    tables = {"pipeline": {"entry": "first"}, "first": {"next": "node"}, "last": {}, "other": {}}
    nodes = [parse_graph({**tables, "node": t}, name="t", folder="/").nodes["node"] for t in (plain, changed)]
    assert nodes[0] != nodes[1]


def test_every_key_of_the_pipeline_is_read() -> None:
    values = {"name": "x", "entry": "b", "compat": True, "trace": True, "in_flight": 3, "inputs": "a", "outputs": "a,b"}
    assert values.keys() == PIPELINE.keys()
    plain = {"pipeline": {"entry": "a"}, "a": {}, "b": {}}
    for key, value in values.items():
        changed = {**plain, "pipeline": {"entry": "a", key: value}}
        assert parse_graph(changed, name="t", folder="/") != parse_graph(plain, name="t", folder="/"), key


TABLES: dict[str, Any] = {
    "a": {"next": ["b", "c"]},
    "b": {"next": "d", "when": "score < 1"},
    "c": {"ops": ["FloatTensor", "NCHWTensor"]},
    "d": {"inputs": {"data": "b.result", "other": "c.result"}},
}


@pytest.fixture
def graph() -> Graph:
    return parse_graph(TABLES, name="t", folder="/")


def test_a_tree_has_each_node_below_the_last_before_it(graph: Graph) -> None:
    hops = [Hop(name, i, 2, 0.001, 0.002) for i, name in enumerate("acbd")]
    assert trace_text(graph, hops).splitlines() == [
        "└─ a  ran 2.000 ms, waited 1.000 ms, batch 0 of 2",
        "   ├─ c  ran 2.000 ms, waited 1.000 ms, batch 1 of 2",
        "   └─ b  ran 2.000 ms, waited 1.000 ms, batch 2 of 2",
        "      └─ d  ran 2.000 ms, waited 1.000 ms, batch 3 of 2",
    ]
    assert [line[:8].strip() for line in trace_text(graph, [hops[0], hops[3]]).splitlines()] == ["└─ a  ra", "└─ d"]
    assert trace_text(graph, []) == ""


def test_a_tree_has_the_children_of_an_item_below_its_fan_out() -> None:
    tables = {"a": {"each": "x", "body": "b", "next": "d"}, "b": {"next": "c"}, "c": {}, "d": {}}
    graph = parse_graph(tables, name="t", folder="/")
    path = [("a", ()), ("b", (0,)), ("b", (1,)), ("c", (1,)), ("c", (0,)), ("d", ())]
    hops = [Hop(name, i, 2, 0.001, 0.002, element) for i, (name, element) in enumerate(path)]
    assert [line.partition("  ran")[0] for line in trace_text(graph, hops).splitlines()] == [
        "└─ a", "   ├─ 0: b", "   │  └─ c", "   ├─ 1: b", "   │  └─ c", "   └─ d"
    ]  # fmt: skip
    assert server_timing(hops).split(", ")[-1] == 'c;dur=4.000;desc="children in 2 batches"'
    assert "n0 -. each .-> n1" in mermaid(graph, {})


def test_mermaid_has_every_node_and_edge(graph: Graph) -> None:
    text = mermaid(graph, {"c": NodeLoad(5, None, 0.5)})
    assert '  n1["b<br/>Identity<br/>when score &lt; 1"]' in text
    assert '  n2["c<br/>FloatTensor, NCHWTensor<br/>queue 5, no batch, busy 0.50 of 1"]' in text
    assert re.findall("n. --> n.", text) == ["n0 --> n1", "n0 --> n2", "n1 --> n3", "n2 --> n3"]


def test_boxes_of_an_svg_do_not_overlap_and_follow_each_other(graph: Graph) -> None:
    root = ElementTree.fromstring(svg(graph, {"a": NodeLoad(1, 2.5, 1.0)}))
    boxes = [
        {key: float(rect.attrib[key]) for key in ("x", "y", "width", "height")} for rect in root if "rx" in rect.attrib
    ]
    places = {name: box["y"] for name, box in zip("abcd", sorted(boxes, key=lambda b: (b["y"], b["x"])), strict=True)}
    assert places["a"] < places["b"] == places["c"] < places["d"]
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            beside = abs(one["x"] - other["x"]) >= one["width"]
            assert beside or abs(one["y"] - other["y"]) >= one["height"]
    assert sum("marker-end" in path.attrib for path in root) == 4
    assert "queue 1, batch 2.5, busy 1.00 of 1" in "".join(root.itertext())
