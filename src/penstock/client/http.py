"""A persistent HTTP/1.1 connection that sends large bodies without copying them and bounds responses.

It suits many requests from one process, such as a bulk job. It follows no redirects and keeps no cookies.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

import httptools
from msgspec import Struct

from penstock.client.endpoint import (
    ConnectionLost,
    Endpoint,
    MalformedResponse,
    ResponseTimeout,
    ResponseTooLarge,
    Unreachable,
    UntrustedCertificate,
)
from penstock.errors import BadRequest, PenstockError

Buffer: TypeAlias = bytes | bytearray | memoryview

HEAD_BYTES: Final = 64 * 1024  # the limit that servers apply to a request head
# Minimal chunked encoding takes 6 bytes for one byte of body; more than this is endless framing.
FRAMING: Final = 8
# TLS encrypts and holds everything it receives at once; a plain uvloop transport writes from the caller's memory.
TLS_PIECE_BYTES: Final = 512 * 1024


class HttpResponse(Struct, frozen=True):
    """Header names are in lower case; repeated headers are joined by ", "."""

    status: int
    headers: dict[str, str]
    body: bytes


class ClientConnection:
    """Carries one request at a time. Opens on the first request, and again after it was closed."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self.connect_timeout_s = connect_timeout_s
        self._host = f"Host: {endpoint.authority}\r\n"
        self._protocol: _ClientProtocol | None = None

    async def request(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]] = (),
        body: Sequence[Buffer] = (),
        *,
        timeout_s: float = 60.0,
        max_response_bytes: int = 16 * 2**20,
    ) -> HttpResponse:
        """The response, whatever its status. The endpoint's prefix goes before `path`.

        `body` must not change until this returns or raises; it is not read afterwards. If a reused connection turns
        out to be closed before the first byte of the response, the request is sent once more on a new connection.
        Raises Unreachable, UntrustedCertificate, ConnectionLost, ResponseTimeout (including the time to connect),
        MalformedResponse, ResponseTooLarge, and BadRequest for a header that cannot be sent.
        """
        head = self._head(method, path, headers, sum([memoryview(part).nbytes for part in body]))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(head, body, max_response_bytes)
        except TimeoutError:
            self.close()
            raise ResponseTimeout(f"{self.endpoint.url} has not answered within {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection at once; the next request opens another."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.abort()

    def _head(self, method: str, path: str, headers: Sequence[tuple[str, str]], length: int) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        if lines.count("\r") + lines.count("\n") != 2 * len(headers) or not path.isascii() or set(path) & set(" \r\n"):
            raise BadRequest("a header value or the path contains a space or line break that HTTP cannot carry")
        size = f"Content-Length: {length}\r\n" if length or method not in ("GET", "HEAD") else ""
        text = f"{method} {self.endpoint.prefix}{path} HTTP/1.1\r\n{self._host}{lines}{size}\r\n"
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise BadRequest("a header value contains a character that HTTP cannot carry") from None

    async def _exchange(self, head: bytes, body: Sequence[Buffer], max_response_bytes: int) -> HttpResponse:
        protocol = self._protocol
        if protocol is not None and protocol.is_open:
            try:
                return await protocol.exchange(head, body, max_response_bytes)
            except ConnectionLost as lost:
                if protocol.reader.received_bytes:
                    raise
                try:
                    protocol = await self.connect()
                except Unreachable:  # the whole server went away, perhaps because of this request
                    raise lost from None
        else:
            protocol = await self.connect()
        return await protocol.exchange(head, body, max_response_bytes)

    async def connect(self) -> _ClientProtocol:
        """Opens the connection now, instead of with a request. Raises Unreachable, UntrustedCertificate."""
        endpoint = self.endpoint
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, protocol = await loop.create_connection(
                    lambda: _ClientProtocol(endpoint.url, endpoint.tls is not None),
                    endpoint.host,
                    endpoint.port,
                    ssl=endpoint.tls,
                    server_hostname=endpoint.host if endpoint.tls else None,
                )
        except ssl.SSLCertVerificationError as exc:
            raise UntrustedCertificate(f"{endpoint.url}: certificate not trusted: {exc.verify_message}") from None
        except TimeoutError:
            raise Unreachable(f"{endpoint.url}: no connection within {self.connect_timeout_s:g} s") from None
        except OSError as exc:  # includes ssl.SSLError and socket.gaierror
            raise Unreachable(f"{endpoint.url}: cannot connect: {_reason(exc)}") from None
        except UnicodeError:
            raise Unreachable(f"{endpoint.url}: '{endpoint.host}' is not a valid host name") from None
        self._protocol = protocol
        return protocol


def _reason(exc: OSError) -> str:
    """The system's message; asyncio's repeats the address and omits the cause."""
    if exc.errno is None or exc.errno <= 0 or isinstance(exc, ssl.SSLError):
        return exc.strerror or str(exc)
    return os.strerror(exc.errno)


class _ClientProtocol(asyncio.Protocol):
    """One TCP or TLS connection. `exchange` sends a request and waits for its response; the loop calls the rest."""

    def __init__(self, url: str, tls: bool) -> None:
        self._url = url
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[HttpResponse] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._written = False
        self.reader = _ResponseReader(url)

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def exchange(self, head: bytes, body: Sequence[Buffer], max_response_bytes: int) -> HttpResponse:
        """The response. Does not read `body` after it returns. Raises ConnectionLost, MalformedResponse."""
        assert self._waiter is None, "one request at a time"
        if self._transport is None:
            raise ConnectionLost(f"the connection to {self._url} is closed")
        self.reader.begin(max_response_bytes)
        self._written = False
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            if self._tls:
                await self._write_pieces(waiter, [head, *body])
            else:
                self._transport.writelines([head, *body])
            self._written = True
            response: HttpResponse = await waiter
            return response
        finally:
            self._waiter = None

    async def _write_pieces(self, waiter: asyncio.Future[HttpResponse], parts: Sequence[Buffer]) -> None:
        """Returns early when the response arrives before the whole request is written."""
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), TLS_PIECE_BYTES):
                if self._paused and not waiter.done():
                    self._writable = asyncio.get_running_loop().create_future()
                    await self._writable
                if waiter.done() or self._transport is None:
                    return
                self._transport.write(view[start : start + TLS_PIECE_BYTES])

    def abort(self) -> None:
        """Closes the connection and discards unsent data."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Reads part of a response; unexpected data closes the connection."""
        if self._waiter is None or self._waiter.done():
            self.abort()
            return
        error = self.reader.feed(data)
        self._finish()
        if error is not None:
            self._fail(error)

    def eof_received(self) -> bool:
        """Completes a body that has no other end."""
        self.reader.finish_at_eof()
        self._finish()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        received = self.reader.received_bytes
        progress = f"after {received} bytes of an answer" if received else "without an answer"
        self._fail(ConnectionLost(f"{self._url} ended the connection {progress}{f': {exc}' if exc else ''}"))
        self.reader.close()

    def _finish(self) -> None:
        """Hands over a complete response. Keeps the connection only if both sides can reuse it."""
        response = self.reader.response
        if response is None or self._waiter is None or self._waiter.done():
            return
        transport = self._transport
        sent = self._written and transport is not None and transport.get_write_buffer_size() == 0
        if not (sent and self.reader.keep_alive):
            self.abort()
        self._waiter.set_result(response)
        self.resume_writing()

    def _fail(self, error: PenstockError) -> None:
        self.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
            self.resume_writing()


