"""One TCP or TLS connection as HTTP/1.1 speaks over it: a request leaves, its answer is gathered and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

import httptools
from msgspec import Struct

from penstock.client.errors import AnswerTooLarge, ConnectionLost, MalformedAnswer
from penstock.errors import PenstockError

Buffer: TypeAlias = bytes | bytearray | memoryview

HEAD_BYTES: Final = 64 * 1024  # of an answer's head, as the servers bound that of a request
# The smallest chunks cost 6 bytes a byte; what is more than that is no body, but framing without end.
FRAMING: Final = 8
# TLS encrypts all that it is given at once and holds it; a plain transport of uvloop writes from the caller's memory.
TLS_PIECE_BYTES: Final = 512 * 1024


class Answer(Struct, frozen=True):
    """Header names are in lower case; a header that came twice is joined by ", "."""

    status: int
    headers: dict[str, str]
    body: bytes


class Link(asyncio.Protocol):
    """Called by the event loop, by the parser (`on_*`) and by the Connection that opened it. Ends only once."""

    def __init__(self, url: str, tls: bool) -> None:
        self.url = url
        self.tls = tls
        self.received_bytes = 0  # of the answer to the last request
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._expect(0)

    @property
    def open(self) -> bool:
        """Whether it can carry a request, as far as is known."""
        return self._transport is not None

    async def exchange(self, head: bytes, body: Sequence[Buffer], max_answer_bytes: int) -> Answer:
        """The answer; `body` is not read any more once this returned. Raises ConnectionLost, MalformedAnswer."""
        assert self._waiter is None, "one request at a time"
        if self._transport is None:
            raise ConnectionLost(f"the connection to {self.url} is closed")
        self._expect(max_answer_bytes)
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            if self.tls:
                await self._write_pieces(waiter, [head, *body])
            else:
                self._transport.writelines([head, *body])
            self._written = True
            answer: Answer = await waiter
            return answer
        finally:
            self._waiter = None

    async def _write_pieces(self, waiter: asyncio.Future[Answer], parts: Sequence[Buffer]) -> None:
        """Returns early when the answer is there before the request was written."""
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), TLS_PIECE_BYTES):
                if self._paused and not waiter.done():
                    self._writable = asyncio.get_running_loop().create_future()
                    await self._writable
                if waiter.done() or self._transport is None:
                    return
                self._transport.write(view[start : start + TLS_PIECE_BYTES])

    def drop(self) -> None:
        """Ends the connection at once; what was being sent is not sent any more."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # ---- the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when TCP and TLS stand."""
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        """Too much waits in the transport."""
        self._paused = True

    def resume_writing(self) -> None:
        """The transport takes more, or nothing more is to be written."""
        self._paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        """A part of an answer; where none is expected it ends the connection."""
        if self._waiter is None or self._waiter.done():
            self.drop()
            return
        self.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._fail(MalformedAnswer(f"{self.url} answered what is not HTTP/1.1: {exc}"))
            return
        if not self._head_done and self.received_bytes > HEAD_BYTES:
            self._fail(AnswerTooLarge(f"{self.url}: the answer's head is over the {HEAD_BYTES} bytes allowed"))
        elif self.received_bytes > HEAD_BYTES + FRAMING * self._max_bytes:
            self._too_large()

    def eof_received(self) -> bool:
        """The server sends no more: the end of a body that has no other."""
        if self._head_done and self._until_eof:
            self.on_message_complete()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Called once, whoever ended it."""
        part = f"after {self.received_bytes} bytes of an answer" if self.received_bytes else "without an answer"
        self._fail(ConnectionLost(f"{self.url} ended the connection {part}{f': {exc}' if exc else ''}"))
        del self._parser  # it knows this link: no cycle is left behind

    # ---- the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the head; those behind a chunked body say nothing."""
        if self._head_done:
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Where too large an answer ends, if it says its length."""
        self._status = self._parser.get_status_code()
        if self._status < 200:  # interim: the answer itself follows
            self._headers = {}
            return
        self._head_done = True
        length = self._headers.get("content-length", "")
        bodiless = self._status in (204, 304)
        self._until_eof = not (length or bodiless or "transfer-encoding" in self._headers)
        if length.isdecimal() and int(length) > self._max_bytes:
            self._too_large()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._body_bytes += len(data)
        if self._body_bytes > self._max_bytes:
            self._too_large()
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole. The connection is kept if both sides can use it once more."""
        if not self._head_done or self._waiter is None or self._waiter.done():
            return
        transport = self._transport
        sent = self._written and transport is not None and transport.get_write_buffer_size() == 0
        if not sent or self._until_eof or not self._parser.should_keep_alive():
            self.drop()
        self._waiter.set_result(Answer(self._status, self._headers, b"".join(self._parts)))
        self.resume_writing()

    # ---- one exchange

    def _expect(self, max_answer_bytes: int) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._max_bytes = max_answer_bytes
        self.received_bytes = self._body_bytes = self._status = 0
        self._head_done = self._until_eof = self._written = False
        self._headers = {}
        self._parts = []

    def _too_large(self) -> None:
        self._fail(AnswerTooLarge(f"{self.url}: the answer is over the {self._max_bytes} bytes allowed"))

    def _fail(self, error: PenstockError) -> None:
        self.drop()
        self._parts = []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
            self.resume_writing()
