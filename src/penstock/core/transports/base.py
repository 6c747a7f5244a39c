"""What a transport is: one way to reach workers, with one contract for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.errors import PenstockError
from penstock.types import Batch, BatchPart, MetricDelta, Ready

OnPart = Callable[[BatchPart], None]


class TransportListener(Protocol):
    """Told, on the event loop's thread, what becomes of the slots."""

    def slot_up(self, slot: int, ready: Ready) -> None:
        """The model of this slot is loaded: batches may be sent."""
        ...

    def slot_down(self, slot: int, error: PenstockError, retry_in_s: float | None) -> None:
        """The slot is gone, or failed to load. It comes back by itself after `retry_in_s`; None: it does not.

        Every batch that was on it has had its final part before this call.
        """
        ...

    def slot_metrics(self, slot: int, deltas: list[MetricDelta]) -> None:
        """What the model counted, of a worker whose batches run side by side: else it comes with a batch."""
        ...


class Transport(Protocol):
    """One way to reach the instances of one model. All calls are made on the event loop's thread.

    `depth` is how many batches a slot may hold: one running, one ahead, and more of those that are brief.
    """

    depth: int

    async def start(self, listener: TransportListener) -> None:
        """Begins to start every slot and returns; `listener` hears of each slot when it is up or failed."""
        ...

    def send(self, batch: Batch, on_part: OnPart) -> None:
        """Runs a batch. `on_part` gets any number of parts and exactly one final one, whatever happens.

        Slabs among the payloads stay the caller's, who may have to run them again: they are pinned while a worker may
        look at them, so that the caller can release them at any time.
        """
        ...

    def abandon(self, slot: int, batch_id: int) -> None:
        """Nobody waits for a batch any more: one that streams ends at its next part. Its final part comes as ever."""
        ...

    def add_slot(self, slot: int, device: str) -> None:
        """Begins to start one more slot, as `start` does. `listener` may hear of it before this returns.

        Its number may be that of a slot that was removed, never of one whose worker still lives. Raises BadRequest if
        there can be no more.
        """
        ...

    async def remove_slot(self, slot: int, drain_s: float) -> None:
        """Waits up to `drain_s` for what the slot runs, and ends its worker. Nothing is sent to the slot any more."""
        ...

    async def close(self, drain_s: float) -> None:
        """Waits up to `drain_s` for what runs, then kills; nothing of the transport is left afterwards."""
        ...

    def forget(self) -> None:
        """In a forked child: closes the child's copies of descriptors; the parent's workers notice nothing."""
        ...
