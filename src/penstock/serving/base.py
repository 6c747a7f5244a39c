"""What a front-end is handed: it knows protocols and this, never the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock.types import Item, ModelMetadata, ModelStatus, Sink


class Ticket(Protocol):
    """One request that was accepted."""

    def cancel(self) -> None:
        """The caller is gone: a queued request is not run, a running one is not answered. The sink stays silent."""
        ...


class Buffer(Protocol):
    """Memory for one large body, visible to the workers. Its owner after `submit` is the engine."""

    view: memoryview

    def shrink(self, length: int) -> None:
        """Keeps only the first `length` bytes."""
        ...

    def release(self) -> None:
        """Gives the memory back; only for one that was never submitted."""
        ...


class Backend(Protocol):
    """The models, as front-ends see them. Every call is made on the event loop's thread and does not block."""

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
        """Queues one item. Raises ModelNotFound, ModelNotReady, QueueFull, DeadlineExceeded (`budget_s` <= 0).

        Owns `item.payload` from now on, also when it raises: a Buffer is given back by the engine.
        """
        ...

    def ready(self) -> bool:
        """True when every model can answer and the server is not draining."""
        ...

    def model_ready(self, model: str, version: str | None) -> bool:
        """Raises ModelNotFound."""
        ...

    def metadata(self, model: str, version: str | None) -> tuple[ModelMetadata, list[str]]:
        """The metadata, its parameters with those of the server beside the model's own, and all versions.

        Raises ModelNotFound, ModelNotReady.
        """
        ...

    def statuses(self) -> list[ModelStatus]: ...

    def allocate(self, nbytes: int) -> Buffer | None:
        """Memory for a body, or None while the pool is full. Raises PayloadTooLarge if it can never fit."""
        ...

    def when_free(self, wake: Callable[[], None]) -> None:
        """Calls `wake()` once, soon after memory was given back to the pool."""
        ...


class Management(Protocol):
    """Changes of the models while the server runs. Those of one model are made one after the other.

    A change returns when it is done: what replaces answers, what was replaced has answered all that it accepted. Every
    change raises Forbidden unless the configuration allows it, and ModelNotReady while the server starts or drains.
    """

    def check_open(self) -> None:
        """Raises what every change raises."""
        ...

    def statuses(self) -> list[ModelStatus]:
        """As `Backend.statuses`, and those that load beside another or drain."""
        ...

    def learned(self, model: str, version: str) -> dict[str, object]:
        """What the scheduler of a version has learned; empty when there is none."""
        ...

    async def put(self, model: str, version: str | None, keys: Mapping[str, Any]) -> None:
        """Loads a version, in place of the one that has its number. Raises BadRequest, Forbidden, Conflict, LoadFailed;
        nothing has changed then."""
        ...

    async def unload(self, model: str, version: str | None) -> None:
        """Unloads a version, or all of them. Raises ModelNotFound."""
        ...

    async def scale(self, model: str, version: str | None, instances: int) -> None:
        """Raises ModelNotFound, BadRequest, Conflict, LoadFailed; nothing has changed then."""
        ...

    async def set_default(self, model: str, version: str) -> None:
        """Raises ModelNotFound."""
        ...

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> None:
        """Raises ModelNotFound, BadRequest."""
        ...
