"""One connection of the load generator: a request at a time, and its answer however it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

import httptools

from penstock.perf.bench.samples import LOST, Samples


class Run(Protocol):
    """What a connection is used by: it has the requests, and is told what became of them."""

    requests: Sequence[bytes]
    samples: Samples
    pieces: float  # kept of an answer
    over: bool

    def answer(self, index: int, status: int, body: list[bytes]) -> None:
        """A request was answered."""

    def fail(self, index: int, status: int, why: bytes = b"") -> None:
        """A request was not answered."""

    def free(self, connection: Connection) -> None:
        """A connection has no request under way."""

    def lost(self, connection: Connection, index: int) -> None:
        """A connection ended, with the request `index` under way unless that is negative."""

    def broken(self, error: BaseException) -> None:
        """What is told of answers raised."""


class Connection(asyncio.Protocol):
    """One request at a time."""

    __slots__ = ("_body", "_data", "_parser", "_run", "_to_end", "index", "transport")

    def __init__(self, run: Run) -> None:
        self._run = run
        self.index = -1  # of the request under way
        self._body: list[bytes] = []
        self._data = b""
        self._to_end = False  # the answer ends with its connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, index: int) -> None:
        """Sends the request of that index; free connections only."""
        self.index = index
        run = self._run
        self.transport.write(run.requests[run.samples.number[index]])

    def data_received(self, data: bytes) -> None:
        self._data = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._run.broken(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(b"what came is no HTTP/1 answer: " + data[:80])
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """The head of an answer is there."""
        if not self._parser.should_keep_alive():
            head = self._data.partition(b"\r\n\r\n")[0].lower()
            self._to_end = b"\ncontent-length:" not in head and b"\ntransfer-encoding:" not in head

    def on_body(self, body: bytes) -> None:
        """A piece of an answer."""
        if len(self._body) < self._run.pieces:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """An answer is whole."""
        status = self._parser.get_status_code()
        if status < 200:  # interim
            return
        index, self.index = self.index, -1
        run = self._run
        if index < 0 or run.over:  # an answer that nobody asked for, or waits for any more
            self.transport.abort()
            return
        run.answer(index, status, self._body)
        self._body.clear()
        if self._parser.should_keep_alive():
            run.free(self)
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        index, self.index = self.index, -1
        run = self._run
        if self._to_end and error is None and index >= 0 and not run.over:
            run.answer(index, self._parser.get_status_code(), self._body)
            index = -1
        run.lost(self, index)

    def _fail(self, why: bytes) -> None:
        index, self.index = self.index, -1
        if index >= 0 and not self._run.over:
            self._run.fail(index, LOST, why)
