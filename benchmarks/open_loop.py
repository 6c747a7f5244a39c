"""An open loop of HTTP requests: each is sent at its own time, whether or not the earlier ones are answered.

Latency counts from the intended time, so that a generator or a server that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from array import array
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

LOST = 0  # the status of a request without an answer
MOST_CONNECTIONS = 8000


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrivals at `rate` a second, from 0 to `seconds`."""
    draw = random.Random(seed)
    times, now = [], draw.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += draw.expovariate(rate)
    return times


class OpenLoop:
    """One run. Afterwards, in the order of the requests: `status` and `latency_s`; `late_s` is when each was handed
    to its connection, counted from its intended time too."""

    def __init__(
        self,
        url: str,
        body: bytes,
        content_type: str,
        times: Sequence[float],
        *,
        connections: int = 256,
        **headers: str,
    ) -> None:
        """`connections` are opened before the first request, others when none is free."""
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        head = {"host": parts.netloc, "content-type": content_type, "content-length": str(len(body)), **headers}
        lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in head.items())
        self.request = f"POST {parts.path} HTTP/1.1\r\n{lines}\r\n".encode() + body
        self.times = times
        self._connections = connections
        self.status = array("i", [LOST] * len(times))
        self.latency_s = array("d", [float("inf")] * len(times))
        self.late_s = array("d", [0.0] * len(times))
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._waiting: list[int] = []  # requests that no connection is free for
        self._unanswered = len(times)
        self._start = 0.0

    def run(self, patience_s: float = 5.0) -> OpenLoop:
        """Sends all, waits for the answers at most `patience_s` after the last, and gives back itself."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_CONNECTIONS + 100
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))
        uvloop.run(self._run(patience_s))
        return self

    async def _run(self, patience_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        await asyncio.gather(*(self._open() for _ in range(self._connections)))
        self._start = time.perf_counter() + 0.05
        number = 0
        while number < len(self.times):
            await asyncio.sleep(self._start + self.times[number] - time.perf_counter())
            now = time.perf_counter() - self._start
            while number < len(self.times) and self.times[number] <= now:
                self._send(number)
                number += 1
        if self._unanswered:
            try:
                await asyncio.wait_for(self._over.wait(), patience_s)
            except TimeoutError:
                pass  # what is open is lost
        for task in self._opening:
            task.cancel()
        for connection in list(self._all):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def _open(self) -> None:
        """A new connection, for whoever waits longest."""
        try:
            _, connection = await self._loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except OSError:
            if self._waiting:
                self._waiting.pop(0)
                self._answered()
            return
        self._all.add(connection)
        self.freed(connection)

    def _send(self, number: int) -> None:
        if self._idle:
            self._idle.pop().send(number)
            return
        self._waiting.append(number)
        if len(self._all) + len(self._opening) < MOST_CONNECTIONS:
            task = self._loop.create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def freed(self, connection: _Connection) -> None:
        if self._waiting:
            connection.send(self._waiting.pop(0))
        else:
            self._idle.append(connection)

    def since(self, number: int) -> float:
        """Seconds since the intended time of a request."""
        return time.perf_counter() - self._start - self.times[number]

    def answer(self, number: int, status: int) -> None:
        self.latency_s[number] = self.since(number)
        self.status[number] = status
        self._answered()

    def lost(self, connection: _Connection, number: int | None) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if number is not None:
            self._answered()

    def _answered(self) -> None:
        self._unanswered -= 1
        if not self._unanswered:
            self._over.set()


class _Connection(asyncio.Protocol):
    def __init__(self, run: OpenLoop) -> None:
        self._run = run
        self._number: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, number: int) -> None:
        self._number = number
        self._run.late_s[number] = self._run.since(number)
        self.transport.write(self._run.request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_message_complete(self) -> None:
        number, self._number = self._number, None
        if number is None:  # an answer that nobody asked for
            self.transport.abort()
            return
        self._run.answer(number, self._parser.get_status_code())
        if self._parser.should_keep_alive():
            self._run.freed(self)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        number, self._number = self._number, None
        self._run.lost(self, number)
