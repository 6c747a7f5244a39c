"""Libraries that only some handlers need."""

from __future__ import annotations

import importlib
from typing import Any


def library(module: str, name: str) -> Any:
    """The module. Raises ImportError naming what is to be installed."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(
            f"this handler needs {name}, whose module {module!r} cannot be imported: install it beside Penstock",
            name=module,
        ) from e
