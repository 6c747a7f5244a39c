"""LocalBackend: an Engine with one model that loads in the background while requests wait for it.

All of it runs on the portal's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.backoff import Backoff
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.arrays import nbytes_of
from penstock.core.contracts import Observer, Ticket
from penstock.core.engine.engine import Engine
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, describe
from penstock.streamer.base import ChunkingBackend
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.streamer")

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 30.0


class LocalBackend(ChunkingBackend, Observer):
    """The backend of a streamer with its own workers. At most `max_queue` items wait.

    The first worker that is ready answers; the others join it when they have loaded. When loading fails, every waiting
    request fails, and so do requests of the next 0.1 s, 0.2 s ... 30 s; the first request after that period starts
    another load.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        target: Any,
        sys_path: Sequence[str],
        max_queue: int,
        limits: LimitsConfig,
        log_level: str = "",
    ) -> None:
        """`log_level`: see Engine."""
        self._name, self._config, self._target, self._sys_path = name, config, target, sys_path
        self.max_queue, self.max_queue_bytes = max_queue, limits.max_queue_bytes
        self._engine = Engine(limits, [self], log_level)
        self._pending: dict[_PendingRequest, None] = {}  # in order of arrival
        self._pending_rows = self._pending_bytes = 0
        self._failure: PenstockError | None = None
        self._backoff, self._retry_at_s = Backoff(FIRST_RETRY_S, LAST_RETRY_S), 0.0
        self._start_loading()

    def _start_loading(self) -> None:
        self._loaded, self._failure = False, None
        self._load_task = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        try:
            await self._engine.load(self._name, self._config, target=self._target, sys_path=self._sys_path)
        except Exception as e:
            error = e if isinstance(e, PenstockError) else PenstockError(f"internal error: {describe(e)}")
            if not isinstance(error, ModelNotReady):  # the streamer was destroyed
                log.warning(
                    "load_failed model=%s error=%s: its callers get an error\n%s", self._name, error, error.detail
                )
            self._loaded, self._failure = False, error
            self._retry_at_s = time.monotonic() + self._backoff.next_s()
            self._release_pending()
        else:
            self._serve()

    def on_worker(self, model: str, version: str, slot: int, state: str) -> None:
        if state == "ready" and not self._loaded:
            asyncio.get_running_loop().call_soon(self._serve)  # the engine is not ready before this hook returns

    def _serve(self) -> None:
        if self._failure is None:
            self._loaded = True
            self._backoff.reset()
            self._release_pending()

    def _retry_if_due(self) -> None:
        """Starts another load after a failed one. Raises the failure while the retry is not due."""
        if self._failure is not None:
            if time.monotonic() < self._retry_at_s:
                raise self._failure.with_traceback(None)
            self._start_loading()

    @property
    def loading(self) -> bool:
        return not self._load_task.done()

    async def ready(self) -> None:
        """Waits until every worker has loaded the model or failed. Raises the failure if none is ready."""
        self._retry_if_due()
        await asyncio.shield(self._load_task)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def submit_within_bounds(self, item: Item, sink: Sink) -> Ticket:
        """Submits to the engine, or keeps the request until the model is loaded."""
        if self._loaded:
            return self._engine.submit(self._name, None, item, sink)
        self._retry_if_due()
        nbytes, most = nbytes_of(item.payload), self.max_queue_bytes
        if self._pending_rows + item.rows > self.max_queue or self._pending_bytes + nbytes > most:
            items = f"{self._pending_rows} of {self.max_queue} items, {self._pending_bytes} of {most} bytes"
            found = f"{items} wait for the model to load"
            raise QueueFull(f"the queue is full ({found}): try again later")
        request = _PendingRequest(self._forget_pending, item, sink)
        self._pending[request] = None
        self._pending_rows += item.rows
        self._pending_bytes += nbytes
        return request

    def _forget_pending(self, request: _PendingRequest) -> None:
        if request in self._pending:
            del self._pending[request]
            self._pending_rows -= request.item.rows
            self._pending_bytes -= nbytes_of(request.item.payload)

    def _release_pending(self) -> None:
        """Submits the waiting requests to the engine, or fails them if loading failed."""
        pending, self._pending = self._pending, {}
        self._pending_rows = self._pending_bytes = 0
        for request in pending:
            request.release(self._engine, self._name, self._failure)

    def statistics(self, model: str) -> dict[str, object]:
        """See `PortalBackend.statistics`; empty until the model is loaded."""
        return self._engine.statistics(self._name) if self._loaded else {}

    async def close(self, drain_s: float) -> None:
        """See `PortalBackend.close`. Waits for loading to finish only if requests wait for the model."""
        end = time.monotonic() + drain_s
        if self._pending:
            await asyncio.wait([self._load_task], timeout=drain_s)
        await self._engine.close(max(0.0, end - time.monotonic()))
        self._failure = ModelNotReady("the streamer was destroyed")
        self._release_pending()

    def forget(self) -> None:
        self._engine.forget()


class _PendingRequest:
    """Ticket of a request that waits for the model to load."""

    def __init__(self, forget: Callable[[_PendingRequest], None], item: Item, sink: Sink) -> None:
        self.item = item
        self._forget, self._sink = forget, sink
        self._ticket: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None
        if item.budget_s is not None:
            self._timer = asyncio.get_running_loop().call_later(item.budget_s, self._expire)

    def cancel(self) -> None:
        self._stop_waiting()
        if self._ticket is not None:
            self._ticket.cancel()

    def release(self, engine: Engine, name: str, error: PenstockError | None) -> None:
        """Submits the request to the engine, or answers it with `error`."""
        if self._timer is not None:
            self.item.budget_s = self._timer.when() - asyncio.get_running_loop().time()
        self._stop_waiting()
        try:
            if error is not None:
                raise error
            self._ticket = engine.submit(name, None, self.item, self._sink)
        except PenstockError as e:
            self._sink(ItemResult(error=e.with_traceback(None)))

    def _expire(self) -> None:
        self._stop_waiting()
        self._sink(ItemResult(error=DeadlineExceeded("the deadline passed while the model was loading")))

    def _stop_waiting(self) -> None:
        self._forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
