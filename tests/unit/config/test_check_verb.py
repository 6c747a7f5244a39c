"""`penstock config check` prints ok or the error, and sets its exit status."""

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from penstock.cli.serve import config


def test_a_valid_file_prints_ok_and_its_models(toml: Callable[[str], str]) -> None:
    result = CliRunner().invoke(config, ["check", toml('[models.digits]\ntarget = "pkg.mod:Digits"\n')])
    assert (result.exit_code, result.output) == (0, "ok: digits (pkg.mod:Digits)\n")


def test_the_environment_is_checked_too(toml: Callable[[str], str]) -> None:
    result = CliRunner().invoke(config, ["check", toml("")], env={"PENSTOCK_SERVER__PORT": "x"})
    assert result.exit_code == 2
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
    assert result.exit_code == 2
    assert "models.m" in result.output
    assert word in result.output


KEYS = """
[server]
prot = 1
host = 7
[limits]
max_versions = -1
[models.m]
target = "a:b"
batching.slo = 1
"""
BETWEEN_KEYS = """
[server]
tls_cert = "no.pem"
tls_key = "no.pem"
model_store = "nowhere"
[auth]
token_file = "none"
"""
RULES = """
server.host = "0.0.0.0"
[models.m]
target = "a:b"
transport = "proces"
[models.n]
target = "a:b"
batching.rows = "x"
"""


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (KEYS, ["'prot'", "server.host", "limits.max_versions", "'slo'"]),
        (BETWEEN_KEYS, ["server.tls_cert", "server.model_store", "auth.token_file"]),
        (RULES, ["--insecure", "models.m", "models.n"]),
    ],
    ids=["keys", "between keys", "rules"],
)
def test_all_errors_are_listed(toml: Callable[[str], str], text: str, keys: list[str]) -> None:
    """First the errors of single keys; once these are correct, those between keys; then those of models."""
    result = CliRunner().invoke(config, ["check", toml(text)])
    assert result.exit_code == 2
    first, *lines = result.output.splitlines()
    assert first == f"penstock: {len(keys)} errors:"
    assert [key in line for key, line in zip(keys, lines, strict=True)] == [True] * len(keys)
