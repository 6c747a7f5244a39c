"""From the handler that a manifest names to what is called, found as TorchServe 0.12 finds it."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Handle = Callable[[Any, Any], Any]
Initialize = Callable[[Any], Any]


def prepare_process(model_dir: str, hidden_env: Sequence[str]) -> None:
    """Makes this process what a handler expects: cwd and first on the path the model's folder, no hidden variables.

    `hidden_env` are regular expressions of whole names.
    """
    hidden = [re.compile(pattern) for pattern in hidden_env]
    for name in [n for n in os.environ if any(pattern.fullmatch(n) for pattern in hidden)]:
        del os.environ[name]
    os.chdir(model_dir)
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != model_dir]
    os.environ["PYTHONPATH"] = os.pathsep.join([model_dir, *given])
    sys.path[:] = [model_dir, *given, *(p for p in sys.path if p != model_dir and p not in given)]
    importlib.invalidate_caches()


def find_entry(handler: str) -> tuple[Initialize, Handle]:
    """What to call once with the context, and for each batch with data and context.

    `handler` is `file[.py][:function]`, or the name of a built-in. A module with the function is called itself, once
    with None as data; else its only class is made, and its `handle` is taken before `initialize` runs. Raises
    ImportError, ValueError, and what the user's code raises.
    """
    module, name = _module(handler)
    if hasattr(module, name):
        function = getattr(module, name)
        return lambda context: function(None, context), function
    classes = own_classes(module)
    if len(classes) != 1:
        found = ", ".join(cls.__name__ for cls in classes) or "none"
        raise ValueError(
            f"the handler '{handler}' must have a function '{name}', or define exactly one class; its classes: {found}"
        )
    service = classes[0]()
    if not hasattr(service, "handle"):
        raise ValueError(f"the class {classes[0].__name__} of the handler '{handler}' has no method 'handle'")
    return service.initialize, service.handle


def in_envelope(name: str, handle: Handle) -> Handle:
    """`handle` inside of the request envelope of that name. Raises ImportError."""
    module = importlib.import_module(f"ts.torch_handler.request_envelope.{name}")
    wrapped: Handle = own_classes(module)[0](handle).handle
    return wrapped


def own_classes(module: ModuleType) -> list[type]:
    """The classes that a module defines itself, by name."""
    names = sorted(vars(module))
    found = [vars(module)[name] for name in names if isinstance(vars(module)[name], type)]
    return [cls for cls in found if cls.__module__ == module.__name__]


def _module(handler: str) -> tuple[ModuleType, str]:
    where, _, name = handler.partition(":")
    base = where.removesuffix(".py").rpartition("/")[2]
    try:
        return importlib.import_module(base), name or "handle"
    except ImportError as error:
        try:
            return importlib.import_module(f"ts.torch_handler.{handler}"), "handle"
        except ModuleNotFoundError as e:
            if (e.name or "").startswith("ts."):
                raise error from None  # what the user's own file could not import, not that it is no built-in
            raise
