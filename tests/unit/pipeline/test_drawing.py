"""Pictures of graphs, and paths of items."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.pipeline.describe import NodeLoad, mermaid, svg, trace_text
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import parse_graph
from penstock.pipeline.model import server_timing
from penstock.pipeline.traversal import Hop

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
