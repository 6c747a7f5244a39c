"""The listener behind TLS. The key pair in `tls/` is for these tests only: self-signed, for localhost."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from penstock.config.schema import LimitsConfig
from penstock.serving.http.admin import management_routes
from penstock.serving.http.auth import make_ssl_context
from penstock.serving.http.server import HttpServer, NativeFlavor
from support.backend import FakeBackend

HERE = Path(__file__).parents[3] / "tls"
CERT, KEY = str(HERE / "cert.pem"), str(HERE / "key.pem")


def client(port: int, cert: bool = False) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=CERT)
    if cert:
        context.load_cert_chain(CERT, KEY)
    return httpx.AsyncClient(verify=context, base_url=f"https://localhost:{port}", trust_env=False, timeout=60)


async def test_small_and_large_bodies_pass_through_tls():
    backend = FakeBackend()
    server = HttpServer(backend, LimitsConfig(max_body_bytes=2**22), ssl=make_ssl_context(CERT, KEY))
    _, port = await server.start("127.0.0.1", 0)
    async with client(port) as http:
        for size in (10, 70_000, 3_000_000):
            assert (await http.post("/predictions/echo", content=b"x" * size)).content == b"x" * size
        assert (await http.post("/predictions/echo", content=b"x" * 2**23)).status_code == 413
    await server.close(5.0)
    assert backend.used_bytes == 0


async def test_a_configured_authority_requires_client_certificates():
    server = HttpServer(FakeBackend(), LimitsConfig(), ssl=make_ssl_context(CERT, KEY, CERT))
    _, port = await server.start("127.0.0.1", 0)
    async with client(port, cert=True) as http:
        assert (await http.get("/ping")).status_code == 200
    async with client(port) as http:
        with pytest.raises(httpx.TransportError):
            await http.get("/ping")
    await server.close(5.0)


async def test_the_management_api_speaks_tls_too():
    flavor = NativeFlavor(templates=management_routes(FakeBackend(), None))
    server = HttpServer(FakeBackend(), LimitsConfig(), ssl=make_ssl_context(CERT, KEY), flavor=flavor)
    _, port = await server.start("127.0.0.1", 0)
    async with client(port) as http:
        assert (await http.get("/ping")).json() == {"status": "Healthy"}
    await server.close(1.0)


async def test_silent_connections_count_before_their_handshake():
    server = HttpServer(FakeBackend(), LimitsConfig(max_connections=3), ssl=make_ssl_context(CERT, KEY))
    _, port = await server.start("127.0.0.1", 0)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert server.listener.counts.refused == 1
    for _, each in (*silent, (reader, writer)):
        each.close()
    await server.close(5.0)
