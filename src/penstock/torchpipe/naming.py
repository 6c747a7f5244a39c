"""`import torchpipe` in programs that stay as they are."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from penstock.core.import_alias import installed, make_importable

NAME = "torchpipe"
OURS = "penstock.torchpipe"


def install() -> None:
    """Makes `import torchpipe`, and of modules in it, give this package, in this process. To be called before they are.

    Raises ImportError when a torchpipe is installed, or another one was imported: nothing takes its place.
    """
    if sys.modules.get(NAME) is sys.modules[OURS]:
        return
    if NAME in sys.modules or installed(NAME):
        raise ImportError(
            "another torchpipe is installed: uninstall it, or write `import penstock.torchpipe as torchpipe`"
        )
    make_importable(NAME, OURS)


class Absent:
    """What raises NotImplementedError when it is called."""

    def __init__(self, name: str, instead: str) -> None:
        self.__name__ = self._name = name
        self._instead = instead

    def __call__(self, *arguments: Any, **keys: Any) -> NoReturn:
        raise NotImplementedError(f"torchpipe.{self._name} is not there: {self._instead}")

    def __repr__(self) -> str:
        return f"<torchpipe.{self._name}, which is not there: {self._instead}>"


_COMPILED = "nothing is compiled; write the backend in Python and give it to register_backend"
_SHAPES = "onnx.load(path).graph.input tells the shapes of a model"
_MEASURES = "test_function and test_from_raw_file measure a pipe"
_STORE = "keep what is shared in a dict of the program, under a lock"

INSTEAD = {
    "Interpreter": "pipe is what it was, and takes the same configurations",
    "encrypt": "models are read as they are; keep them on an encrypted disk",
    "infer_shape": _SHAPES,
    "supported_opset": "ONNX Runtime's notes say which opsets it reads",
    "show": "`penstock pipeline check FILE` prints the graph",
    "ThreadSafeKVStorage": _STORE,
    "ThreadSafeDict": _STORE,
    "Any": "values are Python's own",
    "Dict": "items are Python's dicts",
    "utils.cpp_extension.load": _COMPILED,
    "utils.cpp_extension.load_backend": _COMPILED,
    "utils.cpp_extension.load_filter": _COMPILED,
    "utils.test.Sampler": _MEASURES,
    "utils.test.test": _MEASURES,
    "utils.test.throughput": _MEASURES,
}


def absent(name: str) -> Any:
    """The stand-in of a name."""
    return Absent(name, INSTEAD[name])
