from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.torchserve.admin import snapshots
from penstock.torchserve.admin.snapshots import Snapshots, last_snapshot
from penstock.torchserve.config import read_properties

MODELS: dict[str, dict[str, dict[str, Any]]] = {"m": {"1.0": {"marName": "m.mar", "minWorkers": 1}}}


def test_a_snapshot_is_a_configuration_with_its_models(tmp_path: Path) -> None:
    writer = Snapshots(tmp_path, {"job_queue_size": "7", "load_models": "all", "model_snapshot": "old"})
    file = writer.write("startup", MODELS)
    assert file is not None
    assert file.parent == tmp_path / "config"
    assert re.fullmatch(r"\d{17}-startup\.cfg", file.name)
    found = {key: each.value for key, each in read_properties(str(file)).items()}
    message = json.loads(found.pop("model_snapshot"))
    assert found == {"job_queue_size": "7"}
    assert (message["name"], message["modelCount"], message["models"]) == (file.name, 1, MODELS)


def test_the_last_snapshot_is_the_newest_by_name(tmp_path: Path) -> None:
    assert last_snapshot(tmp_path) is None
    writer = Snapshots(tmp_path, {})
    files = [writer.write(kind, MODELS) for kind in ("startup", "snapshot", "snapshot", "shutdown")]
    assert len(set(files)) == 4
    assert last_snapshot(tmp_path) == files[-1]


def test_other_files_are_not_snapshots(tmp_path: Path) -> None:
    file = Snapshots(tmp_path, {}).write("snapshot", MODELS)
    for name in ("99999999999999999-snapshot.cfg.bak", "zz-snapshot.cfg", "notes.txt", ".99999999999999999-x.cfg.1"):
        (tmp_path / "config" / name).write_text("")
    assert last_snapshot(tmp_path) == file


def test_old_snapshots_are_removed_and_other_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "KEEP", 3)
    writer = Snapshots(tmp_path, {})
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "notes.txt").write_text("")
    files = [writer.write("snapshot", MODELS) for _ in range(5)]
    assert sorted(p for p in (tmp_path / "config").iterdir() if p.suffix == ".cfg") == files[2:]
    assert (tmp_path / "config" / "notes.txt").exists()


def test_a_folder_that_cannot_be_created_only_costs_the_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file")
    assert Snapshots(tmp_path / "logs", {}).write("snapshot", MODELS) is None
    assert "snapshot_not_written" in caplog.text
