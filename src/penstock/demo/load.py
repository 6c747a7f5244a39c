"""A closed loop of HTTP connections: each sends its next request when the answer to the last one is there.

Lean on purpose: it shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

PATIENCE_S = 60.0

Check = Callable[[int, int, bytes], None]
"""Called with the number of the request in the list, the status and the body of its answer."""


def post(host: str, path: str, content_type: str, body: bytes) -> bytes:
    """One whole POST request, as it is sent."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


@dataclass
class Figures:
    """What a run saw: its length, one latency an answer, and how many connections were lost with a request open."""

    seconds: float = 0.0
    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    lost: int = 0


class Load:
    """Sends `requests` in turn, again from the start after the last, in whole passes."""

    def __init__(self, requests: Sequence[bytes], check: Check) -> None:
        self.requests = requests
        self.check = check
        self.figures = Figures()
        self._at_least = 0
        self._end = 0.0
        self._sent = 0
        self._over = False

    async def run(self, host: str, port: int, *, connections: int, at_least: int = 1, seconds: float = 0.0) -> Figures:
        """Runs until `at_least` requests were sent and `seconds` are over, and then to the end of the pass.

        Raises OSError if the server cannot be reached, TimeoutError if it leaves a request open for a minute.
        """
        loop = asyncio.get_running_loop()
        self._at_least, self._sent, self._over = at_least, 0, False
        self.figures = Figures()
        opened = [await loop.create_connection(lambda: _Connection(self, loop), host, port) for _ in range(connections)]
        try:
            start = time.perf_counter()
            self._end = start + seconds
            for _, connection in opened:
                connection.send_next()
            while pending := [c.finished for _, c in opened if not c.finished.done()]:
                before = len(self.figures.latencies_s)
                await asyncio.wait(pending, timeout=PATIENCE_S)
                if len(self.figures.latencies_s) == before and not any(f.done() for f in pending):
                    raise TimeoutError(f"no answer for {PATIENCE_S:g} s, {len(pending)} requests are open")
            self.figures.seconds = time.perf_counter() - start
        finally:
            for transport, _ in opened:
                transport.abort()
        return self.figures

    def take(self, now: float) -> int | None:
        """The number of the request to send next; None when the run is over."""
        number = self._sent % len(self.requests)
        if self._over or (number == 0 and self._sent >= self._at_least and now >= self._end):
            self._over = True
            return None
        self._sent += 1
        return number


class _Connection(asyncio.Protocol):
    def __init__(self, load: Load, loop: asyncio.AbstractEventLoop) -> None:
        self.finished: asyncio.Future[None] = loop.create_future()
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._number: int | None = None
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send_next(self) -> None:
        self._sent_s = time.perf_counter()
        self._number = self._load.take(self._sent_s)
        if self._number is None:
            self._finish()
        else:
            self._transport.write(self._load.requests[self._number])

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._number is not None, "an answer without a request"
        self._load.figures.latencies_s.append(time.perf_counter() - self._sent_s)
        self._load.check(self._number, self._parser.get_status_code(), b"".join(self._body))
        self._body.clear()
        self._number = None
        self.send_next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.finished.done():
            self._load.figures.lost += 1
            self._finish()

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed (nearest rank); NaN of none."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * share) - 1] if ordered else float("nan")
