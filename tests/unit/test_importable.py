import importlib

import pytest

from penstock.plugins import make_importable


@pytest.fixture
def package(own_process, tmp_path, monkeypatch):
    """The package `real`, which tests make importable as `other`."""
    folder = tmp_path / "lib" / "real"
    (folder / "sub").mkdir(parents=True)
    for name in ("__init__", "part", "sub/__init__", "sub/inner"):
        (folder / f"{name}.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(folder.parent))


def test_the_alias_is_importable_only_after_it_is_requested(package):
    with pytest.raises(ImportError):
        importlib.import_module("other.part")
    make_importable("other", "real")
    importlib.import_module("other.part")


def test_both_names_import_the_same_module(package):
    make_importable("other", "real")
    make_importable("other", "real")
    for path in ("part", "sub", "sub.inner"):
        module = importlib.import_module(f"other.{path}")
        assert module is importlib.import_module(f"real.{path}")
        assert module.__spec__.name == module.__name__ == f"real.{path}"
    assert importlib.import_module("other").part is importlib.import_module("real.part")


def test_only_listed_submodules_are_importable_if_there_is_a_list(package):
    modules = {"old.place": "part", "old.deeper.place": "sub.inner", "version": ""}
    make_importable("other", "real", modules)
    for path, real in {"old.place": "real.part", "old.deeper.place": "real.sub.inner", "version": "real"}.items():
        assert importlib.import_module(f"other.{path}") is importlib.import_module(real)
    for path in ("part", "sub.inner", "old.part"):
        with pytest.raises(ModuleNotFoundError, match=rf"'other\.{path.partition('.')[0]}"):
            importlib.import_module(f"other.{path}")


def test_a_missing_module_is_reported_by_its_alias(package):
    make_importable("other", "real")
    for path in ("nothing", "nothing.deeper"):
        with pytest.raises(ModuleNotFoundError, match=r"'other\.nothing'"):
            importlib.import_module(f"other.{path}")


def test_an_installed_package_takes_precedence(package, tmp_path):
    (tmp_path / "lib" / "other").mkdir()
    (tmp_path / "lib" / "other" / "__init__.py").touch()
    (tmp_path / "lib" / "other" / "part.py").write_text("value = 2")
    make_importable("other", "real")
    assert importlib.import_module("other.part").value == 2


def test_a_plain_folder_of_that_name_does_not(package, tmp_path):
    (tmp_path / "lib" / "other").mkdir()
    make_importable("other", "real")
    assert importlib.import_module("other").__name__ == "real"
