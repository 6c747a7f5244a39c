"""One blocking request to a server: what is asked before and beside a run, never in it."""

from __future__ import annotations

import http.client
import ssl
import time
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.client.endpoint import Endpoint
from penstock.client.errors import ConnectionLost, MalformedAnswer, NoAnswer, NotTrusted, Unreachable

MOST_BYTES: Final = 2**24  # of an answer that is read: a page of metrics has some 100 kB


class Reply(Struct, frozen=True):
    """The answer, whatever its status."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:500].decode(errors="replace").strip()

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


def ask(
    endpoint: Endpoint,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    content_type: str = "application/json",
    token: str | None = None,
    timeout_s: float = 10.0,
) -> Reply:
    """The answer to one request, on a connection of its own; `path` is put behind the endpoint's prefix.

    Raises Unreachable, NotTrusted, NoAnswer, ConnectionLost, MalformedAnswer.
    """
    headers = {"Connection": "close"}
    if body is not None:
        headers["Content-Type"] = content_type
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection = _opened(endpoint, timeout_s)
    try:
        connection.request(method, endpoint.prefix + path, body, headers)
        answer = connection.getresponse()
        return Reply(answer.status, _body(answer, time.monotonic() + timeout_s))
    except TimeoutError:
        raise NoAnswer(f"{endpoint.url} has not answered within {timeout_s:g} s") from None
    except OSError as exc:  # http.client.RemoteDisconnected too
        raise ConnectionLost(f"{endpoint.url}: the connection ended before the answer: {exc}") from None
    except http.client.HTTPException as exc:
        raise MalformedAnswer(f"{endpoint.url} does not answer in HTTP: {type(exc).__name__}: {exc}") from None
    finally:
        connection.close()


def reach(endpoint: Endpoint, timeout_s: float = 10.0) -> None:
    """Whether anybody is there: raises Unreachable, NotTrusted."""
    _opened(endpoint, timeout_s).close()


def _body(answer: http.client.HTTPResponse, until_s: float) -> bytes:
    """Also of a server that sends for ever. Raises TimeoutError."""
    body = bytearray()
    while len(body) < MOST_BYTES and (part := answer.read1(MOST_BYTES - len(body))):
        body += part
        if time.monotonic() > until_s:
            raise TimeoutError
    return bytes(body)


def _opened(endpoint: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
    if endpoint.tls is None:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=endpoint.tls)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as exc:
        raise NotTrusted(f"{endpoint.url}: certificate not trusted: {exc.verify_message}") from None
    except OSError as exc:  # also a name that is not known, TLS that is not spoken, and the timeout
        raise Unreachable(f"{endpoint.url}: cannot connect: {exc.strerror or exc}") from None
    except UnicodeError:
        raise Unreachable(f"{endpoint.url}: '{endpoint.host}' is no name that a host can have") from None
    return connection
