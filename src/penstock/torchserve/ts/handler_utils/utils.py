"""What handlers use while they run."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.torchserve.ts.protocol.otf_message_handler import (
    create_predict_response as create_predict_response,
)
from penstock.torchserve.ts.protocol.otf_message_handler import (
    send_intermediate_predict_response as send_intermediate_predict_response,
)


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """What `[module.]Class` names, the module below `module_prefix` if that is given. Raises ImportError."""
    module, _, name = (class_name or "").rpartition(".")
    path = ".".join(part for part in (module_prefix, module) if part)
    if not name or not path:
        raise ImportError(f"found {class_name!r}, expected 'module.Class'")
    try:
        return getattr(importlib.import_module(path), name)
    except AttributeError:
        raise ImportError(f"the module {path} has no {name}") from None
