"""The registered model versions, and the requests that wait for the first workers of a version.

A version may have no workers; the engine does not know such a version. Lookups raise ApiError with TorchServe's texts
and happen once per request.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from penstock.core.engine.admission import AdmissionQueue
from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.registry import TrafficSplit
from penstock.errors import ModelNotFound, ModelNotReady, PenstockError, QueueFull
from penstock.torchserve.admin.model_spec import ModelSpec, VersionRequest
from penstock.torchserve.archive.store import UnpackedArchive
from penstock.torchserve.protocol.api import ApiError, no_worker

MAX_SHOWN = 100  # characters of a client's name that a message shows


def submit_error(error: PenstockError, model: str, version: str | None) -> PenstockError:
    """The engine's error as TorchServe's clients know it."""
    if isinstance(error, (ModelNotFound, ModelNotReady, QueueFull)):
        return no_worker(model, version, error.message)
    return error


class ModelVersion(Struct, eq=False):
    """One registered version. `handle` is None without workers.

    `expected` is the number of workers after the last change; fewer live workers mean a fault. The change in progress
    holds `lock`. Unregistering sets `gone`.
    """

    spec: ModelSpec
    files: UnpackedArchive
    min_workers: int
    max_workers: int
    at_startup: bool = False
    handle: ModelHandle | None = None
    loading: bool = False  # the engine does not have the handle yet
    expected: int = 0
    gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending: AdmissionQueue = field(default_factory=AdmissionQueue)  # requests that arrived during loading
    worker_ids: dict[int, int] = field(default_factory=dict)  # slot -> id
    request: VersionRequest | None = None  # that registered it

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def version(self) -> str:
        return self.spec.version

    @property
    def up(self) -> int:
        """The number of live workers."""
        return 0 if self.handle is None else self.handle.instances.up

    @property
    def ready(self) -> bool:
        return self.handle is not None and self.handle.ready

    @property
    def healthy(self) -> bool:
        """False if fewer workers are live than expected."""
        return self.up >= min(self.expected, self.min_workers)


class _Model(Struct, eq=False):
    """The versions of one name, in the order of their registration."""

    versions: dict[str, ModelVersion]
    default: ModelVersion
    split: TrafficSplit[ModelVersion] | None = None


class VersionRegistry:
    """Every registered version by name and version, and the version that serves requests without one."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    # ---- changes: atomic, because no change awaits

    def add(self, version: ModelVersion) -> None:
        """The first version of a name becomes its default. Raises ApiError for a registered version."""
        model = self._models.setdefault(version.name, _Model({}, version))
        if version.version in model.versions:
            raise ApiError(
                "ConflictStatusException",
                f"Model version {version.version} is already registered for model {version.name}",
            )
        model.versions[version.version] = version

    def check_removal(self, version: ModelVersion) -> None:
        """Raises ApiError for the default version while the model has other versions."""
        model = self._models[version.name]
        if model.default is version and len(model.versions) > 1:
            raise ApiError("InvalidModelVersionException", f"Cannot remove default version for model {version.name}")

    def remove(self, version: ModelVersion) -> None:
        """Removes the version; the others share its traffic, and the oldest replaces a removed default. Idempotent."""
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
        """Sends all requests without a version to this version."""
        self.find(name, None)
        found = self._models[name].versions.get(version)
        if found is None:
            message = f"Model version {version[:MAX_SHOWN]} does not exist for model {name}"
            raise ApiError("ModelVersionNotFoundException", message)
        self._models[name].default, self._models[name].split = found, None

    def set_traffic(self, name: str, weights: Mapping[str, float]) -> None:
        """Splits requests without a version by weight; at least one weight is above 0."""
        for version in (None, *weights):
            self.find(name, version)
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise ApiError(
                "BadRequestException", f"weights: found {weights}, expected numbers from 0, at least one above 0"
            )
        self._models[name].split = TrafficSplit(weights, self._models[name].versions)

    # ---- lookups

    def only(self) -> str:
        """The name of the only model that was loaded at startup. Raises ApiError if there are none or several."""
        names = {version.name for version in self if version.at_startup}
        if len(names) != 1:
            raise ApiError("BadRequestException", "Parameter model_name is required.")
        return names.pop()

    def route(self, name: str, version: str | None) -> ModelVersion:
        """The version that serves the next request."""
        if version is None:
            model = self._models.get(name)
            if model is not None:
                return model.default if model.split is None else model.split.next()
        return self.find(name, version)

    def find(self, name: str, version: str | None) -> ModelVersion:
        """The version, or the default version."""
        model = self._models.get(name)
        if model is None:
            raise ApiError("ModelNotFoundException", f"Model not found: {name[:MAX_SHOWN]}")
        if version is None:
            return model.default
        found = model.versions.get(version)
        if found is None:
            raise ApiError(
                "ModelVersionNotFoundException",
                f"Model version: {version[:MAX_SHOWN]} does not exist for model: {name}",
            )
        return found

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions of a model, oldest first."""
        self.find(name, None)
        return list(self._models[name].versions.values())

    def defaults(self) -> list[ModelVersion]:
        """The default version of every model, by name."""
        return [self._models[name].default for name in sorted(self._models)]

    def is_default(self, version: ModelVersion) -> bool:
        return self._models[version.name].default is version

    def weight(self, version: ModelVersion) -> float | None:
        """Its share of the requests without a version; None without a traffic split."""
        split = self._models[version.name].split
        return None if split is None else split.weights.get(version.version)

    def __iter__(self) -> Iterator[ModelVersion]:
        return iter([version for model in self._models.values() for version in model.versions.values()])
