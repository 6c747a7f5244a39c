"""A kept-alive HTTP/1.1 connection: large bodies leave uncopied, answers are bounded before they are held.

For many requests from one process, such as a bulk job's or a load generator's: no redirects, no cookies.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence

from penstock.client.endpoint import Endpoint
from penstock.client.errors import ConnectionLost, NoAnswer, NotTrusted, Unreachable
from penstock.client.link import Answer, Buffer, Link
from penstock.errors import BadRequest


class Connection:
    """At most one request at a time; opened by the first one, and again when it was closed in between."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self.connect_timeout_s = connect_timeout_s
        self._host = f"Host: {endpoint.authority}\r\n"
        self._link: Link | None = None

    async def request(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]] = (),
        body: Sequence[Buffer] = (),
        *,
        timeout_s: float = 60.0,
        max_answer_bytes: int = 16 * 2**20,
    ) -> Answer:
        """The answer, whatever its status. `path` is put behind the endpoint's prefix.

        `body` must not change before this returns or raises; after that no byte of it is read any more. A kept
        connection that turns out to be closed, before a byte of the answer came, is opened anew once.
        Raises Unreachable, NotTrusted, ConnectionLost, NoAnswer (connecting counts), MalformedAnswer,
        AnswerTooLarge, BadRequest for a header that cannot be sent.
        """
        head = self._head(method, path, headers, sum([memoryview(part).nbytes for part in body]))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(head, body, max_answer_bytes)
        except TimeoutError:
            self.close()
            raise NoAnswer(f"{self.endpoint.url} has not answered within {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection at once; the next request opens another."""
        link, self._link = self._link, None
        if link is not None:
            link.drop()

    def _head(self, method: str, path: str, headers: Sequence[tuple[str, str]], length: int) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        if lines.count("\r") + lines.count("\n") != 2 * len(headers) or not path.isascii() or set(path) & set(" \r\n"):
            raise BadRequest("a header's value or the path holds a space or line break that HTTP cannot carry")
        size = f"Content-Length: {length}\r\n" if length or method not in ("GET", "HEAD") else ""
        text = f"{method} {self.endpoint.prefix}{path} HTTP/1.1\r\n{self._host}{lines}{size}\r\n"
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise BadRequest("a header's value holds a character that HTTP cannot carry") from None

    async def _ask(self, head: bytes, body: Sequence[Buffer], max_answer_bytes: int) -> Answer:
        link = self._link
        if link is not None and link.open:
            try:
                return await link.exchange(head, body, max_answer_bytes)
            except ConnectionLost as lost:
                if link.received_bytes:
                    raise
                try:
                    self._link = link = await self._connect()
                except Unreachable:  # it was more than this connection that ended, perhaps by this very request
                    raise lost from None
        else:
            self._link = link = await self._connect()
        return await link.exchange(head, body, max_answer_bytes)

    async def _connect(self) -> Link:
        endpoint = self.endpoint
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, link = await loop.create_connection(
                    lambda: Link(endpoint.url, endpoint.tls is not None),
                    endpoint.host,
                    endpoint.port,
                    ssl=endpoint.tls,
                    server_hostname=endpoint.host if endpoint.tls else None,
                )
        except ssl.SSLCertVerificationError as exc:
            raise NotTrusted(f"{endpoint.url}: certificate not trusted: {exc.verify_message}") from None
        except TimeoutError:
            raise Unreachable(f"{endpoint.url}: no connection within {self.connect_timeout_s:g} s") from None
        except OSError as exc:  # also ssl.SSLError, socket.gaierror
            raise Unreachable(f"{endpoint.url}: cannot connect: {_reason(exc)}") from None
        return link


def _reason(exc: OSError) -> str:
    """The system's words: those of asyncio tell the address once more, and not what is wrong with it."""
    if exc.errno is None or exc.errno <= 0 or isinstance(exc, ssl.SSLError):
        return exc.strerror or str(exc)
    return os.strerror(exc.errno)
