from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.torchpipe import Status, parse_toml, pipe, register_filter
from penstock.torchpipe.configs import graph_of

TOML = """
batching_timeout = 5
instance_num = 8
precision = "fp16"
flag = true
[decode]
backend = "DecodeMat"
next = ["small"]
[small]
backend = "ResizeMat"
resize_h = 2
resize_w = 3.0
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    return path


def test_parse_toml_gives_texts_by_node_and_key(toml: Path) -> None:
    assert parse_toml(toml) == {
        "global": {"batching_timeout": "5", "instance_num": "8", "precision": "fp16", "flag": "1"},
        "decode": {"backend": "DecodeMat", "next": ["small"]},
        "small": {"backend": "ResizeMat", "resize_h": "2", "resize_w": "3.0"},
    }


def test_what_is_changed_in_the_tables_is_what_runs(toml: Path) -> None:
    tables = parse_toml(toml)
    tables["small"]["resize_h"] = 7
    tables["global"]["instance_num"] = "3"
    del tables["global"]["flag"]
    kept = repr(tables)
    graph = graph_of(tables)
    assert graph.nodes["small"].steps[0].params["resize_h"] == 7
    assert {node.instances for node in graph.nodes.values()} == {3}
    assert repr(tables) == kept, "the caller's dict is the caller's"


def test_a_file_and_its_tables_are_the_same_pipeline(toml: Path) -> None:
    assert graph_of(toml).nodes == graph_of(str(toml)).nodes == graph_of(parse_toml(toml)).nodes


def test_unknown_keys_are_warned_of_and_run_all_the_same(toml: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(graph_of(toml).nodes) == ["decode", "small"]
    assert "flag" in caplog.text


def test_relative_paths_start_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "sub" / "net.toml").write_text('[net]\nbackend = "SaveMat"\nsave_dir = "out"\n')
    for config in ("sub/net.toml", parse_toml("sub/net.toml")):
        assert Path(graph_of(config).nodes["net"].steps[0].params["save_dir"]) == tmp_path / "out"


@pytest.mark.parametrize("config", [{}, None, [], 3])
def test_what_is_no_configuration_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="expected a path to a TOML file, or a dict"):
        graph_of(config)


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        parse_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[a\n")
    with pytest.raises(ConfigError, match=r"bad\.toml.*line 1"):
        pipe(str(tmp_path / "bad.toml"))


def test_a_filter_of_the_program_is_refused_where_a_node_names_it() -> None:
    class Sometimes:
        def forward(self, item: dict[str, Any]) -> Status:
            return Status.Run

    register_filter(Sometimes, "sometimes")
    for keys in ({"filter": "sometimes"}, {"backend": "S[Identity,(sometimes)Identity]"}):
        with pytest.raises(ConfigError, match="node 'b' names the filter 'sometimes' of this program"):
            graph_of({"a": {"next": "b"}, "b": keys})


def test_the_filter_or_runs_what_has_no_result_yet(make_pipe: Callable[..., pipe]) -> None:
    either = make_pipe({"backend": "S[Result2Key,(or)Identity]", "key": "first"})
    item = {"data": 3}
    either(item)
    assert item["result"] == 3
