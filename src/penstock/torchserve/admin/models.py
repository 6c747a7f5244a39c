"""The registered model versions, and the Backend of TorchServe's listeners, which sends requests to them.

A version may have no workers; the engine does not know such a version. Lookups raise ApiError with TorchServe's texts
and happen once per request.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Protocol

from msgspec import Struct, field

from penstock.core.contracts import Ticket
from penstock.core.engine.admission import AdmissionQueue
from penstock.core.engine.calls import release
from penstock.core.engine.engine import Engine
from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.registry import ModelRegistry
from penstock.core.wire.slabs import Slab
from penstock.errors import ModelNotFound, ModelNotReady, PenstockError, QueueFull
from penstock.torchserve import sequence_headers
from penstock.torchserve.admin.model_spec import ModelSpec, VersionRequest
from penstock.torchserve.archive.store import UnpackedArchive
from penstock.torchserve.metrics.observer import UNVERSIONED
from penstock.torchserve.protocol.api import MAX_SHOWN, ApiError, no_worker
from penstock.torchserve.protocol.codec import WORKFLOW
from penstock.types import Item, ItemResult, ModelMetadata, ModelStatus, Sink


class WorkflowRequests(Protocol):
    """The part of Workflows that takes requests; see there."""

    def submit(self, name: str, item: Item, sink: Sink) -> Ticket: ...

    def ready(self, name: str) -> bool: ...


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
    name: str = ""  # the specification's, also of a later one
    version: str = ""

    def __post_init__(self) -> None:
        self.name, self.version = self.spec.name, self.spec.version

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


class VersionRegistry(ModelRegistry[ModelVersion]):
    """Every registered version by name and version, and the version that serves requests without one."""

    newest: ClassVar = False  # as in TorchServe
    opening = 0  # startup archives that are not open yet, whose names are therefore unknown

    def duplicate(self, handle: ModelVersion) -> ApiError:
        text = f"Model version {handle.version} is already registered for model {handle.name}"
        return ApiError("ConflictStatusException", text)

    def unknown(self, name: str, version: str | None) -> ApiError:
        self.check_complete()
        if version is None or (name, None) not in self.handles:
            return ApiError("ModelNotFoundException", f"Model not found: {name[:MAX_SHOWN]}")
        text = f"Model version: {version[:MAX_SHOWN]} does not exist for model: {name}"
        return ApiError("ModelVersionNotFoundException", text)

    def check_weights(self, name: str, weights: Mapping[str, float]) -> None:
        """Any weights from 0, of which one is above 0."""
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            text = f"weights: found {weights}, expected numbers from 0, at least one above 0"
            raise ApiError("BadRequestException", text)

    def remove(self, handle: ModelVersion) -> None:
        handle.gone = True
        super().remove(handle)

    def check_removal(self, version: ModelVersion) -> None:
        """Raises ApiError for the default version while the model has other versions."""
        if self.find(version.name, None) is version and len(self.versions(version.name)) > 1:
            raise ApiError("InvalidModelVersionException", f"Cannot remove default version for model {version.name}")

    def set_default(self, name: str, version: str) -> None:
        self.find(name, None)
        if (name, version) not in self.handles:
            text = f"Model version {version[:MAX_SHOWN]} does not exist for model {name}"
            raise ApiError("ModelVersionNotFoundException", text)
        super().set_default(name, version)

    def check_complete(self) -> None:
        """Raises ApiError while archives are opened: TorchServe opens all of them before it listens."""
        if self.opening:
            text = f"The server is opening {self.opening} more of its archives. Please try again later."
            raise ApiError("ServiceUnavailableException", text)

    def only(self) -> str:
        """The name of the only model that was loaded at startup. Raises ApiError if there are none or several."""
        self.check_complete()
        names = {version.name for version in self if version.at_startup}
        if len(names) != 1:
            raise ApiError("BadRequestException", "Parameter model_name is required.")
        return names.pop()

    def all_of(self, name: str) -> list[ModelVersion]:
        """All versions of a model, oldest first."""
        self.find(name, None)
        return list(self.versions(name).values())

    def defaults(self) -> list[ModelVersion]:
        """The default version of every model, by name."""
        return [self.handles[name, None] for name in sorted({version.name for version in self})]


# ---- requests


class ModelsBackend:
    """See `Backend` in core/contracts.py. `submit` raises ApiError, except for an expired deadline.

    `build_components` sets `workflows`.
    """

    workflows: WorkflowRequests

    def __init__(self, engine: Engine, models: VersionRegistry) -> None:
        self._engine = engine
        self._models = models
        self._requests: dict[tuple[str, str], int] = {}

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        """Queues one item. Without a version, the default or the traffic split decides. While the first workers load,
        the item waits for them. A name that begins with WORKFLOW is a workflow's; "" is the only model of the start."""
        if WORKFLOW in model:
            return self.workflows.submit(model[1:], item, sink)
        try:
            model = model or self._models.only()
            found = self._models.route(model, version)
            label = version or UNVERSIONED
            self._requests[model, label] = self._requests.get((model, label), 0) + 1
            handle = found.handle
            # with useJobTicket, no request waits in the queue
            if handle is None or (found.spec.settings.use_job_ticket and handle.pending >= handle.instances.up):
                raise no_worker(model, version)
            if found.spec.settings.sequence_batching:
                sink = partial(_end_named, handle, sink)
            if found.loading:
                if len(found.pending) >= found.spec.settings.job_queue_size:
                    raise no_worker(model, version, "the queue for the first worker is full")
                request = found.pending.add(item, sink, explain=lambda error: submit_error(error, model, version))
                request.label = label
                return request
        except BaseException:
            release(item)
            raise
        try:
            call = self._engine.submit(model, found.version, item, sink)
            call.label = label
            return call
        except PenstockError as e:
            raise submit_error(e, model, version) from e

    def take_requests(self) -> dict[tuple[str, str], int]:
        """(model, requested version or UNVERSIONED) -> number of requests since the last call."""
        found, self._requests = self._requests, {}
        return found

    def ready(self) -> bool:
        """False while draining, and if the default version of any model has fewer workers than expected."""
        return not self._engine.draining and all(version.healthy for version in self._models.defaults())

    def model_ready(self, model: str, version: str | None) -> bool:
        """Raises ApiError."""
        if WORKFLOW in model:
            return self.workflows.ready(model[1:])
        return self._models.find(model or self._models.only(), version).ready and not self._engine.draining

    def metadata(self, model: str, version: str | None) -> tuple[ModelMetadata, list[str]]:
        """Raises ApiError."""
        found = self._models.find(model, version)
        versions = list(self._models.versions(model))
        if found.handle is None or found.handle.metadata is None:
            raise no_worker(model, version)
        return found.handle.metadata, versions

    def statuses(self) -> list[ModelStatus]:
        return self._engine.statuses()

    def allocate(self, nbytes: int) -> Slab | None:
        return self._engine.allocate(nbytes)

    def when_free(self, wake: Callable[[], None]) -> None:
        self._engine.when_free(wake)


def _end_named(handle: ModelHandle, sink: Sink, result: ItemResult) -> None:
    """Ends the sequences that the handler named, divided by ";", in the header for it; then delivers the result."""
    name, sequences = sequence_headers()[2].decode().lower(), handle.sequences
    if sequences is not None:
        for id in [id for key, ids in result.headers or () if key.lower() == name for id in ids.split(";")]:
            sequences.end(id.strip())
    sink(result)


def submit_error(error: PenstockError, model: str, version: str | None) -> PenstockError:
    """The engine's error as TorchServe's clients know it."""
    if isinstance(error, (ModelNotFound, ModelNotReady, QueueFull)):
        return no_worker(model, version, error.message)
    return error
