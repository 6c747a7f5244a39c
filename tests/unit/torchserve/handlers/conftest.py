from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.torchserve.handlers.handler import HandlerModel, HandlerSetup


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
