"""The Backend of TorchServe's listeners: the engine with TorchServe's versions, error texts and job tickets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.core.contracts import Ticket
from penstock.core.engine.calls import release
from penstock.core.engine.engine import Engine
from penstock.core.engine.handle import ModelHandle
from penstock.core.wire.slabs import Slab
from penstock.errors import PenstockError
from penstock.torchserve.admin.models import VersionRegistry, submit_error
from penstock.torchserve.metrics.observer import UNVERSIONED
from penstock.torchserve.protocol.api import no_worker
from penstock.torchserve.protocol.codec import WORKFLOW
from penstock.torchserve.sequence_headers import sequence_headers
from penstock.types import Item, ItemResult, ModelMetadata, ModelStatus, Sink

if TYPE_CHECKING:
    from penstock.torchserve.admin.workflows import Workflows


class ModelsBackend:
    """See `Backend` in core/contracts.py. `submit` raises ApiError, except for an expired deadline.

    `build_components` sets `workflows`.
    """

    workflows: Workflows

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
        versions = [v.version for v in self._models.versions(model)]
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
