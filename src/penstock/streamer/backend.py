"""LocalBackend: an Engine with one model that loads in the background while requests wait for it.

All of it runs on the portal's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.backoff import Backoff
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.arrays import nbytes_of
from penstock.core.contracts import Observer, Ticket
from penstock.core.engine.admission import AdmissionQueue
from penstock.core.engine.engine import Engine
from penstock.errors import ModelNotReady, PenstockError, QueueFull, describe
from penstock.streamer.base import ChunkingBackend
from penstock.types import Item, Sink

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
        self._pending = AdmissionQueue()
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
        waiting = self._pending
        if waiting.rows + item.rows > self.max_queue or waiting.nbytes + nbytes > most:
            items = f"{waiting.rows} of {self.max_queue} items, {waiting.nbytes} of {most} bytes"
            found = f"{items} wait for the model to load"
            raise QueueFull(f"the queue is full ({found}): try again later")
        return waiting.add(item, sink, nbytes=nbytes)

    def _release_pending(self) -> None:
        """Submits the waiting requests to the engine, or fails them if loading failed."""
        if self._failure is None:
            self._pending.forward(partial(self._engine.submit, self._name, None))
        else:
            self._pending.fail(self._failure)

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
