"""What the words behind `penstock serve` name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.serve import build_config, read_options, serve, split_targets
from penstock.errors import ConfigError, LoadFailed, PenstockError, TargetNotFound


def test_targets_are_models_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toml, models = split_targets(("a.toml", "app.py:Digits", "pkg.mod:Net", "v1=app.py:Digits"))
    assert toml == "a.toml"
    assert models == {
        "digits": {"target": f"{tmp_path}/app.py:Digits"},
        "net": {"target": "pkg.mod:Net"},
        "v1": {"target": f"{tmp_path}/app.py:Digits"},
    }


def test_model_files_are_named_by_their_stems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, models = split_targets(("deep/ResNet 50.onnx", "net.ts", "big=net.pt2", "/x/y.pt", "z.PTH"))
    assert models == {
        "resnet-50": {"target": f"{tmp_path}/deep/ResNet 50.onnx"},
        "net": {"target": f"{tmp_path}/net.ts"},
        "big": {"target": f"{tmp_path}/net.pt2"},
        "y": {"target": "/x/y.pt"},
        "z": {"target": f"{tmp_path}/z.PTH"},
    }


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (("app.py",), r"TARGET 'app.py' cannot be read: No such file"),
        (("net.h5",), r"TARGET 'net.h5' must be app.py, app.py:obj, .*\.onnx, .* or a .toml file"),
        (("net.onnx", "net.pt"), "two models are named 'net'; name one with NAME=net.pt"),
        (("a.toml", "b.toml"), "one TOML file at most"),
    ],
)
def test_what_names_nothing_is_refused(targets: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        split_targets(targets)


def test_a_file_with_one_model_needs_no_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text("class Captioner:\n    def predict(self, items): ...\n")
    _, models = split_targets(("app.py", "other=app.py"))
    assert models == {
        "captioner": {"target": f"{tmp_path}/app.py:Captioner"},
        "other": {"target": f"{tmp_path}/app.py:Captioner"},
    }


FLAGS: dict[str, object] = dict.fromkeys(
    (
        *("instances", "devices", "max_batch_size", "model", "compat", "host", "port"),
        *("tls_cert", "tls_key", "token_file", "insecure"),
    )
)


def test_options_reach_the_models_of_the_command_line_and_set_wins() -> None:
    flags = {**FLAGS, "model": "org/name", "options": ("tokens=12", "prompt=a photo of", "exact=true")}
    config = build_config(("pkg:A", "pkg:B"), flags, ("models.a.options.tokens=7",))
    said = {"model": "org/name", "tokens": 12, "prompt": "a photo of", "exact": True}
    assert config.models["a"].options == {**said, "tokens": 7}
    assert config.models["b"].options == said


@pytest.mark.parametrize("text", ["tokens", "=3", "a b=3"])
def test_an_option_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected for instance --option max_new_tokens=12"):
        read_options((text,))


@pytest.mark.parametrize(
    ("flag", "told"), [({"model": "x"}, "--option is for"), ({"max_batch_size": 4}, "--max-batch-size is for")]
)
def test_what_is_said_of_no_model_is_refused(flag: dict[str, object], told: str, tmp_path: Path) -> None:
    toml = tmp_path / "a.toml"
    toml.write_text('[models.m]\ntarget = "pkg:A"\n')
    with pytest.raises(ConfigError, match=told):
        build_config((str(toml),), {**FLAGS, "options": (), **flag}, ())


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


@pytest.mark.parametrize(("error", "code"), [(TargetNotFound("there is no 'Nte'"), 2), (LoadFailed("no weights"), 1)])
def test_a_target_that_names_nothing_is_wrong_usage_and_one_that_does_not_load_is_not(
    error: PenstockError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr("penstock.cli.server.run", run)
    found = CliRunner().invoke(serve, ["pkg.mod:Nte"])
    assert (found.exit_code, found.stderr) == (code, f"penstock: {error.message}\n")
