"""The code of a shared model, as a digest: a batcher keeps the code that it has loaded, so it is for equal code alone.

The files belong to the model's modules and to all modules that they import, also within functions. Imports are read
from the text: which modules are loaded differs between the processes of one application. Of an installed package, the
time of its installation counts: reading all of its files takes seconds. The places of files count too, because a model
reads its weights beside them.
"""

import ast
import hashlib
import importlib.util
import os
import pickletools
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

from penstock.core.transports.launch import PackedTarget

_INSTALLED: Final = {"site-packages", "dist-packages"}


def code_digest(packed: PackedTarget) -> str:
    """Equal in all processes whose workers would load the same code for the target."""
    files = {where for where, _ in packed.files}  # of scripts and FILE:NAME, or names of modules
    strings = [value for _, value, _ in pickletools.genops(packed.data) if isinstance(value, str)]
    waiting, names, found = [*files, *strings], set[str](), set[tuple[str, bytes]]()
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        if name in files and os.path.isabs(name):
            source, package = Path(name), ""
        elif (spec := _found(name)) is not None:
            source, package = Path(str(spec.origin)), spec.parent or ""
            waiting.append(name.rpartition(".")[0])
        else:
            continue
        with suppress(OSError):
            if _INSTALLED.isdisjoint(source.parts):
                data = source.read_bytes()
                waiting += _imported(data, package) if source.suffix == ".py" else ()
            else:
                data = str(source.stat().st_mtime_ns).encode()
            found.add((str(source.resolve()), data))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:12]


def _found(name: str) -> ModuleSpec | None:
    """Where a module is, which is not imported; None without a file, and for modules of Python and Penstock."""
    first = name.partition(".")[0]
    if first in sys.stdlib_module_names or first == "penstock" or not all(map(str.isidentifier, name.split("."))):
        return None
    spec = _spec(name)
    return spec if spec is not None and spec.has_location else None


def _spec(name: str) -> ModuleSpec | None:
    above, spec = name.rpartition(".")[0], None
    parent = _spec(above) if above else None
    if not above or (parent is not None and parent.submodule_search_locations is not None):
        spec = PathFinder.find_spec(name, parent.submodule_search_locations if parent else None)
    return spec or getattr(sys.modules.get(name), "__spec__", None)  # of an import hook


def _imported(source: bytes, package: str) -> Iterator[str]:
    """The names of the modules that a module of `package` may import, and of things in them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # it leaves its package
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
