"""Makes packages of ours importable under the names of others: `ts`, which TorchServe's handlers import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

NAME = "ts"
OURS = "penstock.torchserve.ts"


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
    """Finds `name` and what is in it among the modules of `ours`: one object under both names.

    It stands first, since others would find the files of the package's modules and load each a second time. `name`
    itself is ours only when no other is installed.
    """

    def __init__(self, name: str, ours: str) -> None:
        self.name, self._ours = name, ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self.name:
            if installed(self.name):
                return None
        elif not fullname.startswith(self.name + ".") or sys.modules.get(self.name) is not sys.modules.get(self._ours):
            return None
        name = self._ours + fullname.removeprefix(self.name)
        if importlib.util.find_spec(name) is None:
            return None
        return ModuleSpec(fullname, _Alias(name))


def installed(name: str) -> bool:
    """Whether a package of this name is on the path of this process; without a loader it is but a folder."""
    found = PathFinder.find_spec(name)
    return found is not None and found.loader is not None


def make_importable(name: str = NAME, ours: str = OURS) -> None:
    """Lets `import ts` find our library, unless one is installed; or another name another package of ours."""
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, ours))
