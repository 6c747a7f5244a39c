"""Wrong usage exits with 2, in every command."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main

COMMANDS = [
    "serve", "worker", "config check", "bench", "tune", "simulate", "compare", "benchmark-suite", "caption", "archive",
    "pipeline check", "pipeline run", "pipeline ops", "demo",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_exits_with_2(command: str) -> None:
    found = CliRunner().invoke(main, [*command.split(), "--no-such-flag"])
    assert (found.exit_code, "Traceback" in found.output) == (2, False), found.output


@pytest.mark.parametrize(
    "words",
    [
        "serve none.toml",
        "serve app.py",
        "serve none.py:f --port 0",
        "serve pkg:f --set a.b=1",
        "serve pkg:f --token-file none --port 0",
        "serve pkg:f --devices cuda:77 --port 0",
        "serve pkg:f --port 99999",
        "worker none --redis localhost:1",
        "worker app.py:f --redis :::",
        "worker app.py:f --set x=1",
        "config check none.toml",
        "config check wrong.toml",
        "bench none.toml",
        "tune none.toml",
        "simulate --arrivals none:1",
        "compare none none",
        "benchmark-suite none.toml",
        "pipeline check none.toml",
        "pipeline check wrong.toml",
        "pipeline ops NoSuchOp",
        "caption none.mp4 --output out",
    ],
)
def test_a_wrong_file_or_value_exits_with_2(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text("[server]\nprot = 1\n")
    found = CliRunner().invoke(main, words.split())
    assert (found.exit_code, "Traceback" in found.output) == (2, False), (found.output, found.exception)
