"""The parts of answers that a handler sends while its call still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.models.handler_answers import answer
from penstock.protocols.torchserve.requests import HandlerAnswer

SendParts = Callable[[list[HandlerAnswer | None]], None]
"""Takes the parts of one moment, aligned with the items of the running call; None where there is none."""


class Parts:
    """`cl_socket` of a Context: what handlers send goes to the callers of the running batch, from any thread.

    What comes when the batch has ended is dropped.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._send: SendParts | None = None
        self._places: list[int] = []
        self._count = 0

    def begin(self, send: SendParts | None, places: list[int], count: int) -> None:
        """From now on parts go to `send`; place i of the handler's batch is `places[i]` of `count` items."""
        self._send, self._places, self._count = send, places, count

    def end(self) -> None:
        """No part is sent any more."""
        with self._lock:
            self._send = None

    def sendall(self, response: Any) -> None:
        """Sends what `create_predict_response` made. Raises BadOutput for a part that cannot be sent."""
        values: Mapping[int, Any] = response.values
        with self._lock:
            if self._send is None:
                return
            parts: list[HandlerAnswer | None] = [None] * self._count
            for i, value in values.items():
                processor = response.context.request_processor[i]
                parts[self._places[i]] = answer(value, processor, self._limit_bytes, part=True)
            self._send(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        return self  # a copy of a context speaks for the same batch
