"""A TorchServe listener with TLS: plain HTTP gets a refusal, and faulty clients do not affect others."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import ConfigError
from penstock.serving.http.auth import make_ssl_context
from penstock.serving.http.server import HttpServer
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.http.listener import make_listener
from support.backend import FakeBackend
from support.torchserve import FakeAdministration

LIMIT_S = 10.0
HERE = Path(__file__).parents[3] / "tls"
CERT, KEY = str(HERE / "cert.pem"), str(HERE / "key.pem")
REFUSAL = (
    b"HTTP/1.1 403 This TorchServe instance only accepts HTTPS requests\r\nPragma: no-cache\r\n"
    b"Cache-Control: no-cache; no-store, must-revalidate, private\r\nExpires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


@asynccontextmanager
async def guarded(**limits: Any) -> AsyncIterator[tuple[HttpServer, int]]:
    server = make_listener(
        FakeBackend({"m": lambda call: call.reply(content_type="")}),
        FakeAdministration(),
        ListenerConfig(frozenset({"inference"}), Properties()),
        LimitsConfig(**limits),
        ssl=make_ssl_context(CERT, KEY),
    )
    _, port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.close(1.0)


async def plain(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def secured(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context(cafile=CERT)
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")


async def rest(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), LIMIT_S)


def waiting(server: HttpServer) -> int:
    assert server._gate is not None
    return server._gate.waiting


async def until_gone(server: HttpServer) -> None:
    async with asyncio.timeout(LIMIT_S):
        while waiting(server) or server.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def post(port: int, body: bytes) -> bytes:
    reader, writer = await secured(port)
    for _ in range(2):  # the first may lie behind the handshake in one segment, the second finds all settled
        writer.write(b"POST /predictions/m HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.readexactly(len(body)), LIMIT_S)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    "data", [b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n", b"G", b"nonsense\n", b"POST / " + b"x" * 99_999]
)
async def test_plain_http_is_refused_in_the_status_line(data):
    async with guarded() as (server, port):
        reader, writer = await plain(port)
        writer.write(data)
        assert await rest(reader) == REFUSAL
        writer.close()
        await until_gone(server)
        assert await post(port, b"a") == b"a"


async def test_a_refused_client_that_stays_is_dropped(monkeypatch):
    monkeypatch.setattr("penstock.serving.http.sockets.LINGER_S", 0.05)
    async with guarded() as (server, port):
        reader, writer = await plain(port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await rest(reader) == REFUSAL
        assert waiting(server) == 1
        await until_gone(server)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("output", [b"", b"\x16", b"\x16\x03\x01\x02\x00"])
async def test_a_silent_or_slow_client_is_dropped(output):
    async with guarded(header_timeout_s=0.1) as (server, port):
        reader, writer = await plain(port)
        writer.write(output)
        with contextlib.suppress(ConnectionError):
            assert REFUSAL not in await rest(reader)
        writer.close()
        await until_gone(server)


async def test_a_failed_handshake_closes_only_its_own_connection():
    async with guarded() as (server, port):
        reader, writer = await plain(port)
        writer.write(b"\x16" + b"no handshake at all" * 100)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await rest(reader)
        writer.close()
        await until_gone(server)
        assert await post(port, b"a") == b"a"


async def test_clients_that_disconnect_leave_nothing_behind():
    async with guarded() as (server, port):
        for output in (b"", b"\x16", b"GET "):
            for _ in range(5):
                _, writer = await plain(port)
                writer.write(output)
                writer.close()
        assert await post(port, b"a") == b"a"
        await until_gone(server)


async def test_closing_drops_connections_before_their_handshake():
    async with guarded() as (server, port):
        peers = [await plain(port) for _ in range(3)]
        peers[1][1].write(b"\x16")
        async with asyncio.timeout(LIMIT_S):
            while waiting(server) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await server.close(1.0)
        for reader, writer in peers:
            with contextlib.suppress(ConnectionError):
                assert await rest(reader) == b""
            writer.close()
        await until_gone(server)


async def test_a_port_in_use_and_an_invalid_host_are_refused():
    async with guarded() as (_, port):
        for host, at in (("127.0.0.1", port), ("x" * 300, 0)):
            other = make_listener(
                FakeBackend(),
                FakeAdministration(),
                ListenerConfig(frozenset({"inference"}), Properties()),
                LimitsConfig(),
                ssl=make_ssl_context(CERT, KEY),
            )
            with pytest.raises(ConfigError, match=r"cannot listen on .*inference_address"):
                await other.start(host, at, "inference_address")
