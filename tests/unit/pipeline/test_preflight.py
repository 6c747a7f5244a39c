"""Recognition of pipelines, their server tables, and the check in a child process."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from penstock.cli.serve import build_config
from penstock.cli.serve import config as config_verb
from penstock.config.load import describes_model
from penstock.config.targets import split_targets
from penstock.errors import ConfigError
from penstock.pipeline import cli
from penstock.pipeline.cli import PipelineCheck

FLAGS: dict[str, object] = {
    **dict.fromkeys(("instances", "devices", "max_batch_size", "model", "compat", "host", "port")),
    **dict.fromkeys(("tls_cert", "tls_key", "tls_password_file", "token_file", "insecure")),
    "options": (),
}
NODE = '[a]\nbackend = "Identity"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.toml").write_text(NODE)
    (tmp_path / "Res Net.toml").write_text('backend = "Identity"\n')
    (tmp_path / "penstock.toml").write_text('[server]\nport = 1\n[models.m]\ntarget = "net.toml"\n')
    (tmp_path / "broken.toml").write_text("[a\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("net.toml", True),
        ("Res Net.toml", True),
        ("penstock.toml", False),
        ("broken.toml", False),
        ("gone.toml", False),
    ],
)
def test_a_pipeline_is_recognized_by_its_tables(file: str, told: bool) -> None:
    assert describes_model(file) is told


def test_files_of_pipelines_are_models_named_by_their_stems(folder: Path) -> None:
    toml, models = split_targets(("penstock.toml", "net.toml", "Res Net.toml", "other=net.toml", "pkg:A"))
    assert toml == "penstock.toml"
    assert models == {
        "net": {"target": f"{folder}/net.toml"},
        "res-net": {"target": f"{folder}/Res Net.toml"},
        "other": {"target": f"{folder}/net.toml"},
        "a": {"target": "pkg:A"},
    }


def test_the_dialect_and_the_workers_apply_to_pipelines() -> None:
    found = build_config(("net.toml", "pkg:A"), {**FLAGS, "compat": "torchpipe", "instances": 3}, ())
    assert found.models["net"].options == {"compat": True}
    assert found.models["a"].options == {}
    assert {model.instances for model in found.models.values()} == {3}
    with pytest.raises(ConfigError, match="--compat applies to pipeline files"):
        build_config(("pkg:A",), {**FLAGS, "compat": "torchpipe"}, ())


def test_server_tables_of_a_pipeline_apply_unless_there_is_a_configuration(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "net.toml").write_text("[server]\nport = 7\n" + NODE)
    assert build_config(("net.toml",), FLAGS, ()).server.port == 7
    assert build_config(("net.toml",), {**FLAGS, "port": 8}, ()).server.port == 8
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert build_config(("penstock.toml", "net.toml"), FLAGS, ()).server.port == 1
    assert [("net.toml" in r.message, "table=server ignored=true" in r.message) for r in caplog.records] == [
        (True, True)
    ]


def test_a_check_in_a_child_process_reports_problems_and_loads_nothing_here(folder: Path) -> None:
    (folder / "steps.py").write_text("import colorsys\ndef f(data): return data\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    before = set(sys.modules)
    PipelineCheck({}).result()
    PipelineCheck({str(folder / "net.toml"): False, str(folder / "python.toml"): True}).result()
    (folder / "net.toml").write_text(NODE + "nxt = 3\n")
    checking = PipelineCheck({str(folder / "net.toml"): False})
    with pytest.raises(ConfigError, match="nxt"):
        checking.result()
    assert not {"steps", "colorsys"} & (set(sys.modules) - before)


def children() -> set[int]:
    """The children of this process, including zombies."""
    return {child.pid for child in psutil.Process().children()}


def test_a_check_that_dies_leaves_the_report_to_the_workers(folder: Path) -> None:
    (folder / "steps.py").write_text("import os\nos._exit(9)\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    before = children()
    PipelineCheck({str(folder / "python.toml"): False}).result()
    assert children() <= before


def test_a_check_that_hangs_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "PATIENCE_S", 0.2)
    (folder / "steps.py").write_text("import time\ntime.sleep(3600)\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    before = children()
    PipelineCheck({str(folder / "python.toml"): False}).result()
    assert children() <= before


def test_an_import_error_of_a_file_is_reported(folder: Path) -> None:
    (folder / "steps.py").write_text("raise ValueError('no weights')\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    with pytest.raises(ConfigError, match="no weights"):
        PipelineCheck({str(folder / "python.toml"): False}).result()


def test_a_configuration_is_checked_with_its_pipelines(folder: Path) -> None:
    result = CliRunner().invoke(config_verb, ["check", "penstock.toml"])
    assert (result.exit_code, result.output) == (0, "ok: m (net.toml)\n")
    (folder / "net.toml").write_text('[a]\nbackend = "Identitty"\n')
    result = CliRunner().invoke(config_verb, ["check", "penstock.toml"])
    assert result.exit_code == 2
    assert "did you mean 'Identity'" in result.output
    result = CliRunner().invoke(config_verb, ["check", "net.toml"])
    assert (result.exit_code, "penstock pipeline check net.toml" in result.output) == (2, True)
