from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.bench import results as of
from penstock.perf.bench.results import command_line, machine, redacted, versions


def test_a_machine_has_the_facts_that_a_reader_compares() -> None:
    found = machine()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert set(found) == {"cpu", "cores", "memory_gib", "system", "gpus", "load_before"}


def test_a_machine_without_proc_and_gpus_is_described_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(of, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(of.Gpus, "read", lambda self: [])
    found = machine()
    assert found["cpu"]
    assert found["gpus"] == []


def test_versions_are_those_of_installed_packages() -> None:
    found = versions(["numpy", "no-such-library"])
    assert {"python", "penstock", "msgspec", "numpy"} <= set(found)
    assert "no-such-library" not in found


def test_versions_work_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert "(" not in versions()["penstock"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://h:8080/predictions/m?token=t0p&x=1", "http://h:8080/predictions/m?token=***&x=1"),
        ("https://me:p@ss@h/x.mar?X-Amz-Signature=t0p", "https://***@h/x.mar?X-Amz-Signature=***"),
        ('{"apiKey": "t0 \\"p", "n": 1}', '{"apiKey": ***, "n": 1}'),
        ("{hf_token = 't0 p', n = 1}", "{hf_token = ***, n = 1}"),
        ("Authorization: Bearer t0p", "Authorization: ***"),
        ("PASSWORD=t0p;x", "PASSWORD=***;x"),
        ("http://h/a@b?max_tokens=5&token_file=/f&keyboard=1", "http://h/a@b?max_tokens=5&token_file=/f&keyboard=1"),
        ("package.token:Model", "package.token:Model"),
        ("app.py:Model", "app.py:Model"),
    ],
)
def test_values_of_secret_names_are_hidden(text: str, kept: str) -> None:
    assert redacted(text) == kept


def test_the_command_line_is_stored_without_its_secrets() -> None:
    words = ["bench", "app.py:My Model", "--option", "api_key=t0 p, x", "--option=db.password=t0=p", "--set", "a.key="]
    expected = "penstock bench 'app.py:My Model' --option 'api_key=***' '--option=db.password=***' --set a.key="
    assert command_line([*words, "--token-file", "f"]) == f"{expected} --token-file f"


def test_bytes_that_are_not_text_are_escaped() -> None:
    assert command_line(["a\udcff", "key=\udcff", "\udcffkey=x"]) == "penstock 'a\\udcff' 'key=***' '\\udcffkey=***'"
