"""Call: one accepted request. RunningBatch: a batch that is out."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.core.batching.entry import Dispatch, Entry
from penstock.core.wire.slabs import Slab
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.engine")


class Call:
    """One accepted request: who waits for it, and how far its answer has come.

    `label` is what its front-end calls its version, for observers; `sent_s` is when it was last sent to a worker, and
    `batch_id` in which batch.

    `end` is how it ended, as far as its caller knows: "" - not yet; "ok" or "failed" - answered; else why not.
    """

    __slots__ = ("_on_cancel", "batch_id", "end", "entry", "item", "label", "parts", "sent_s", "sink", "streamed")

    def __init__(self, item: Item, sink: Sink, entry: Entry, on_cancel: Callable[[Call], None]) -> None:
        self._on_cancel = on_cancel
        self.item = item
        self.sink: Sink | None = sink
        self.entry = entry
        self.end = self.label = ""
        self.sent_s, self.batch_id = 0.0, 0
        self.streamed = False  # a part of the answer is out: it must not be run again
        self.parts: dict[int, ItemResult] | None = None  # of a split request: first row -> answer

    def settle(self, result: ItemResult, reason: str = "") -> None:
        """Hands the final answer over, once; a caller that left is skipped. `reason`: it is no answer of a model."""
        sink, self.sink = self.sink, None
        if sink is not None:
            self.end = reason or ("ok" if result.error is None else "failed")
            self._tell(sink, result)

    def hand(self, result: ItemResult) -> None:
        """Hands a part of the answer over; a caller that left is skipped."""
        if self.sink is not None:
            self._tell(self.sink, result)

    def keep(self, start: int, result: ItemResult) -> None:
        """Keeps the answer to the part of a split request that begins with row `start`."""
        if self.parts is None:
            self.parts = {}
        self.parts[start] = result

    def _tell(self, sink: Sink, result: ItemResult) -> None:
        try:
            sink(result)
        except Exception:
            log.exception("sink_failed request=%d", self.entry.id)

    def cancel(self) -> None:
        """The caller is gone: not run if it still waits, else not answered."""
        if self.sink is not None:
            self.sink = None
            self.end = "cancelled"
            self._on_cancel(self)


class RunningBatch:
    """A batch that is out on a slot. `failed` are the requests of which an item failed, `failures` counts items.

    `unwanted`: on a wide slot, a caller has left.
    """

    __slots__ = ("calls", "dispatch", "failed", "failures", "sent_s", "unwanted")

    def __init__(self, dispatch: Dispatch, calls: list[Call], sent_s: float) -> None:
        self.dispatch = dispatch
        self.calls = calls
        self.sent_s = sent_s
        self.failed: set[int] = set()
        self.failures = 0
        self.unwanted = False


def release(item: Item) -> None:
    """Gives a slab payload back to its pool; other payloads are left to the garbage collector."""
    if isinstance(item.payload, Slab):
        item.payload.release()
