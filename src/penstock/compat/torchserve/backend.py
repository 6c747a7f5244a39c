"""ModelsBackend: what TorchServe's front-ends submit to. The engine, with TorchServe's versions, texts and tickets."""

from __future__ import annotations

from collections.abc import Callable

from penstock.compat.torchserve.models import Models, Version
from penstock.engine.call import Call, release
from penstock.engine.engine import Engine
from penstock.errors import ModelNotFound, ModelNotReady, QueueFull
from penstock.protocols.torchserve.api import ApiError
from penstock.types import Item, ModelMetadata, ModelStatus, Sink
from penstock.wire.slabs import Slab

_NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence"
    " inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)


class ModelsBackend:
    """See `frontends.base.Backend`. Errors of `submit` are ApiErrors, but for a deadline that has passed."""

    def __init__(self, engine: Engine, models: Models) -> None:
        self._engine = engine
        self._models = models

    def submit(
        self,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Call:
        """Queues one item for the version, else for the default one or the one whose turn it is."""
        try:
            found = self._models.route(model, version)
            if found.handle is None or (found.plan.settings.use_job_ticket and not _has_ticket(found)):
                raise _no_worker(model, version)
        except BaseException:
            release(item)
            raise
        try:
            return self._engine.submit(model, found.version, item, sink, budget_s=budget_s, priority=priority)
        except (ModelNotFound, ModelNotReady, QueueFull) as e:
            raise _no_worker(model, version, e.message) from e

    def ready(self) -> bool:
        """False if the default version of some model has fewer workers than it should, and while draining."""
        return not self._engine.draining and all(version.healthy for version in self._models.defaults())

    def model_ready(self, model: str, version: str | None) -> bool:
        """Raises ApiError."""
        return self._models.find(model, version).ready and not self._engine.draining

    def metadata(self, model: str, version: str | None) -> tuple[ModelMetadata, list[str]]:
        """Raises ApiError."""
        found = self._models.find(model, version)
        versions = [v.version for v in self._models.versions(model)]
        if found.handle is None or found.handle.metadata is None:
            raise _no_worker(model, version)
        return found.handle.metadata, versions

    def statuses(self) -> list[ModelStatus]:
        """Of those versions that have workers."""
        return self._engine.statuses()

    def allocate(self, nbytes: int) -> Slab | None:
        return self._engine.allocate(nbytes)

    def when_free(self, wake: Callable[[], None]) -> None:
        self._engine.when_free(wake)


def _has_ticket(version: Version) -> bool:
    """A worker is idle: with useJobTicket no request waits."""
    return version.handle is not None and version.handle.pending < version.handle.up


def _no_worker(model: str, version: str | None, detail: str = "") -> ApiError:
    named = f'Model "{model}"' if version is None else f'Model "{model}" Version {version}'
    return ApiError("ServiceUnavailableException", f"{named} {_NO_WORKER}", detail=detail)
