"""Finds the handler that a manifest names, in the order of TorchServe 0.12, and prepares the process for it."""

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from penstock.plugins import load_object, make_importable

Handle = Callable[[Any, Any], Any]
Initialize = Callable[[Any], Any]

LIBRARY: Final = "penstock.torchserve.ts"


def prepare_process(model_dir: str, hidden_env: Sequence[str]) -> None:
    """Sets the working directory and first import path to the model's folder, and hides environment variables.

    `hidden_env` are regular expressions for whole names.
    """
    hidden = [re.compile(pattern) for pattern in hidden_env]
    for name in [n for n in os.environ if any(pattern.fullmatch(n) for pattern in hidden)]:
        del os.environ[name]
    os.chdir(model_dir)
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != model_dir]
    os.environ["PYTHONPATH"] = os.pathsep.join([model_dir, *given])
    sys.path[:] = [model_dir, *given, *(p for p in sys.path if p != model_dir and p not in given)]
    importlib.invalidate_caches()


def make_ts_importable() -> None:
    """Lets handlers import our library as `ts`, unless TorchServe is installed."""
    modules: Any = load_object(f"{LIBRARY}:MODULES")
    make_importable("ts", LIBRARY, modules)


def find_entry(handler: str) -> tuple[Initialize, Handle]:
    """The function to call once with the context, and the one to call per batch with data and context.

    `handler` is `file[.py][:function]` or the name of a built-in handler. A module-level function also initializes: it
    is first called with None as data. Otherwise the module's only class is instantiated, and its `handle` is looked up
    before `initialize` runs. Raises ImportError, ValueError, and the errors of the user's code.
    """
    module, name = _module(handler)
    if hasattr(module, name):
        function = getattr(module, name)
        return lambda context: function(None, context), function
    classes = own_classes(module, handler)
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
    """`handle` inside the request envelope of that name. Raises ImportError."""
    module = importlib.import_module(f"ts.torch_handler.request_envelope.{name}")
    wrapped: Handle = own_classes(module, f"{name}_envelope")[0](handle).handle
    return wrapped


def own_classes(module: ModuleType, built_in: str) -> list[type]:
    """The classes that a module itself defines, by name.

    TorchServe defines each built-in in a module of its own. Our library keeps related ones together, so there the
    name `built_in` selects the class: image_classifier means ImageClassifier.
    """
    found = [value for _, value in sorted(vars(module).items()) if isinstance(value, type)]
    found = [cls for cls in found if cls.__module__ == module.__name__]
    if module.__name__.startswith(f"{LIBRARY}."):
        wanted = built_in.rpartition(".")[2].replace("_", "")
        return [cls for cls in found if cls.__name__.lower() == wanted]
    return found


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
                raise error from None  # the failed import of the user's own file explains more
            raise
