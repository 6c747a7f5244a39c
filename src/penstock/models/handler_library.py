"""Makes the library that TorchServe's handlers import, `ts`, importable in this process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

NAME = "ts"
OURS = "penstock.compat.ts"


class _Alias(Loader):
    """Gives the module of another name, as it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of the alias in its place


class _Finder(MetaPathFinder):
    """Finds `ts` and what is in it among our own modules: one object under both names.

    It stands first, since others would find the files of the package's modules and load each a second time. `ts`
    itself is ours only when no other is installed.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == NAME:
            installed = PathFinder.find_spec(NAME)
            if installed is not None and installed.loader is not None:  # without a loader it is but a folder
                return None
        elif not fullname.startswith(NAME + ".") or sys.modules.get(NAME) is not sys.modules.get(OURS):
            return None
        name = OURS + fullname.removeprefix(NAME)
        if importlib.util.find_spec(name) is None:
            return None
        return ModuleSpec(fullname, _Alias(name))


def make_importable() -> None:
    """Lets `import ts` find our library, unless one is installed. Called in workers only."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
