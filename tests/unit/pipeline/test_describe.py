"""docs/pipelines.md has the keys and ops of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.check import check
from penstock.pipeline.describe import ops_text
from penstock.pipeline.keys import NODE, PIPELINE, Size
from penstock.pipeline.load import load_graph, parse_graph
from penstock.pipeline.ops.base import make_op
from penstock.pipeline.ops.catalog import find
from penstock.values import bare
from reference_pages import BEGIN, END, tables, with_tables

PAGE = Path(__file__).parents[3] / "docs" / "pipelines.md"


def test_the_page_has_the_tables_of_the_code() -> None:
    text = PAGE.read_text()
    for name in ("keys of a node", "keys of the pipeline", "ops"):
        assert BEGIN.format(name) in text
        assert END.format(name) in text
    assert with_tables(text) == text, "write it anew: python tools/reference_pages.py"


def test_a_table_without_its_marks_is_not_written() -> None:
    assert with_tables("a page\n") == "a page\n"
    begin, end = BEGIN.format("ops"), END.format("ops")
    assert with_tables(f"{begin}\nold\n{end}\n") == f"{begin}\n\n{tables()['ops']}\n\n{end}\n"


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


def block(head: str) -> str:
    """The example of the page that begins with a line."""
    return f"{head}\n" + PAGE.read_text().split(f"\n{head}\n", 1)[1].split("```")[0]


def test_the_examples_of_the_page_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resnet50.toml").write_text(block("# resnet50.toml"))
    started = load_graph("resnet50.toml")
    check(started)
    exec(block("# build.py"), {})
    check(load_graph("built.toml"))
    Path("app.py").write_text(block("# app.py"))
    Path("labels.txt").write_text("cat dog")
    label = {"backend": "Python[app.py:Label]", "names": "labels.txt"}
    (step,) = parse_graph({"label": label}, name="t", folder=str(tmp_path)).nodes["label"].steps
    op: Any = make_op(find(step.op), step.params)
    fields: dict[str, Any] = {}
    op(np.array([[1, 2]]), fields)
    assert fields == {"label": "dog"}
    compile(block("# local.py"), "local.py", "exec")
