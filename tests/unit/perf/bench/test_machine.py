from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.bench import machine as of
from penstock.perf.bench.machine import machine, versions


def test_a_machine_is_told_by_what_a_reader_compares() -> None:
    found = machine()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert set(found) == {"cpu", "cores", "memory_gib", "system", "gpus", "load_before"}


def test_a_machine_without_proc_and_without_gpus_is_told_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(of, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(of.Gpus, "read", lambda self: [])
    found = machine()
    assert found["cpu"]
    assert found["gpus"] == []


def test_versions_are_those_of_what_is_installed() -> None:
    found = versions(["numpy", "no-such-library"])
    assert {"python", "penstock", "msgspec", "numpy"} <= set(found)
    assert "no-such-library" not in found


def test_versions_are_told_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert "(" not in versions()["penstock"]