class _ResponseReader:
    """Collects one response within its limits; httptools calls the `on_*` methods."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.begin(0)

    def begin(self, max_body_bytes: int) -> None:
        """Expects another response."""
        self._parser = httptools.HttpResponseParser(self)
        self._max_body_bytes = max_body_bytes
        self.received_bytes = self._body_bytes = self._status = 0
        self._head_complete = self._until_eof = False
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._error: PenstockError | None = None
        self.response: HttpResponse | None = None
        self.keep_alive = False

    def close(self) -> None:
        del self._parser  # breaks the reference cycle

    def feed(self, data: bytes) -> PenstockError | None:
        """Parses data; `response` is set once it is complete. Returns the error that ends the connection, if any."""
        self.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            return self._error or MalformedResponse(f"{self._url} sent a response that is not HTTP/1.1: {exc}")
        if not self._head_complete and self.received_bytes > HEAD_BYTES:
            return ResponseTooLarge(f"{self._url}: the response head exceeds the {HEAD_BYTES} bytes allowed")
        if self.received_bytes > HEAD_BYTES + FRAMING * self._max_body_bytes:
            self._reject_size()
        return self._error

    def finish_at_eof(self) -> None:
        if self._head_complete and self._until_eof:
            self.on_message_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:  # a trailer
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        if self.response is not None:
            return
        self._status = self._parser.get_status_code()
        if self._status < 200:  # interim: the final response follows
            self._headers = {}
            return
        self._head_complete = True
        length = self._headers.get("content-length", "")
        bodiless = self._status in (204, 304)
        self._until_eof = not (length or bodiless or "transfer-encoding" in self._headers)
        if length.isdecimal() and int(length) > self._max_body_bytes:
            self._reject_size()

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._max_body_bytes:
            self._reject_size()
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._head_complete and self._error is None and self.response is None:
            self.keep_alive = not self._until_eof and self._parser.should_keep_alive()
            self.response = HttpResponse(self._status, self._headers, b"".join(self._parts))

    def _reject_size(self) -> None:
        self._parts = []
        self._error = ResponseTooLarge(f"{self._url}: the response exceeds the {self._max_body_bytes} bytes allowed")
