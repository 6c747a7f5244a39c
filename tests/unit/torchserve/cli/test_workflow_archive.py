from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.torchserve.cli.workflow_archive import archive


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("spec.yaml", "functions.py", "a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: str) -> Result:
    return CliRunner().invoke(archive, words.split(), prog_name="torch-workflow-archiver")


def test_every_flag_is_accepted(work: Path):
    words = (
        "--workflow-name w --spec-file spec.yaml --handler functions.py --extra-files a.txt,b.txt --export-path store"
    )
    assert (run(words).exit_code, run(words).exit_code, run(f"{words} -f").exit_code) == (0, 1, 0)
    with zipfile.ZipFile("store/w.war") as z:
        assert sorted(z.namelist()) == ["WAR-INF/MANIFEST.json", "a.txt", "b.txt", "functions.py", "spec.yaml"]
        manifest = json.loads(z.read("WAR-INF/MANIFEST.json"))
    assert manifest["workflow"] == {"workflowName": "w", "specFile": "spec.yaml", "handler": "functions.py"}
    assert manifest.keys() == {"createdOn", "workflow", "archiverVersion"}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--workflow-name w", 2, "--spec-file"),
        ("--workflow-name ../w --spec-file spec.yaml", 1, "the model's name is '../w'"),
        ("--workflow-name w --spec-file none.yaml", 1, "spec file: there is no file none.yaml"),
        ("--workflow-name w --spec-file spec.yaml --handler none.py", 1, "handler: there is no file none.py"),
        ("--workflow-name w --spec-file spec.yaml --extra-files none", 1, "there is no file or folder none"),
        ("--workflow-name w --spec-file spec.yaml --export-path none", 1, "none is not a folder"),
    ],
)
def test_a_wrong_command_writes_nothing(work: Path, words: str, status: int, message: str):
    found = run(words)
    assert found.exit_code == status
    assert message in found.output
    assert not list(work.rglob("*.war"))
