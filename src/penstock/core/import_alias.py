"""Makes a package importable under another name, such as `ts`, which TorchServe's handlers import."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def make_importable(name: str, package: str, modules: Mapping[str, str] | None = None) -> None:
    """Lets `import name` find `package`, unless a package of that name is installed.

    Both names give the same module object. `modules` lists the importable submodules, {"metrics.unit": "metrics"}, with
    "" for the package itself; None makes every submodule importable by its own name.
    """
    if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        # First, because other finders would find the package's files and load each a second time.
        sys.meta_path.insert(0, _Finder(name, package, modules))


def installed(name: str) -> bool:
    """Whether a package of this name is on the path of this process; a plain folder does not count."""
    found = PathFinder.find_spec(name)
    return found is not None and found.loader is not None


class _Finder(MetaPathFinder):
    def __init__(self, name: str, package: str, modules: Mapping[str, str] | None) -> None:
        self.name, self._package, self._modules = name, package, modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self.name:
            return None if installed(self.name) else ModuleSpec(fullname, _Alias(self._package))
        if not fullname.startswith(self.name + ".") or sys.modules.get(self.name) is not sys.modules.get(self._package):
            return None
        module = fullname.removeprefix(self.name + ".")
        if self._modules is not None:
            if any(known.startswith(f"{module}.") for known in self._modules):
                return ModuleSpec(fullname, None, is_package=True)  # a namespace package
            if module not in self._modules:  # other finders would load our files under this name
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
            module = self._modules[module]
        real = f"{self._package}.{module}" if module else self._package
        return None if importlib.util.find_spec(real) is None else ModuleSpec(fullname, _Alias(real))


class _Alias(Loader):
    """Returns the existing module of another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it with the alias's
