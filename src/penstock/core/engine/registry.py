"""ModelRegistry: name and version -> handle. Which version answers a request that names none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from penstock.config.checks import check_traffic
from penstock.core.engine.handle import ModelHandle
from penstock.errors import ConfigError, ModelNotFound, nearest


class Servable(Protocol):
    """One version."""

    @property
    def ready(self) -> bool:
        """True while a worker can answer."""


T = TypeVar("T", bound=Servable)


class _Share(Struct, eq=False):
    handle: Any
    weight: float
    credit: float = 0.0


class TrafficSplit(Generic[T]):
    """Shares requests between versions by weight: deterministic smooth weighted round robin.

    Of any n consecutive requests each version gets its share, plus or minus one or two. Every turn adds each version's
    weight to its credit, picks the highest credit, and subtracts the total from it.
    """

    def __init__(self, weights: Mapping[str, float], handles: Mapping[str, T]) -> None:
        self.weights = dict(weights)
        self._shares = [_Share(handles[version], weight) for version, weight in weights.items() if weight > 0]

    def next(self) -> T:
        """The version for one request. A version without a live worker is skipped while another has one."""
        shares = [s for s in self._shares if s.handle.ready] or self._shares
        total = 0.0
        best = shares[0]
        for share in shares:
            share.credit += share.weight
            total += share.weight
            if share.credit > best.credit:
                best = share
        best.credit -= total
        found: T = best.handle
        return found

    def replace(self, old: T, new: T) -> None:
        """`new` replaces `old`."""
        for share in self._shares:
            if share.handle is old:
                share.handle = new


class ModelRegistry:
    """The models of one engine. Lookups are plain dictionary reads; they happen once a request."""

    def __init__(self) -> None:
        self.handles: dict[tuple[str, str | None], ModelHandle] = {}  # version None: the default
        self.splits: dict[str, TrafficSplit[ModelHandle]] = {}

    # ---- changes: each is one step, no request sees the half of it

    def add(self, handle: ModelHandle) -> None:
        """The first version of a name is its default. Raises ConfigError if it is there already."""
        key = (handle.name, handle.version)
        if key in self.handles:
            raise ConfigError(f"model '{handle.name}' version '{handle.version}' is loaded already; unload it first")
        self.handles[key] = handle
        self.handles.setdefault((handle.name, None), handle)

    def replace(self, old: ModelHandle, new: ModelHandle) -> None:
        """`new` answers from now on wherever `old` did."""
        name = old.name
        assert (name, old.version) == (new.name, new.version)
        assert self.handles[(name, old.version)] is old
        del self.handles[(name, old.version)]  # to its end: the newest
        self.handles[(name, old.version)] = new
        if self.handles[(name, None)] is old:
            self.handles[(name, None)] = new
        if name in self.splits:
            self.splits[name].replace(old, new)

    def remove(self, handle: ModelHandle) -> None:
        """Takes it out of sight. The newest of the others becomes the default if it was; the others share its traffic.

        Idempotent: a load that fails may meet an unload.
        """
        name = handle.name
        if self.handles.get((name, handle.version)) is not handle:
            return
        del self.handles[(name, handle.version)]
        others = self._versions(name)
        if self.handles[(name, None)] is handle:
            del self.handles[(name, None)]
            if others:
                self.handles[(name, None)] = list(others.values())[-1]
        split = self.splits.pop(name, None)
        if split is not None:
            weights = {v: w for v, w in split.weights.items() if v != handle.version}
            total = sum(weights.values())
            if total > 0:
                self.splits[name] = TrafficSplit({v: w / total for v, w in weights.items()}, others)

    def set_default(self, name: str, version: str) -> None:
        """Requests that name no version go to this one, all of them. Raises ModelNotFound."""
        self.handles[(name, None)] = self.find(name, version)
        self.splits.pop(name, None)

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Requests that name no version are shared out so. Raises ModelNotFound, ConfigError."""
        for version in (None, *weights):
            self.find(name, version)
        others = self._versions(name)
        check_traffic(f"traffic of model '{name}'", weights, others)
        self.splits[name] = TrafficSplit(weights, others)

    # ---- lookups

    def route(self, name: str, version: str | None) -> ModelHandle:
        """Who answers the next request. Raises ModelNotFound."""
        if version is None and self.splits:
            split = self.splits.get(name)
            if split is not None:
                return split.next()
        return self.find(name, version)

    def get(self, name: str, version: str) -> ModelHandle | None:
        return self.handles.get((name, version))

    def find(self, name: str, version: str | None) -> ModelHandle:
        """The version, or the default. Raises ModelNotFound, naming what there is."""
        handle = self.handles.get((name, version))
        if handle is not None:
            return handle
        versions = self.versions(name)
        if version is not None and versions:
            raise ModelNotFound(f"model '{name}' has no version '{version[:100]}'; it has {', '.join(versions)}")
        names = sorted({h.name for h in self})
        raise ModelNotFound(f"no model is named '{name}'{nearest(name, names)}")

    def share(self, handle: ModelHandle) -> tuple[bool, float]:
        """(whether it is the default, its part of the requests that name no version)."""
        default = self.handles.get((handle.name, None)) is handle
        split = self.splits.get(handle.name)
        return default, float(default) if split is None else split.weights.get(handle.version, 0.0)

    def versions(self, name: str) -> list[str]:
        return list(self._versions(name))

    def _versions(self, name: str) -> dict[str, ModelHandle]:
        """The handles of a name by version, the newest last."""
        return {h.version: h for h in self if h.name == name}

    def __iter__(self) -> Iterator[ModelHandle]:
        return iter([h for (_, version), h in self.handles.items() if version is not None])
