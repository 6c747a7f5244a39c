"""What the words behind `penstock serve` name."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.serve import split_targets
from penstock.errors import ConfigError


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
        (("app.py",), r"TARGET 'app.py' must be app.py:obj, .*\.onnx, .* or a .toml file"),
        (("net.h5",), r"TARGET 'net.h5' must be"),
        (("net.onnx", "net.pt"), "two models are named 'net'; name one with NAME=net.pt"),
        (("a.toml", "b.toml"), "one TOML file at most"),
    ],
)
def test_what_names_nothing_is_refused(targets: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        split_targets(targets)
