"""docs/pipelines.md has the keys and ops of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.check import check
from penstock.pipeline.load import load_graph, parse_graph
from penstock.pipeline.ops.base import make_op
from penstock.pipeline.ops.catalog import find
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
