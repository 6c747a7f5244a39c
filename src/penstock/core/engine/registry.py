"""ModelRegistry: (name, version) -> handle, and the version for requests without one.

TorchServe's versions are registered by the same rules, with other texts.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from msgspec import Struct

from penstock.config.checks import check_traffic
from penstock.core.engine.handle import ModelHandle
from penstock.errors import ConfigError, ModelNotFound, ModelNotReady, PenstockError, nearest
from penstock.types import SequenceRequest


class Servable(Protocol):
    """A model version that can receive traffic."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def version(self) -> str:
        """The version's name."""

    @property
    def ready(self) -> bool:
        """True while a worker can answer."""


T = TypeVar("T", bound=Servable)

_PARTS: Final = re.compile(r"[0-9]+|[A-Za-z]+|\+")


def version_order(version: str) -> tuple[list[tuple[int, int, str]], str]:
    """The key by which versions sort, the newest last. Triton's versions, which are whole numbers, keep their order.

    Numbers in a version compare by value: 1.9 < 1.10. A word makes it older than the version that ends before the word,
    unless "+" precedes the word: 1.0-rc1 < 1.0 < 1.0+cu12 < 1.0.1. A leading "v" does not count.
    """
    parts = _PARTS.findall(re.sub("^[vV](?=[0-9])", "", version))
    ranks = [(3, int(p), "") if p.isdecimal() else (2, 0, "") if p == "+" else (0, 0, p) for p in parts]
    return [*ranks, (1, 0, "")], version


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
        for share in self._shares:
            if share.handle is old:
                share.handle = new


class ModelRegistry(Generic[T]):
    """The models of one engine. Each request costs one dictionary look-up."""

    newest: ClassVar = True  # the default is the newest version that is ready; False: the one that came first

    def __init__(self) -> None:
        self.handles: dict[tuple[str, str | None], T] = {}  # version None: the default
        self.splits: dict[str, TrafficSplit[T]] = {}
        self.expected: frozenset[str] = frozenset()  # names that a start is about to load
        self._set: set[str] = set()  # names whose default was set

    # ---- changes: each is atomic for requests

    def add(self, handle: T) -> None:
        """Adds a version. Raises the error of `duplicate`."""
        key = (handle.name, handle.version)
        if key in self.handles:
            raise self.duplicate(handle)
        self.handles[key] = handle
        self._elect(handle.name)

    def _elect(self, name: str) -> None:
        """Chooses the default, unless it was set."""
        versions = list(self.versions(name).values())
        if self.newest and name not in self._set:
            self.handles[(name, None)] = max(versions, key=lambda h: version_order(h.version))
        else:
            self.handles.setdefault((name, None), versions[0])

    def replace(self, old: T, new: T) -> None:
        """`new` takes over all requests of `old`."""
        name = old.name
        assert (name, old.version) == (new.name, new.version)
        assert self.handles[(name, old.version)] is old
        self.handles[(name, old.version)] = new
        if self.handles[(name, None)] is old:
            self.handles[(name, None)] = new
        if name in self.splits:
            self.splits[name].replace(old, new)

    def remove(self, handle: T) -> None:
        """Removes a version. Another one replaces a removed default, and the others share its traffic.

        Idempotent: a failed load and an unload may both remove a handle.
        """
        name = handle.name
        if self.handles.get((name, handle.version)) is not handle:
            return
        del self.handles[(name, handle.version)]
        others = self.versions(name)
        if self.handles[(name, None)] is handle:
            del self.handles[(name, None)]
            self._set.discard(name)
            if others:
                self._elect(name)
        split = self.splits.pop(name, None)
        if split is not None:
            weights = {v: w for v, w in split.weights.items() if v != handle.version}
            total = sum(weights.values())
            if total > 0:
                self.splits[name] = TrafficSplit({v: w / total for v, w in weights.items()}, others)

    def set_default(self, name: str, version: str) -> None:
        """Sends all requests without a version to this one. Raises ModelNotFound."""
        self.handles[(name, None)] = self.find(name, version)
        self._set.add(name)
        self.splits.pop(name, None)

    def unset_default(self, name: str) -> None:
        """Sends the requests without a version to the newest one again."""
        self._set.discard(name)
        self._elect(name)

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Splits requests without a version by weight. Raises ModelNotFound, ConfigError."""
        for version in (None, *weights):
            self.find(name, version)
        others = self.versions(name)
        self.check_weights(name, weights)
        self.splits[name] = TrafficSplit(weights, others)

    # ---- lookups

    def route(self, name: str, version: str | None) -> T:
        """The handle for the next request. Raises ModelNotFound."""
        if version is None and self.splits:
            split = self.splits.get(name)
            if split is not None:
                return split.next()
        return self.find(name, version)

    def get(self, name: str, version: str) -> T | None:
        return self.handles.get((name, version))

    def find(self, name: str, version: str | None) -> T:
        """The handle of the version, or of the default. Raises the error of `unknown`."""
        handle = self.handles.get((name, version))
        if handle is None:
            raise self.unknown(name, version)
        if version is None and self.newest and name not in self._set and not handle.ready:
            versions = self.versions(name).values()
            handle = max(versions, key=lambda h: (h.ready, version_order(h.version)))
        return handle

    def holds_default(self, handle: T) -> bool:
        """Whether requests without a version wait for this one, ready or not."""
        chosen = handle.name in self._set and handle.name not in self.splits
        return chosen and self.handles[(handle.name, None)] is handle

    def share(self, handle: T) -> tuple[bool, float]:
        """(is the default, share of the requests without a version)."""
        default = (handle.name, None) in self.handles and self.find(handle.name, None) is handle
        split = self.splits.get(handle.name)
        return default, float(default) if split is None else split.weights.get(handle.version, 0.0)

    def versions(self, name: str) -> dict[str, T]:
        """Version -> handle for a name, in the order in which they were added."""
        return {h.version: h for h in self if h.name == name}

    def __iter__(self) -> Iterator[T]:
        return iter([h for (_, version), h in self.handles.items() if version is not None])

    # ---- rules and texts, which TorchServe's registry overrides

    def duplicate(self, handle: T) -> PenstockError:
        """The error for a version that is already loaded."""
        return ConfigError(f"model '{handle.name}' version '{handle.version}' is already loaded; unload it first")

    def unknown(self, name: str, version: str | None) -> PenstockError:
        """The error for an unknown model or version; it lists the known names."""
        if name in self.expected:
            return ModelNotReady(f"model '{name}' is about to be loaded")
        versions = self.versions(name)
        if version is not None and versions:
            known = ", ".join(versions)
            return ModelNotFound(f"version '{version[:100]}' of model '{name}' is not found; it has {known}")
        return ModelNotFound(f"model '{name}' is not found{nearest(name, sorted({h.name for h in self}))}")

    def check_weights(self, name: str, weights: Mapping[str, float]) -> None:
        """Raises ConfigError for weights that are no traffic split."""
        check_traffic(f"traffic of model '{name}'", weights, self.versions(name))


def holder(registry: ModelRegistry[ModelHandle], handle: ModelHandle, sequence: SequenceRequest | None) -> ModelHandle:
    """The version on which a sequence is in progress, else `handle`."""
    if sequence is None or sequence.start:
        return handle
    others = registry.versions(handle.name).values()
    return next((h for h in others if h.sequences is not None and sequence.id in h.sequences), handle)
