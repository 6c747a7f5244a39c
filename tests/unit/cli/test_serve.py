"""What the words behind `penstock serve` name."""

import pytest
from click.testing import CliRunner

from penstock.cli.serve import build_config, serve
from penstock.errors import ConfigError, ListenFailed, LoadFailed, PenstockError, TargetNotFound

FLAGS: dict[str, object] = dict.fromkeys(
    (
        *("instances", "devices", "max_batch_size", "model", "compat", "host", "port"),
        *("tls_cert", "tls_key", "tls_password_file", "token_file", "insecure", "keep_going", "reload"),
    )
)


def test_options_reach_the_models_of_the_command_line_and_set_wins() -> None:
    flags = {**FLAGS, "model": "org/name", "options": ("tokens=12", "prompt=a photo of", "exact=true")}
    config = build_config(("pkg:A", "pkg:B"), flags, ("models.a.options.tokens=7",))
    said = {"model": "org/name", "tokens": 12, "prompt": "a photo of", "exact": True}
    assert config.models["a"].options == {**said, "tokens": 7}
    assert config.models["b"].options == said


@pytest.mark.parametrize(
    ("devices", "instances", "made"),
    [
        (["cuda:0", "cuda:1"], None, "auto"),
        (["cpu", "cpu"], None, 2),
        (["cuda:0", "cuda:1"], 1, 1),
        (["cuda:0"], None, 1),
        (None, None, 1),
    ],
)
def test_several_devices_have_an_instance_each(
    devices: list[str] | None, instances: int | None, made: int | str
) -> None:
    flags = {**FLAGS, "options": (), "devices": devices, "instances": instances}
    assert build_config(("pkg:A",), flags, ()).models["a"].instances == made
    assert build_config(("pkg:A",), flags, ("models.a.instances=3",)).models["a"].instances == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TargetNotFound("there is no 'Nte'"), 2),
        (ConfigError("devices: found cuda:0, but this machine has cpu"), 2),
        (ListenFailed("the port is in use"), 1),
        (LoadFailed("no weights"), 1),
    ],
)
def test_wrong_usage_exits_with_2_and_a_failure_with_1(
    error: PenstockError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr("penstock.cli.server.run", run)
    found = CliRunner().invoke(serve, ["pkg.mod:Nte"])
    assert (found.exit_code, found.stderr) == (code, f"penstock: {error.message}\n")
