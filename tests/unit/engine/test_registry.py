from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.registry import ModelRegistry
from penstock.errors import ConfigError, ModelNotFound


def handle(name: str, version: str = "1") -> Any:
    return SimpleNamespace(name=name, version=version)


def test_the_first_version_is_the_default_until_it_is_removed() -> None:
    registry = ModelRegistry()
    one, two = handle("m", "1"), handle("m", "2")
    registry.add(one)
    registry.add(two)
    assert registry.find("m", None) is one
    assert registry.find("m", "2") is two
    registry.remove(one)
    assert registry.find("m", None) is two
    assert registry.versions("m") == ["2"]


def test_an_unknown_model_names_the_nearest_and_an_unknown_version_those_there_are() -> None:
    registry = ModelRegistry()
    registry.add(handle("digits"))
    with pytest.raises(ModelNotFound, match="did you mean 'digits'"):
        registry.find("digit", None)
    with pytest.raises(ModelNotFound, match="no version '7'; it has 1"):
        registry.find("digits", "7")


def test_the_same_version_twice_is_refused() -> None:
    registry = ModelRegistry()
    registry.add(handle("m"))
    with pytest.raises(ConfigError, match="loaded already"):
        registry.add(handle("m"))
