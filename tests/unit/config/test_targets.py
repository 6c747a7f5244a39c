"""TARGETs and shared option values of the command line."""

from pathlib import Path

import pytest

from penstock.config.targets import only_model, read_options, split_targets
from penstock.errors import ConfigError
from penstock.plugins import load_object

MARK = "raise SystemExit('the file was run')\n"


@pytest.mark.parametrize(
    "source",
    [
        "class Wanted:\n    def predict(self, items): ...\nclass Helper: ...\ndef predict(items): ...",
        "import penstock\nclass Other:\n    def predict(self, items): ...\n@penstock.model\nclass Wanted(Other): ...",
        "import penstock\n@penstock.model(max_batch_size=8)\ndef Wanted(items): ...\ndef other(items): ...",
        "from penstock import model\n@model\nasync def Wanted(items): ...",
    ],
    ids=["the class with predict", "the decorated one", "a function with options", "decorated by its short name"],
)
def test_the_only_model_of_a_file_is_found_without_running_it(source: str, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(MARK + source)
    assert only_model(str(file)) == "Wanted"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def f(items): ...\nclass _Hidden: ...", r"app.py' names no object, and nothing .* it has f; write .*:Model"),
        ("\0", "is not valid Python"),
    ],
)
def test_the_error_for_a_file_without_one_model_lists_its_objects(source: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=error):
        only_model(str(file))


def test_targets_become_models_named_after_their_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toml, models = split_targets(("a.toml", "app.py:Digits", "pkg.mod:Net", "v1=app.py:Digits"))
    assert toml == "a.toml"
    assert models == {
        "digits": {"target": f"{tmp_path}/app.py:Digits"},
        "net": {"target": "pkg.mod:Net"},
        "v1": {"target": f"{tmp_path}/app.py:Digits"},
    }


def test_models_of_model_files_are_named_after_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, models = split_targets(("deep/ResNet 50.onnx", "net.ts", "big=net.pt2", "/x/y.pt", "z.PTH"))
    assert models == {
        "resnet-50": {"target": f"{tmp_path}/deep/ResNet 50.onnx"},
        "net": {"target": f"{tmp_path}/net.ts"},
        "big": {"target": f"{tmp_path}/net.pt2"},
        "y": {"target": "/x/y.pt"},
        "z": {"target": f"{tmp_path}/z.PTH"},
    }


def test_a_link_to_a_file_of_another_name_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache of a hub every file is a link to its digest, which has no suffix."""
    monkeypatch.chdir(tmp_path)
    for folder in ("blobs", "hub", "there"):
        (tmp_path / folder).mkdir()
    for name, text in (("model.onnx", ""), ("app.py", "class Net:\n    def predict(self, items): return items\n")):
        (tmp_path / "blobs" / f"digest of {name[0]}").write_text(text)
        (tmp_path / "hub" / name).symlink_to(tmp_path / "blobs" / f"digest of {name[0]}")
        (tmp_path / "there" / name).write_text(text)
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
    _, models = split_targets(("hub/model.onnx", "net=hub/app.py", "there=model.onnx", "too=app.py:Net"))
    assert models == {
        "model": {"target": f"{tmp_path}/hub/model.onnx"},
        "net": {"target": f"{tmp_path}/hub/app.py:Net"},
        "there": {"target": f"{tmp_path}/there/model.onnx"},
        "too": {"target": f"{tmp_path}/there/app.py:Net"},
    }
    assert load_object(models["net"]["target"]).__name__ == "Net"


def test_a_file_with_one_model_needs_no_object_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text("class Captioner:\n    def predict(self, items): ...\n")
    _, models = split_targets(("app.py", "other=app.py"))
    assert models == {
        "captioner": {"target": f"{tmp_path}/app.py:Captioner"},
        "other": {"target": f"{tmp_path}/app.py:Captioner"},
    }


@pytest.mark.parametrize("text", ["tokens", "=3", "a b=3"])
def test_an_option_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected for instance --option max_new_tokens=12"):
        read_options((text,))
