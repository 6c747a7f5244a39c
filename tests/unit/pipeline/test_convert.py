"""Graphs as TOML with native keys."""

from __future__ import annotations

import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.pipeline.convert import to_toml
from penstock.pipeline.load import load_graph, parse_graph

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
