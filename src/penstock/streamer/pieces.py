"""Pieces: one call of more items than a queue may hold, sent a piece after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.core.contracts import Ticket
from penstock.errors import PenstockError, QueueFull
from penstock.types import Item, ItemResult, Sink

OUT = 2  # pieces at a time: the workers have the second while the first is answered

Submit = Callable[[Item, Sink, float | None, int], Ticket]


class Pieces:
    """The Ticket of such a call. The sink gets one answer: all values in order, or the first error of a whole piece.

    A queue that others fill refuses the call only when none of its own pieces is out, which would make room.
    """

    def __init__(
        self, submit: Submit, item: Item, sink: Sink, rows: int, budget_s: float | None, priority: int
    ) -> None:
        """`rows` of each piece. Raises what `submit` raises for the first one."""
        self._submit = submit
        self._values: list[Any] = item.payload
        self._sink = sink
        self._rows = rows
        self._until_s = None if budget_s is None else time.monotonic() + budget_s
        self._priority = priority
        self._next = 0  # the first item that is not sent
        self._out: dict[int, Ticket] = {}  # by first item
        self._answers: dict[int, list[Any]] = {}
        self._over = False
        self._send()

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self._over = True
        out, self._out = self._out, {}
        for ticket in out.values():
            ticket.cancel()

    def _send(self) -> None:
        while self._next < len(self._values) and len(self._out) < OUT:
            start = self._next
            values = self._values[start : start + self._rows]
            budget_s = None if self._until_s is None else self._until_s - time.monotonic()

            def answered(result: ItemResult, start: int = start) -> None:
                if result.final:
                    self._answered(start, result)

            try:
                item = Item(values, rows=len(values), many=True)
                self._out[start] = self._submit(item, answered, budget_s, self._priority)
            except QueueFull:
                if not self._out:
                    raise
                return
            self._next = start + len(values)

    def _answered(self, start: int, result: ItemResult) -> None:
        if self._over:
            return
        del self._out[start]
        if result.error is None:
            self._answers[start] = result.body
            try:
                self._send()
            except PenstockError as e:
                result = ItemResult(error=e)
        if result.error is not None:
            self.cancel()
            self._sink(result)
        elif not self._out:
            self._over = True
            self._sink(ItemResult([value for _, values in sorted(self._answers.items()) for value in values]))
