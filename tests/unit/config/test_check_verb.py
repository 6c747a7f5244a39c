"""`penstock config check` prints ok or the error, and sets its exit status."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from penstock.cli.config import config


def test_a_valid_file_prints_ok_and_its_models(toml: Callable[[str], str]) -> None:
    result = CliRunner().invoke(config, ["check", toml('[models.digits]\ntarget = "pkg.mod:Digits"\n')])
    assert (result.exit_code, result.output) == (0, "ok: digits (pkg.mod:Digits)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[server]\nprot = 1\n", "did you mean 'port'"), ('[server]\nhost = "0.0.0.0"\n', "--insecure")],
)
def test_an_invalid_file_exits_with_1_and_the_reason(toml: Callable[[str], str], text: str, message: str) -> None:
    result = CliRunner().invoke(config, ["check", toml(text)])
    assert result.exit_code == 1
    assert message in result.output


def test_the_environment_is_checked_too(toml: Callable[[str], str]) -> None:
    result = CliRunner().invoke(config, ["check", toml("")], env={"PENSTOCK_SERVER__PORT": "x"})
    assert result.exit_code == 1
    assert "PENSTOCK_SERVER__PORT" in result.output


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('batching.policy = "adaptiv"', "'adaptive'"),
        ('batching.rows = "many"', "header:NAME"),
        ('transport = "proces"', "'process'"),
    ],
)
def test_an_unknown_batching_rule_is_found(toml: Callable[[str], str], line: str, word: str) -> None:
    result = CliRunner().invoke(config, ["check", toml(f'[models.m]\ntarget = "app.py:f"\n{line}\n')])
    assert result.exit_code == 1
    assert "models.m" in result.output
    assert word in result.output
