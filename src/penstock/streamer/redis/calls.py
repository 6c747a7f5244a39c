"""What a client has asked: a Call for each caller, an Entry for each value, a Parcel for what goes out together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError
from penstock.types import ItemResult, Sink

log = logging.getLogger("penstock.broker")


class Entry:
    """One value on its way. `id` is the place that the broker gave it in the queue."""

    __slots__ = ("call", "id", "index", "number", "payload")

    def __init__(self, number: int, call: Call, index: int, payload: bytes) -> None:
        self.number = number
        self.call = call
        self.index = index
        self.payload = payload
        self.id: bytes | None = None


class Call:
    """One request of a caller: its entries, and how far its answer has come.

    `ends_s`, on the loop's clock: the caller waits no longer; `due`: that is a deadline of its own. `on_left` is called
    when it waits no more before its answer is whole.
    """

    __slots__ = ("_many", "_missing", "_on_left", "due", "ends_s", "entries", "priority", "sink", "timer", "values")

    def __init__(
        self,
        sink: Sink,
        many: bool,
        size: int,
        *,
        ends_s: float,
        due: bool,
        priority: int,
        on_left: Callable[[Call], None],
    ) -> None:
        self.sink: Sink | None = sink
        self.ends_s, self.due, self.priority = ends_s, due, priority
        self.values: list[Any] = [None] * size
        self.entries: list[Entry] = []
        self.timer: asyncio.TimerHandle | None = None
        self._many = many
        self._missing = size
        self._on_left = on_left

    def put(self, index: int, value: Any) -> None:
        """The outcome of one value: a result, or a PenstockError."""
        self.values[index] = value
        self._missing -= 1

    def finish(self) -> None:
        """Answers the caller, if every value has its outcome."""
        if self._missing or self.sink is None:
            return
        if self._many:
            self._tell(ItemResult(body=self.values))
        elif isinstance(self.values[0], PenstockError):
            self._tell(ItemResult(error=self.values[0]))
        else:
            self._tell(ItemResult(body=self.values[0]))

    def fail(self, error: PenstockError) -> None:
        """Answers the caller with an error; what is still out is not waited for."""
        if self.sink is not None:
            self._tell(ItemResult(error=error))
            self._on_left(self)

    def cancel(self) -> None:
        """The caller has left: what waits is taken out of the queue, what runs is not answered."""
        if self.sink is not None:
            self._done()
            self._on_left(self)

    def _tell(self, result: ItemResult) -> None:
        sink = self.sink
        self._done()
        try:
            if sink is not None:
                sink(result)
        except Exception:
            log.exception("sink_failed")

    def _done(self) -> None:
        self.sink = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Parcel:
    """Entries that go to the broker in one step; those of a group are all taken, or none."""

    def __init__(self) -> None:
        self.groups: list[list[Entry]] = []
        self.entries = 0
        self.nbytes = 0

    def add(self, group: list[Entry]) -> None:
        if group:
            self.groups.append(group)
            self.entries += len(group)
            self.nbytes += sum([len(e.payload) for e in group])

    def fail(self, error: PenstockError) -> None:
        """Tells every caller."""
        for group in self.groups:
            group[0].call.fail(error)
