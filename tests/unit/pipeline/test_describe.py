"""Every key is read, every op has a line, and graphs as trees, Mermaid and SVG; graphs as TOML."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.pipeline.describe import NodeLoad, mermaid, ops_text, svg, to_toml, trace_text
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import load_graph, parse_graph
from penstock.pipeline.model import server_timing
from penstock.pipeline.notation import NODE, PIPELINE, Size
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
    "processes": 3,
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
    values = {"name": "x", "entry": "b", "compat": True, "client_request": True, "trace": True, "in_flight": 3}
    values |= {"inputs": "a", "outputs": "a,b"}
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


# ---- TOML

CLASSIFY = """\
[pipeline]
name = "classify"
entry = "decode"

[decode]
ops = ["DecodeMat"]
next = ["prep"]
instances = 6

[prep]
ops = [
    {op = "ResizeMat", resize_h = 224, resize_w = 224},
    {op = "CvtColorMat", color = "rgb"},
    {op = "Mat2Tensor", filter = "or"},
]
next = ["net"]

[net]
ops = [{op = "OnnxTensor", model = "net.onnx"}]
inputs = {data = "prep.result", "the image" = "prep.data"}
max_batch = 8
wait_ms = 2.3
deadline_ms = 150.0
"""


def test_native_text_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(CLASSIFY)
    assert to_toml(load_graph(tmp_path / "p.toml")) == CLASSIFY


def test_paths_start_at_the_folder_of_the_new_file(tmp_path: Path) -> None:
    tables = {"net": {"ops": [{"op": "OnnxTensor", "model": "sub/n.onnx"}]}}
    graph = parse_graph(tables, name="c", folder=str(tmp_path))
    assert 'model = "sub/n.onnx"' in to_toml(graph)
    assert 'model = "n.onnx"' in to_toml(graph, folder=str(tmp_path / "sub"))
    assert f'model = "{tmp_path}/sub/n.onnx"' in to_toml(graph, folder=str(tmp_path / "other"))


def test_tables_for_the_server_are_kept() -> None:
    graph = parse_graph({"a": {}}, name="c", folder="/")
    server: dict[str, dict[str, Any]] = {"server": {"port": 0, "host": "::1"}, "limits": {"max_body_bytes": 5}}
    assert {k: v for k, v in tomllib.loads(to_toml(graph, tables=server)).items() if k in server} == server


def test_text_of_any_kind_is_written_as_toml() -> None:
    odd = 'a "quote", a \\, a\ttab, a \x7f, ä\nline'
    graph = parse_graph({"a": {"backend": "Result2Key", "key": odd}}, name="c", folder="/")
    assert tomllib.loads(to_toml(graph))["a"]["ops"] == [{"op": "Result2Key", "key": odd}]


def test_conditions_defaults_and_aliases_are_written_back() -> None:
    text = """[pipeline]
name = "routes"
entry = "read"

[read]
ops = ["Identity"]
next = ["low", "high", "low.2"]

[low]
ops = ["DecodeMat"]
next = ["end"]
instances = 2
when = "len(data) < 5 and kind == \\"a\\""
else = "skip_branch"

[low.2]
next = ["end"]

[high]
ops = ["Identity"]
next = ["end"]
when = "app.py:is_high"
else = "skip_branch"

[end]
ops = ["Identity"]
inputs = {data = ["low.result", "high.result"], again = {from = "low.2.result", default = [0.5]}}
require = "any"
"""
    with TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text("def is_high(fields):\n    return True\n")
        graph = parse_graph(tomllib.loads(text), name="c", folder=folder)
        assert to_toml(graph) == text
        assert graph.nodes["low.2"].steps == graph.nodes["low"].steps
        assert graph.nodes["high"].when == f"{folder}/app.py:is_high"
