import sys

import pytest

from penstock.errors import ConfigError, LoadFailed, TargetNotFound
from penstock.plugins import candidates, is_model_file, is_pipeline_file, is_whole_file, load_object, resolve


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    file = tmp_path / "code.py"  # the name of a module of the standard library
    file.write_text(
        "import os\nfrom collections import OrderedDict\nimport beside\n"
        "def predict(items): return items\n"
        "class Model:\n    class Inner: pass\n    def predict(self, items): return items\n"
        "model = Model()\nVALUE = beside.VALUE\n"
    )
    yield file
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_object_of_a_file_is_found_with_its_neighbours_importable(app):
    assert load_object(f"{app}:VALUE") == 7
    assert load_object(f"{app}:Model.Inner").__name__ == "Inner"
    assert load_object(f"{app}:Model") is load_object(f"{app}:Model")
    assert "code" not in sys.modules or sys.modules["code"].__file__ != str(app)


def test_an_object_of_a_package_is_found():
    import json.decoder

    assert load_object("json.decoder:JSONDecoder") is json.decoder.JSONDecoder


def test_candidates_are_definitions_of_the_file_itself(app):
    with pytest.raises(TargetNotFound) as caught:
        load_object(f"{app}:Modell")
    assert "did you mean 'Model'?" in caught.value.message
    assert "(it has: Model, model, predict)" in caught.value.message


def test_candidates_of_a_module_without_any(tmp_path):
    import penstock.runtimes

    assert candidates(penstock.runtimes) == []
    with pytest.raises(TargetNotFound, match="defines no function or class"):
        load_object("penstock.runtimes:Model")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("app.py", "names no object: write app.py:Model"),
        ("app.py:", "names no object"),
        (":Model", "names no object"),
        ("nowhere/app.py:Model", "there is no file nowhere/app.py"),
        (
            "no_such_package.mod:Model",
            "there is no module 'no_such_package'; for a file write no_such_package.py:Model",
        ),
        ("json.nothing:Model", "there is no module 'json.nothing'"),
    ],
)
def test_a_missing_object_is_named(spec, told):
    with pytest.raises(TargetNotFound) as caught:
        load_object(spec)
    assert told in caught.value.message


@pytest.mark.parametrize("source", ["import no_such_thing_at_all", "1/0", "def x(:"])
def test_an_error_of_the_file_itself_is_its_own(tmp_path, source, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "broken.py"
    file.write_text(source)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(LoadFailed, match=r"importing .*broken.py raised") as caught:
            load_object(f"{file}:Model")
        assert "broken.py" in caught.value.detail


def test_a_file_has_its_own_name_unless_that_is_anothers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    (tmp_path / "other").mkdir()
    names = []
    for path in ("penstock_test_own.py", "other/penstock_test_own.py", "this.py", "not-a-name.py"):
        file = tmp_path / path
        file.write_text("class Model: ...\n")
        found = load_object(f"{file}:Model")
        assert found is load_object(f"{file}:Model")
        names.append(found.__module__.rpartition("_")[0])
    taken = "penstock.plugins."
    assert names == ["penstock_test", taken + "penstock_test_own", taken + "this", taken + "not-a-name"]
    assert "this" not in sys.modules  # the standard library has one
    del sys.modules["penstock_test_own"]


def test_plugins_are_built_in_or_named_by_module():
    from penstock.core.transports.local import InlineTransport

    assert resolve("transport", "inline") is InlineTransport
    assert resolve("transport", "penstock.core.transports.local:InlineTransport") is InlineTransport
    with pytest.raises(ConfigError, match="unknown transport 'proces'; did you mean 'process'"):
        resolve("transport", "proces")


@pytest.mark.parametrize("target", ["net.toml", "deep/Net.TOML", "C:/net.toml"])
def test_a_pipeline_is_a_toml_file(target):
    assert is_pipeline_file(target)
    assert is_whole_file(target)
    assert not is_model_file(target)


@pytest.mark.parametrize("target", ["app.py:toml", "app.py:net.toml", "net.onnx", "toml"])
def test_an_object_target_is_not_a_pipeline_file(target):
    assert not is_pipeline_file(target)
