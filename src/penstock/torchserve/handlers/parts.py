"""The parts of answers that a handler sends while its call still runs."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.torchserve.handlers.answers import answer
from penstock.torchserve.protocol.codec import HandlerAnswer

SendParts = Callable[[list[HandlerAnswer | None]], None]
"""Takes the parts of one moment, aligned with the items of the running call; None where there is none."""


class Parts:
    """`cl_socket` of a Context: what handlers send goes to the callers of the running batch, from any thread.

    What comes when its batch has ended is dropped, also while the next one runs: a thread that a handler left behind
    speaks to nobody else's caller. An installed `ts` sends bytes, as to its own server.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._send: SendParts | None = None
        self._ids: list[str] = []
        self._places: list[int] = []
        self._count = 0

    def begin(self, send: SendParts | None, ids: list[str], places: list[int], count: int) -> None:
        """From now on parts go to `send`; request i of the handler's batch, `ids[i]`, is `places[i]` of `count`."""
        with self._lock:
            self._send, self._ids, self._places, self._count = send, ids, places, count

    def end(self) -> None:
        """No part is sent any more."""
        with self._lock:
            self._send = None

    def sendall(self, response: Any) -> None:
        """Sends what `create_predict_response` made. Raises BadOutput for a part that cannot be sent."""
        with self._lock:
            if self._send is None:
                return
            parts: list[HandlerAnswer | None] = [None] * self._count
            found = self._of_frame(response) if isinstance(response, (bytes, bytearray)) else self._of_values(response)
            for i, part in found:
                parts[self._places[i]] = part
            if any(part is not None for part in parts):
                self._send(parts)

    def _of_values(self, response: Any) -> Iterator[tuple[int, HandlerAnswer]]:
        values: Mapping[int, Any] = response.values
        for i, value in values.items():
            if response.ids is None or (i < len(self._ids) and response.ids[i] == self._ids[i]):
                yield i, answer(value, response.context.request_processor[i], self._limit_bytes, part=True)

    def _of_frame(self, data: bytes | bytearray) -> Iterator[tuple[int, HandlerAnswer]]:
        """The answers in a message of TorchServe 0.12's worker to its server."""
        frame = _Frame(data)
        frame.number()
        frame.text()
        while (length := frame.number()) >= 0:
            name = frame.take(length).decode()
            content_type, status, reason = frame.text(), frame.number(), frame.text()
            headers = [(frame.text(), frame.text()) for _ in range(frame.number())]
            headers = [(k, v) for k, v in headers if k.lower() != "content-type"]
            body = frame.take(frame.number())
            if name in self._ids:
                yield self._ids.index(name), HandlerAnswer(body, content_type, status, reason, headers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        return self  # a copy of a context speaks for the same batch


class _Frame:
    """Reads big-endian numbers, and texts behind their length."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = bytes(data)
        self._at = 0

    def number(self) -> int:
        return int(struct.unpack("!i", self.take(4))[0])

    def text(self) -> str:
        return self.take(self.number()).decode()

    def take(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        return self._data[start : self._at]
