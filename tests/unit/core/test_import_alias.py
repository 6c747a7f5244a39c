from __future__ import annotations

import importlib
import sys

import pytest

from penstock.core.import_alias import make_importable


@pytest.fixture
def no_ts(own_process):
    for name in [n for n in sys.modules if n == "ts" or n.startswith("ts.")]:
        del sys.modules[name]


def test_ts_is_importable_only_after_it_was_asked_for(no_ts):
    with pytest.raises(ImportError):
        importlib.import_module("ts.context")
    make_importable()
    importlib.import_module("ts.context")


def test_both_names_mean_one_module(no_ts):
    make_importable()
    make_importable()
    import penstock.torchserve.ts.context as ours

    theirs = importlib.import_module("ts.context")
    assert theirs is ours
    assert importlib.import_module("ts").context is ours
    assert ours.__spec__.name == ours.__name__ == "penstock.torchserve.ts.context"


def test_what_is_not_in_it_is_missed_under_its_own_name(no_ts):
    make_importable()
    with pytest.raises(ModuleNotFoundError, match=r"'ts\.nothing'"):
        importlib.import_module("ts.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"'ts\.nothing'"):
        importlib.import_module("ts.nothing.deeper")


def test_an_installed_ts_wins(no_ts, tmp_path, monkeypatch):
    (tmp_path / "ts").mkdir()
    (tmp_path / "ts" / "__init__.py").write_text("mine = True")
    (tmp_path / "ts" / "context.py").write_text("mine = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    make_importable()
    assert importlib.import_module("ts.context").mine


def test_a_folder_of_that_name_does_not(no_ts, tmp_path, monkeypatch):
    (tmp_path / "ts").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    make_importable()
    assert importlib.import_module("ts").__name__ == "penstock.torchserve.ts"
