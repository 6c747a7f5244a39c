"""Models: names and versions as TorchServe knows them. A version may have no workers: the engine knows nothing of it.

Lookups raise ApiError with TorchServe's texts; they happen once a request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.registry import TrafficSplit
from penstock.torchserve.admin.holding import Held
from penstock.torchserve.admin.plan import Plan
from penstock.torchserve.archive.store import UnpackedArchive
from penstock.torchserve.protocol.api import ApiError

MOST_SHOWN = 100  # characters of a name that the client sent


class Version(Struct, eq=False):
    """One registered version. `handle` is None while it has no workers.

    `settled` is how many workers the last change that ended left it: fewer live ones are a fault. `lock` is held by
    the change under way; `gone` is set when it was unregistered.
    """

    plan: Plan
    files: UnpackedArchive
    min_workers: int
    max_workers: int
    at_startup: bool = False
    handle: ModelHandle | None = None
    loading: bool = False  # the handle is not in the engine's sight yet
    settled: int = 0
    gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    held: list[Held] = field(default_factory=list)  # requests that came while it was loading
    ids: dict[int, int] = field(default_factory=dict)  # slot -> the worker's id

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def version(self) -> str:
        return self.plan.version

    @property
    def up(self) -> int:
        """Workers that are up."""
        return 0 if self.handle is None else self.handle.up

    @property
    def ready(self) -> bool:
        """True while a worker is up to answer."""
        return self.handle is not None and self.handle.ready

    @property
    def healthy(self) -> bool:
        """False if fewer workers are up than there should be."""
        return self.up >= min(self.settled, self.min_workers)


class _Model(Struct, eq=False):
    """The versions of one name, in the order of their registration."""

    versions: dict[str, Version]
    default: Version
    split: TrafficSplit[Version] | None = None


class Models:
    """Every registered version by name and version, and which one answers a request that names none."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    # ---- changes: each is one step, no request sees the half of it

    def add(self, version: Version) -> None:
        """The first version of a name is its default. Raises ApiError if it is registered already."""
        model = self._models.get(version.name)
        if model is None:
            self._models[version.name] = _Model({version.version: version}, version)
        elif version.version in model.versions:
            raise ApiError(
                "ConflictStatusException",
                f"Model version {version.version} is already registered for model {version.name}",
            )
        else:
            model.versions[version.version] = version

    def check_removal(self, version: Version) -> None:
        """Raises ApiError if it is the default while there are others."""
        model = self._models[version.name]
        if model.default is version and len(model.versions) > 1:
            raise ApiError("InvalidModelVersionException", f"Cannot remove default version for model {version.name}")

    def remove(self, version: Version) -> None:
        """Takes it out of sight; the others share its traffic. A default that failed to start gives way to the oldest
        of the others. Idempotent."""
        model = self._models.get(version.name)
        version.gone = True
        if model is None or model.versions.get(version.version) is not version:
            return
        del model.versions[version.version]
        if not model.versions:
            del self._models[version.name]
            return
        if model.default is version:
            model.default = next(iter(model.versions.values()))
        if model.split is not None:
            weights = {v: w for v, w in model.split.weights.items() if v != version.version}
            model.split = TrafficSplit(weights, model.versions) if any(weights.values()) else None

    def set_default(self, name: str, version: str) -> None:
        """Requests that name no version go to this one, all of them."""
        self.find(name, None)
        found = self._models[name].versions.get(version)
        if found is None:
            told = f"Model version {version[:MOST_SHOWN]} does not exist for model {name}"
            raise ApiError("ModelVersionNotFoundException", told)
        self._models[name].default, self._models[name].split = found, None

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Requests that name no version are shared out by these weights, at least one of them above 0."""
        for version in (None, *weights):
            self.find(name, version)
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise ApiError(
                "BadRequestException", f"weights: found {weights}, expected numbers from 0, at least one of them above"
            )
        model = self._models[name]
        model.split = TrafficSplit(weights, model.versions)

    # ---- lookups

    def route(self, name: str, version: str | None) -> Version:
        """Who answers the next request."""
        if version is None:
            model = self._models.get(name)
            if model is not None:
                return model.default if model.split is None else model.split.next()
        return self.find(name, version)

    def find(self, name: str, version: str | None) -> Version:
        """The version, or the default."""
        model = self._models.get(name)
        if model is None:
            raise ApiError("ModelNotFoundException", f"Model not found: {name[:MOST_SHOWN]}")
        if version is None:
            return model.default
        found = model.versions.get(version)
        if found is None:
            raise ApiError(
                "ModelVersionNotFoundException",
                f"Model version: {version[:MOST_SHOWN]} does not exist for model: {name}",
            )
        return found

    def versions(self, name: str) -> list[Version]:
        """All versions of a model, the oldest first."""
        self.find(name, None)
        return list(self._models[name].versions.values())

    def defaults(self) -> list[Version]:
        """The default version of every model, by name."""
        return [self._models[name].default for name in sorted(self._models)]

    def is_default(self, version: Version) -> bool:
        """True if requests that name no version go to it, but for a split."""
        return self._models[version.name].default is version

    def weight(self, version: Version) -> float | None:
        """Its weight among the requests that name no version; None if they are not shared out."""
        split = self._models[version.name].split
        return None if split is None else split.weights.get(version.version)

    def __iter__(self) -> Iterator[Version]:
        return iter([version for model in self._models.values() for version in model.versions.values()])
