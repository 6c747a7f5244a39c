"""`penstock config check` says ok or what is wrong, by its exit status too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from penstock.cli.config import config


def test_a_right_file_is_ok_with_its_models(toml: Callable[[str], str]) -> None:
    result = CliRunner().invoke(config, ["check", toml('[models.digits]\ntarget = "pkg.mod:Digits"\n')])
    assert (result.exit_code, result.output) == (0, "ok: digits (pkg.mod:Digits)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[server]\nprot = 1\n", "did you mean 'port'"), ('[server]\nhost = "0.0.0.0"\n', "--insecure")],
)
def test_a_wrong_file_exits_with_1_and_says_why(toml: Callable[[str], str], text: str, message: str) -> None:
    result = CliRunner().invoke(config, ["check", toml(text)])
    assert result.exit_code == 1
    assert message in result.output


def test_the_environment_is_checked_with_it(toml: Callable[[str], str]) -> None:
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
def test_a_rule_that_does_not_exist_is_found(toml: Callable[[str], str], line: str, word: str) -> None:
    result = CliRunner().invoke(config, ["check", toml(f'[models.m]\ntarget = "app.py:f"\n{line}\n')])
    assert result.exit_code == 1
    assert "models.m" in result.output
    assert word in result.output
