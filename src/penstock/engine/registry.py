"""ModelRegistry: name and version -> handle. Which version answers a request that names none."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.handle import ModelHandle
from penstock.errors import ConfigError, ModelNotFound, nearest


class ModelRegistry:
    """The models of one engine. Lookups are plain dictionary reads; they happen once a request."""

    def __init__(self) -> None:
        self._handles: dict[tuple[str, str | None], ModelHandle] = {}  # version None: the default

    def add(self, handle: ModelHandle) -> None:
        """The first version of a name is its default. Raises ConfigError if it is there already."""
        key = (handle.name, handle.version)
        if key in self._handles:
            raise ConfigError(f"model '{handle.name}' version '{handle.version}' is loaded already; unload it first")
        self._handles[key] = handle
        self._handles.setdefault((handle.name, None), handle)

    def remove(self, handle: ModelHandle) -> None:
        """Takes it out of sight. Idempotent: a load that fails may meet an unload."""
        if self._handles.get((handle.name, handle.version)) is not handle:
            return
        del self._handles[(handle.name, handle.version)]
        if self._handles[(handle.name, None)] is handle:
            del self._handles[(handle.name, None)]
            heir = next((h for (name, _), h in self._handles.items() if name == handle.name), None)
            if heir is not None:
                self._handles[(handle.name, None)] = heir

    def find(self, name: str, version: str | None) -> ModelHandle:
        """Raises ModelNotFound, naming what there is."""
        handle = self._handles.get((name, version))
        if handle is not None:
            return handle
        versions = self.versions(name)
        if versions:
            raise ModelNotFound(f"model '{name}' has no version '{version}'; it has {', '.join(versions)}")
        names = sorted({h.name for h in self})
        raise ModelNotFound(f"no model is named '{name}'{nearest(name, names)}")

    def versions(self, name: str) -> list[str]:
        return [h.version for h in self if h.name == name]

    def __iter__(self) -> Iterator[ModelHandle]:
        return iter([h for (_, version), h in self._handles.items() if version is not None])
