"""Fixtures of the streamer contracts: models, and the modules that export the streamers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
COMPAT = HERE.parents[1] / "compat" / "service_streamer"


@pytest.fixture(scope="module")
def paths() -> Iterator[None]:
    """Lets this process and its workers import the models and service_streamer."""
    with pytest.MonkeyPatch.context() as patch:
        for path in (HERE, COMPAT):
            patch.syspath_prepend(str(path))
        yield


@pytest.fixture(scope="module")
def models(paths: None) -> ModuleType:
    return importlib.import_module("streamed")
