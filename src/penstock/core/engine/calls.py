"""Requests and batches on their way through a Batcher."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct, field

from penstock.core.batching.entry import Dispatch, Entry
from penstock.core.wire.slabs import Slab
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.engine")


class Call(Struct, eq=False):
    """One accepted request: its caller and the state of its answer.

    `label` is its front-end's name for the version, for observers. `sent_s` and `batch_id` belong to the last batch it
    was sent in. `end` is how it ended for its caller: "" (not yet), "ok" or "failed" (answered), else the reason.
    """

    item: Item
    sink: Sink | None
    entry: Entry
    on_cancel: Callable[[Call], None]
    end: str = ""
    label: str = ""
    sent_s: float = 0.0
    batch_id: int = 0
    streamed: bool = False  # a part of the answer was sent: the request must not run again
    parts: dict[int, ItemResult] | None = None  # of a split request: first row -> answer

    def settle(self, result: ItemResult, reason: str = "") -> None:
        """Delivers the final answer, once, unless the caller left. `reason`: why a model did not answer."""
        sink, self.sink = self.sink, None
        if sink is not None:
            self.end = reason or ("ok" if result.error is None else "failed")
            self._call_sink(sink, result)

    def deliver(self, result: ItemResult) -> None:
        """Delivers a part of the answer, unless the caller left."""
        if self.sink is not None:
            self._call_sink(self.sink, result)

    def keep(self, start: int, result: ItemResult) -> None:
        """Keeps the answer to the part of a split request that begins at row `start`."""
        if self.parts is None:
            self.parts = {}
        self.parts[start] = result

    def _call_sink(self, sink: Sink, result: ItemResult) -> None:
        try:
            sink(result)
        except Exception:
            log.exception("sink_failed request=%d", self.entry.id)

    def cancel(self) -> None:
        """Abandons the request: it is not run if it still waits, else not answered."""
        if self.sink is not None:
            self.sink = None
            self.end = "cancelled"
            self.on_cancel(self)


class RunningBatch(Struct, eq=False):
    """A batch on a slot. `failed` holds the requests with a failed item, `failures` counts items.

    `unwanted`: a caller left a batch on a concurrent slot.
    """

    dispatch: Dispatch
    calls: list[Call]
    sent_s: float
    failed: set[int] = field(default_factory=set)
    failures: int = 0
    unwanted: bool = False


def release(item: Item) -> None:
    """Returns a slab payload to its pool; the garbage collector frees other payloads."""
    if isinstance(item.payload, Slab):
        item.payload.release()
