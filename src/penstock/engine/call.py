"""Call: one accepted request. Running: a batch that is out."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.batching.entry import Dispatch, Entry
from penstock.types import Item, ItemResult, Sink
from penstock.wire.slabs import Slab

log = logging.getLogger("penstock.engine")


class Call:
    """One accepted request: who waits for it, and how far its answer has come."""

    __slots__ = ("_on_cancel", "entry", "item", "parts", "sink", "streamed")

    def __init__(self, item: Item, sink: Sink, entry: Entry, on_cancel: Callable[[Call], None]) -> None:
        self._on_cancel = on_cancel
        self.item = item
        self.sink: Sink | None = sink
        self.entry = entry
        self.streamed = False
        self.parts: dict[int, ItemResult] | None = None  # of a split request: first row -> answer

    def settle(self, result: ItemResult) -> None:
        """Hands the final answer over, once; a caller that left is skipped."""
        sink, self.sink = self.sink, None
        if sink is not None:
            self._tell(sink, result)

    def hand(self, result: ItemResult) -> None:
        """Hands a part of the answer over; a caller that left is skipped."""
        if self.sink is not None:
            self._tell(self.sink, result)

    def _tell(self, sink: Sink, result: ItemResult) -> None:
        try:
            sink(result)
        except Exception:
            log.exception("sink_failed request=%d", self.entry.id)

    def cancel(self) -> None:
        """The caller is gone: not run if it still waits, else not answered."""
        if self.sink is not None:
            self.sink = None
            self._on_cancel(self)


class Running:
    """A batch that is out on a slot."""

    __slots__ = ("calls", "dispatch", "sent_s")

    def __init__(self, dispatch: Dispatch, calls: list[Call], sent_s: float) -> None:
        self.dispatch = dispatch
        self.calls = calls
        self.sent_s = sent_s


def release(item: Item) -> None:
    """Gives a slab payload back to its pool; other payloads are left to the garbage collector."""
    if isinstance(item.payload, Slab):
        item.payload.release()
