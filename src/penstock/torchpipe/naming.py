"""The module name `torchpipe`, and stand-ins for TorchPipe's names that have no counterpart here."""

import sys
from typing import Any, NoReturn

from penstock.plugins import installed, make_importable

NAME = "torchpipe"
OURS = "penstock.torchpipe"


def install() -> None:
    """Makes `import torchpipe` load this package, in this process. Call it before the first such import.

    Raises ImportError if another torchpipe is installed or imported.
    """
    if sys.modules.get(NAME) is sys.modules[OURS]:
        return
    if NAME in sys.modules or installed(NAME):
        raise ImportError(
            "another torchpipe is installed: uninstall it, or write `import penstock.torchpipe as torchpipe`"
        )
    make_importable(NAME, OURS)


class Unavailable:
    """A stand-in that can be imported, but raises NotImplementedError when called."""

    def __init__(self, name: str, instead: str) -> None:
        self.__name__ = self._name = name
        self._instead = instead

    def __call__(self, *arguments: Any, **keys: Any) -> NoReturn:
        raise NotImplementedError(f"torchpipe.{self._name} is not available: {self._instead}")

    def __repr__(self) -> str:
        return f"<torchpipe.{self._name}, which is not available: {self._instead}>"


_COMPILED = (
    "nothing is compiled. The Python way: class Mine: def forward(self, items): for item in items: item['result'] ="
    " item['data'] * 2; then register_backend(Mine, 'Mine'), or register_filter for a class of filters"
)
_STORE = "keep shared values in a dict of the program, under a lock"

INSTEAD = {
    "encrypt": "models are read unencrypted; keep them on an encrypted disk",
    "supported_opset": "the release notes of ONNX Runtime list the opsets it reads",
    "show": "`penstock pipeline show FILE -o graph.svg` draws the graph",
    "ThreadSafeKVStorage": _STORE,
    "ThreadSafeDict": _STORE,
    "Any": "values are plain Python values",
    "utils.cpp_extension.load": _COMPILED,
    "utils.cpp_extension.load_backend": _COMPILED,
    "utils.cpp_extension.load_filter": _COMPILED,
}


def unavailable(name: str) -> Any:
    """The stand-in for a name."""
    return Unavailable(name, INSTEAD[name])
