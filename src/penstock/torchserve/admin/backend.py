"""ModelsBackend: what TorchServe's front-ends submit to. The engine, with TorchServe's versions, texts and tickets."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.contracts import Ticket
from penstock.core.engine.batcher import release
from penstock.core.engine.engine import Engine
from penstock.core.wire.slabs import Slab
from penstock.errors import PenstockError
from penstock.torchserve.admin.holding import Held, no_worker, refusal
from penstock.torchserve.admin.models import Models, Version
from penstock.torchserve.metrics.observer import UNVERSIONED
from penstock.types import Item, ModelMetadata, ModelStatus, Sink


class ModelsBackend:
    """See `frontends.base.Backend`. Errors of `submit` are ApiErrors, but for a deadline that has passed."""

    def __init__(self, engine: Engine, models: Models) -> None:
        self._engine = engine
        self._models = models
        self.asked: dict[tuple[str, str], int] = {}  # requests that came for a model, and a version or none

    def submit(
        self,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Queues one item for the version, else for the default one or the one whose turn it is; while its first
        workers load it waits for them."""
        try:
            found = self._models.route(model, version)
            label = version or UNVERSIONED
            self.asked[model, label] = self.asked.get((model, label), 0) + 1
            if found.handle is None or (found.plan.settings.use_job_ticket and not _has_ticket(found)):
                raise no_worker(model, version)
            if found.loading:
                if len(found.held) >= found.plan.settings.job_queue_size:
                    raise no_worker(model, version, "as many requests wait for its first worker as may")
                held = Held(item, sink, budget_s, priority, (model, version))
                found.held.append(held)
                return held
        except BaseException:
            release(item)
            raise
        try:
            call = self._engine.submit(model, found.version, item, sink, budget_s=budget_s, priority=priority)
            call.label = label
            return call
        except PenstockError as e:
            raise refusal(e, model, version) from e

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
            raise no_worker(model, version)
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
