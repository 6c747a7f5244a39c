from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.models.handler import HandlerModel, HandlerSetup


@pytest.fixture
def own_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Undoes what a handler's worker does to its process: cwd, path, environment, modules."""
    cwd, path, env, finders = os.getcwd(), list(sys.path), dict(os.environ), list(sys.meta_path)
    modules = set(sys.modules)
    yield
    os.chdir(cwd)
    sys.path[:], sys.meta_path[:] = path, finders
    os.environ.clear()
    os.environ.update(env)
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name == "ts" or name.startswith("ts.") or file.startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]


@pytest.fixture
def make_handler(tmp_path: Path, own_process: None) -> Callable[..., HandlerModel]:
    """`make_handler("def handle(data, context): ...")` writes the handler's file and makes the model of it."""

    def make(source: str, *, handler: str = "my_handler.py", load: bool = True, **setup: Any) -> HandlerModel:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "my_handler.py").write_text(textwrap.dedent(source))
        setup = {"model_name": "m", "model_dir": str(folder), "handler": handler, **setup}
        model = HandlerModel(None, setup=msgspec.to_builtins(msgspec.convert(setup, HandlerSetup)))
        if load:
            model.load("cpu")
        return model

    return make
