"""Pool: an Engine with one model that is loaded in the background. Requests that come before it is up wait for it.

All of it runs on the portal's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.config.schema import ModelConfig
from penstock.core.contracts import Ticket
from penstock.core.engine.engine import Engine
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, describe
from penstock.streamer.pieces import Pieces
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.streamer")

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 30.0


class Pool:
    """The backend of a streamer with workers of its own. At most `max_queue` items wait.

    A load that fails is told to everybody who waits for it, and to those who come in the next 0.1 s, 0.2 s ... 30 s;
    then the next request tries anew.
    """

    def __init__(self, name: str, config: ModelConfig, target: Any, sys_path: Sequence[str], max_queue: int) -> None:
        self._name, self._config, self._target, self._sys_path = name, config, target, sys_path
        self._max_queue = max_queue
        self._engine = Engine()
        self._early: dict[_Early, None] = {}  # in the order of their coming
        self._early_rows = 0
        self._failure: PenstockError | None = None
        self._retry_s, self._retry_at_s = FIRST_RETRY_S, 0.0
        self._begin()

    def _begin(self) -> None:
        self._up, self._failure = False, None
        self._loading = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        """Loads the model, then hands over who waited for it, or tells them why it cannot be loaded."""
        try:
            await self._engine.load(self._name, self._config, target=self._target, sys_path=self._sys_path)
        except Exception as e:
            error = e if isinstance(e, PenstockError) else PenstockError(f"internal error: {describe(e)}")
            log.warning("load_failed model=%s error=%s: its callers get an error\n%s", self._name, error, error.detail)
            self._failure = error
            self._retry_at_s = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        else:
            self._up = True
            self._retry_s = FIRST_RETRY_S
        self._flush()

    def _try_again(self) -> None:
        """Begins another load if the last one failed, and it is time. Raises why it failed, when it is not."""
        if self._failure is not None:
            if time.monotonic() < self._retry_at_s:
                raise self._failure.with_traceback(None)
            self._begin()

    @property
    def loading(self) -> bool:
        return not self._loading.done()

    async def ready(self) -> None:
        """See `StreamerBackend.ready`."""
        self._try_again()
        await asyncio.shield(self._loading)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    # ---- requests

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
        """See `PortalBackend.submit`. What is more than the queue may hold is sent in pieces."""
        if item.rows > self._max_queue:
            return Pieces(self._submit, item, sink, max(1, self._max_queue // 2), budget_s, priority)
        return self._submit(item, sink, budget_s, priority)

    def _submit(self, item: Item, sink: Sink, budget_s: float | None, priority: int) -> Ticket:
        if self._up:
            return self._engine.submit(self._name, None, item, sink, budget_s=budget_s, priority=priority)
        self._try_again()
        if self._early_rows + item.rows > self._max_queue:
            found = f"{self._early_rows} of {self._max_queue} items wait for the model to load"
            raise QueueFull(f"the queue is full ({found}): try again later")
        early = _Early(self._leave, item, sink, budget_s, priority)
        self._early[early] = None
        self._early_rows += item.rows
        return early

    def _leave(self, early: _Early) -> None:
        if early in self._early:
            del self._early[early]
            self._early_rows -= early.item.rows

    def _flush(self) -> None:
        """Hands those who waited to the engine, or tells them the failure."""
        early, self._early, self._early_rows = self._early, {}, 0
        for request in early:
            request.hand(self._engine, self._name, self._failure)

    # ---- the rest of a backend

    def statistics(self, model: str) -> dict[str, object]:
        """See `PortalBackend.statistics`; empty until the model is loaded."""
        return self._engine.statistics(self._name) if self._up else {}

    async def close(self, drain_s: float) -> None:
        """See `PortalBackend.close`. A load that goes on is waited for only if somebody waits for the model."""
        end = time.monotonic() + drain_s
        if self._early:
            await asyncio.wait([self._loading], timeout=drain_s)
        await self._engine.close(max(0.0, end - time.monotonic()))
        self._failure = ModelNotReady("the streamer was destroyed")
        self._flush()

    def forget(self) -> None:
        """See `PortalBackend.forget`."""
        self._engine.forget()


class _Early:
    """One request that waits for the model to be up. A Ticket."""

    def __init__(
        self, leave: Callable[[_Early], None], item: Item, sink: Sink, budget_s: float | None, priority: int
    ) -> None:
        self.item = item
        self._leave = leave
        self._sink = sink
        self._budget_s, self._priority = budget_s, priority
        self._came_s = time.monotonic()
        self._ticket: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None
        if budget_s is not None:
            self._timer = asyncio.get_running_loop().call_later(budget_s, self._expire)

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self._stop()
        if self._ticket is not None:
            self._ticket.cancel()

    def hand(self, engine: Engine, name: str, error: PenstockError | None) -> None:
        """Submits it to the engine, or tells it the error."""
        self._stop()
        budget_s = self._budget_s
        if budget_s is not None:
            budget_s -= time.monotonic() - self._came_s
        try:
            if error is not None:
                raise error
            self._ticket = engine.submit(name, None, self.item, self._sink, budget_s=budget_s, priority=self._priority)
        except PenstockError as e:
            self._sink(ItemResult(error=e))

    def _expire(self) -> None:
        self._stop()
        self._sink(ItemResult(error=DeadlineExceeded("the deadline passed while the model was loaded")))

    def _stop(self) -> None:
        self._leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
