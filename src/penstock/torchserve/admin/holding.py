"""Requests that come while the first workers of a version load: TorchServe keeps them in its queue, so they wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.core.engine.batcher import Call, release
from penstock.errors import ModelNotFound, ModelNotReady, PenstockError, QueueFull
from penstock.torchserve.metrics.observer import UNVERSIONED
from penstock.torchserve.protocol.api import ApiError
from penstock.types import Item, ItemResult, Sink

_NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence"
    " inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"
)

Submit = Callable[[Item, Sink, float | None, int], Call]


class Held:
    """One request that waits; `named` are model and version as its client named them."""

    def __init__(
        self, item: Item, sink: Sink, budget_s: float | None, priority: int, named: tuple[str, str | None]
    ) -> None:
        self._item, self._sink, self._priority, self._named = item, sink, priority, named
        self._deadline_s = None if budget_s is None else time.monotonic() + budget_s
        self._call: Call | None = None
        self._over = False

    def cancel(self) -> None:
        """See `frontends.base.Ticket`."""
        if self._call is not None:
            self._call.cancel()
        elif not self._over:
            self._over = True
            release(self._item)

    def go(self, submit: Submit) -> None:
        """The wait is over, well or not: queued by the engine, or answered with its refusal."""
        if self._over:
            return
        self._over = True
        left_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
        try:
            self._call = submit(self._item, self._sink, left_s, self._priority)
            self._call.label = self._named[1] or UNVERSIONED
        except PenstockError as e:
            self._sink(ItemResult(error=refusal(e, *self._named)))


def refusal(error: PenstockError, model: str, version: str | None) -> PenstockError:
    """What the engine refused a request with, as TorchServe's clients know it."""
    if isinstance(error, (ModelNotFound, ModelNotReady, QueueFull)):
        return no_worker(model, version, error.message)
    return error


def no_worker(model: str, version: str | None, detail: str = "") -> ApiError:
    """That nobody can answer: there are no workers, or the queue is full."""
    named = f'Model "{model}"' if version is None else f'Model "{model}" Version {version}'
    return ApiError("ServiceUnavailableException", f"{named} {_NO_WORKER}", detail=detail)
