"""A persistent HTTP/1.1 connection that sends large bodies without copying them and bounds responses; a pool of them.

It suits many requests from one process, such as a bulk job. It follows no redirects and keeps no cookies.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from msgspec import Struct

from penstock.client.endpoint import ConnectionLost, Endpoint, ResponseTimeout, Unreachable, UntrustedCertificate
from penstock.client.response import HttpResponse, ResponseReader
from penstock.errors import BadRequest, PenstockError

Buffer: TypeAlias = bytes | bytearray | memoryview

# TLS encrypts and holds everything it receives at once; a plain uvloop transport writes from the caller's memory.
TLS_PIECE_BYTES: Final = 512 * 1024


class HttpCall(Struct):
    """A request. `body` must not change while it is sent; it is not read afterwards. `resend`: if a reused connection
    turns out to be closed before the first byte of the response, the request is sent once more on a new one."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]] = ()
    body: Sequence[Buffer] = ()
    resend: bool = True


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
        """`send` of an `HttpCall` of these parts."""
        call = HttpCall(method, path, headers, body)
        return await self.send(call, timeout_s=timeout_s, max_response_bytes=max_response_bytes)

    async def send(
        self, call: HttpCall, *, timeout_s: float, max_response_bytes: int, stream: bool = False
    ) -> HttpResponse:
        """The response, whatever its status. The endpoint's prefix goes before the path.

        `stream`: returns after the head of a 2xx, whose body is in `parts`. The connection is then busy until `parts`
        has ended; `close` ends it early. `timeout_s` applies to the head, and `max_response_bytes` to each piece.

        Raises Unreachable, UntrustedCertificate, ConnectionLost, ResponseTimeout (including the time to connect),
        MalformedResponse, ResponseTooLarge, and BadRequest for a header that cannot be sent.
        """
        head = self._head(call, sum([memoryview(part).nbytes for part in call.body]))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(head, call, max_response_bytes, stream)
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

    def _head(self, call: HttpCall, length: int) -> bytes:
        method, path = call.method, call.path
        lines = "".join([f"{name}: {value}\r\n" for name, value in call.headers])
        breaks = lines.count("\r") + lines.count("\n")
        if breaks != 2 * len(call.headers) or not path.isascii() or set(path) & set(" \r\n"):
            raise BadRequest("a header value or the path contains a space or line break that HTTP cannot carry")
        size = f"Content-Length: {length}\r\n" if length or method not in ("GET", "HEAD") else ""
        text = f"{method} {self.endpoint.prefix}{path} HTTP/1.1\r\n{self._host}{lines}{size}\r\n"
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise BadRequest("a header value contains a character that HTTP cannot carry") from None

    async def _exchange(self, head: bytes, call: HttpCall, max_response_bytes: int, stream: bool) -> HttpResponse:
        protocol = self._protocol
        if protocol is not None and protocol.is_open:
            try:
                return await protocol.exchange(head, call.body, max_response_bytes, stream)
            except ConnectionLost as lost:
                if protocol.reader.received_bytes or not call.resend:
                    raise
                try:
                    protocol = await self.connect()
                except Unreachable:  # the whole server went away, perhaps because of this request
                    raise lost from None
        else:
            protocol = await self.connect()
        return await protocol.exchange(head, call.body, max_response_bytes, stream)

    async def connect(self) -> _ClientProtocol:
        """Opens the connection now, instead of with a request. Raises Unreachable, UntrustedCertificate."""
        endpoint = self.endpoint
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                if endpoint.socket:
                    _, protocol = await loop.create_unix_connection(
                        lambda: _ClientProtocol(endpoint.url, False), endpoint.socket
                    )
                else:
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
        self._active = False  # a response is expected, or arriving
        self.reader = ResponseReader(url)

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def exchange(
        self, head: bytes, body: Sequence[Buffer], max_response_bytes: int, stream: bool = False
    ) -> HttpResponse:
        """The response, or the head of a stream. Does not read `body` after it returns. Raises ConnectionLost,
        MalformedResponse."""
        assert not self._active, "one request at a time"
        if self._transport is None:
            raise ConnectionLost(f"the connection to {self._url} is closed")
        self.reader.begin(max_response_bytes, stream=stream)
        self._written, self._active = False, True
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
        if not self._active:
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
        progress = f"after {received} bytes of a response" if received else "without a response"
        self._fail(ConnectionLost(f"{self._url} ended the connection {progress}{f': {exc}' if exc else ''}"))
        self.reader.close()

    def _finish(self) -> None:
        """Hands over a response that is complete, or the head of a stream. Keeps the connection only if both sides can
        reuse it."""
        reader, waiter, transport = self.reader, self._waiter, self._transport
        if not self._active:
            return
        if reader.response is not None:
            self._active = False
            sent = self._written and transport is not None and transport.get_write_buffer_size() == 0
            if not (sent and reader.keep_alive):
                self.abort()
        elif reader.head is not None and reader.head.parts is not None:
            reader.head.parts.attach(transport)
        response = reader.response or reader.head
        if response is not None and waiter is not None and not waiter.done():
            waiter.set_result(response)
            self.resume_writing()

    def _fail(self, error: PenstockError) -> None:
        self.abort()
        self._active = False
        self.reader.fail(error)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
            self.resume_writing()


class ConnectionPool:
    """Sends requests, at most `size` at the same time; further ones wait for a connection in the order of arrival."""

    def __init__(self, endpoint: Endpoint, size: int, connect_timeout_s: float) -> None:
        self.endpoint = endpoint
        self._size = size
        self._connect_timeout_s = connect_timeout_s
        self._open: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []  # the last one used is the next: others may time out
        self._waiting: deque[asyncio.Future[ClientConnection]] = deque()

    async def send(self, call: HttpCall, *, timeout_s: float, max_response_bytes: int) -> HttpResponse:
        """The response, whatever its status. Raises as `ClientConnection.send`."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        connection = await self.take(timeout_s)
        try:
            left_s = end_s - asyncio.get_running_loop().time()
            return await connection.send(call, timeout_s=left_s, max_response_bytes=max_response_bytes)
        finally:
            self.give_back(connection)

    async def take(self, timeout_s: float) -> ClientConnection:
        """A connection, which the caller gives back. Raises ResponseTimeout if none becomes free in time."""
        if self._idle:
            return self._idle.pop()
        if len(self._open) < self._size:
            connection = ClientConnection(self.endpoint, connect_timeout_s=self._connect_timeout_s)
            self._open.add(connection)
            return connection
        waiter: asyncio.Future[ClientConnection] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():  # it was given a connection at the same time
                self.give_back(waiter.result())
            else:
                waiter.cancel()
            if isinstance(error, TimeoutError):
                url, size = self.endpoint.url, self._size
                raise ResponseTimeout(f"{url}: none of {size} connections became free within {timeout_s:g} s") from None
            raise

    def give_back(self, connection: ClientConnection) -> None:
        """Hands the connection to the next waiter, or keeps it."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._idle.append(connection)

    def close(self) -> None:
        """Closes all connections at once."""
        for connection in self._open:
            connection.close()
