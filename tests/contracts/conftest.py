"""What the contracts of the streamers share: their models, and the modules that their names come from."""

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
    """Lets this process and its workers find the models, and the package of the old name."""
    with pytest.MonkeyPatch.context() as patch:
        for path in (HERE, COMPAT):
            patch.syspath_prepend(str(path))
        yield


@pytest.fixture(scope="module")
def models(paths: None) -> ModuleType:
    return importlib.import_module("streamed")


@pytest.fixture(scope="module", params=["penstock", "service_streamer"])
def face(paths: None, request: pytest.FixtureRequest) -> ModuleType:
    """The module that the names are imported from."""
    return importlib.import_module(request.param)
