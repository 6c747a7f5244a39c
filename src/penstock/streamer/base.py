"""What all streamers share: calls from threads, greenlets and coroutines, on one portal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

from penstock.core.engine.inbox import PortalBackend
from penstock.core.engine.portal import Portal
from penstock.core.engine.waiters import Future, all_items, every_item
from penstock.errors import DeadlineExceeded
from penstock.streamer.errors import tell, told
from penstock.types import ItemResult

WORKER_MODULES = (
    "penstock.core.transports.child",
)  # what the `__main__` of a worker process is while it loads a model


class StreamerBackend(PortalBackend, Protocol):
    """What stands behind a streamer."""

    async def ready(self) -> None:
        """Returns when requests are answered. Raises why they are not."""
        ...


class _Streamer:
    """One model for the threads of a program. `worker_timeout` bounds `predict`, in seconds; None: nothing does."""

    def __init__(self, portal: Portal, model: str, worker_timeout: float | None) -> None:
        self._portal = portal
        self._model = model
        self._worker_timeout = worker_timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy_workers()

    def predict(
        self,
        batch: Iterable[Any],
        *,
        priority: int = 0,
        deadline: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """The results of the items of `batch`, in order. The items share batches with those of other calls.

        `deadline`: seconds from now, after which it is no use. `priority` 0, 1, 2 ...: the higher, the longer it may
        wait for others. Raises the error of the first item that failed; with `return_exceptions` errors stand in the
        place of results. Raises DeadlineExceeded, a TimeoutError, after `worker_timeout`; QueueFull at once.
        """
        items = _listed(batch)
        timeout_s = _shorter(self._worker_timeout, deadline)
        try:
            values = self._portal.predict(
                self._model,
                items,
                budget_s=deadline,
                priority=_class(priority),
                timeout_s=timeout_s,
                return_exceptions=True,
            )
        except Exception as e:
            tell(self._excused(e))
        return _told_all(values) if return_exceptions else _or_raise(values)

    def submit(self, batch: Iterable[Any], *, priority: int = 0, deadline: float | None = None) -> Future:
        """A future of what `predict` returns or raises; it can be awaited too. Only `deadline` bounds its wait."""
        return self._submit(_listed(batch), priority, deadline, _all_told)

    async def apredict(
        self,
        batch: Iterable[Any],
        *,
        priority: int = 0,
        deadline: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """`predict` for coroutines: the loop goes on meanwhile. A cancelled call leaves the queue."""
        future = self._submit(_listed(batch), priority, deadline, _every_told if return_exceptions else _all_told)
        timeout_s = _shorter(self._worker_timeout, deadline)
        try:
            async with asyncio.timeout(timeout_s) as bound:
                values: list[Any] = await future
        except TimeoutError:
            if not bound.expired():
                raise
            tell(self._excused(DeadlineExceeded(f"there was no answer within {timeout_s:g} s")))
        return values

    def _submit(self, items: list[Any], priority: int, deadline: float | None, convert: Any) -> Future:
        if not items:
            future = Future(lambda *_: None, convert)
            future(ItemResult([]))
            return future
        return self._portal.submit_many(
            self._model, items, budget_s=deadline, priority=_class(priority), convert=convert
        )

    def statistics(self) -> dict[str, object]:
        """What has been learned of the model, and done with its requests."""
        return self._portal.statistics(self._model)

    def destroy_workers(self) -> None:
        """Answers what was accepted, at most for `worker_timeout`, and ends the workers. Idempotent."""
        self._portal.close(30.0 if self._worker_timeout is None else self._worker_timeout)

    def _wait_for_worker_ready(self, timeout: float | None = None) -> None:
        """Returns when the workers are ready. Raises what their model raised; DeadlineExceeded after `timeout`, without
        one after `worker_timeout`."""

        async def ready(backend: StreamerBackend) -> None:
            await backend.ready()

        try:
            self._portal.call(ready, timeout_s=self._worker_timeout if timeout is None else timeout)
        except Exception as e:
            tell(self._excused(e))

    def _loading(self) -> bool:
        """Whether the model is being loaded: known where the workers are the streamer's own."""
        return False

    def _excused(self, error: Exception) -> Exception:
        """The error, with the reason of a timeout if it is known."""
        if isinstance(error, DeadlineExceeded) and self._loading():
            return DeadlineExceeded(f"{error.message}: the model is still being loaded", detail=error.detail)
        return error


def in_worker() -> bool:
    """Whether this process is a worker that is loading a model.

    A streamer that the model's module makes at import must not start workers there, which would import it again.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name in WORKER_MODULES


def _listed(batch: Iterable[Any]) -> list[Any]:
    if type(batch) is list:
        return batch
    if isinstance(batch, (str, bytes, bytearray, memoryview, Mapping)):
        raise TypeError(f"expected a list of items, found one {type(batch).__name__}: write predict([x])")
    return list(batch)


def _class(priority: int) -> int:
    if priority < 0:
        raise ValueError(f"priority: expected 0 or more, found {priority}")
    return priority


def _shorter(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)


def _or_raise(values: list[Any]) -> list[Any]:
    for value in values:
        if isinstance(value, Exception):
            tell(value)
    return values


def _told_all(values: list[Any]) -> list[Any]:
    return [told(value) if isinstance(value, Exception) else value for value in values]


def _every_told(result: ItemResult) -> list[Any]:
    if result.error is not None:
        raise told(result.error)
    return _told_all(every_item(result))


def _all_told(result: ItemResult) -> list[Any]:
    if result.error is not None:
        raise told(result.error)
    return all_items(ItemResult(_told_all(result.body)))
