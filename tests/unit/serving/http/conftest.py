"""A listener on a free port, and a raw client for bytes that no HTTP library would send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from penstock.config.schema import LimitsConfig
from penstock.serving.http.server import HttpServer
from support.backend import FakeBackend

LIMIT_S = 10.0  # of any single wait of a test: a hang fails instead of hanging


class Answer:
    """Status, headers (lower case) and body of one answer."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: bytes, *lines: str) -> None:
        head = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *lines, "", ""]
        self.send("\r\n".join(head).encode() + body)

    def get(self, path: str, *lines: str, method: str = "GET") -> None:
        self.send("\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *lines, "", ""]).encode())

    async def ask(self, path: str, body: bytes, *lines: str) -> Answer:
        """The response to a POST."""
        self.post(path, body, *lines)
        return await self.answer()

    async def fetch(self, path: str, *lines: str, method: str = "GET") -> Answer:
        """The response to a request without a body."""
        self.get(path, *lines, method=method)
        return await self.answer(bodiless=method == "HEAD")

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split(" ")[1]), headers

    async def answer(self, bodiless: bool = False) -> Answer:
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        elif "content-length" in headers and not bodiless:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), LIMIT_S)
        else:
            body = b"" if bodiless or status == 204 else await self.rest()
        return Answer(status, headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await asyncio.wait_for(self.reader.readline(), LIMIT_S), 16):
            yield (await asyncio.wait_for(self.reader.readexactly(size + 2), LIMIT_S))[:-2]
        await self.reader.readexactly(2)

    async def rest(self) -> bytes:
        """All bytes until the server closes."""
        return await asyncio.wait_for(self.reader.read(), LIMIT_S)

    async def closed(self) -> bool:
        """True when the server has closed and nothing came before that."""
        try:
            return await self.rest() == b""
        except ConnectionResetError:
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, BrokenPipeError):
            pass


@pytest.fixture
def connect() -> Callable[[int], Any]:
    """`async with connect(port) as client`."""

    @asynccontextmanager
    async def run(port: int) -> AsyncIterator[Client]:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield client
        finally:
            await client.close()

    return run


class Listener:
    """A running HttpServer and what it is made of."""

    def __init__(self, server: HttpServer, backend: FakeBackend, port: int) -> None:
        self.server = server
        self.backend = backend
        self.port = port
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client


Listen = Callable[..., Any]


@pytest.fixture
def listen() -> Listen:
    """`async with listen(backend=..., tokens=..., **limits) as listener`."""

    @asynccontextmanager
    async def run(
        backend: FakeBackend | None = None, tokens: frozenset[bytes] = frozenset(), **limits: Any
    ) -> AsyncIterator[Listener]:
        backend = backend or FakeBackend()
        server = HttpServer(backend, LimitsConfig(**limits), tokens=tokens)
        _, port = await server.start("127.0.0.1", 0)
        listener = Listener(server, backend, port)
        try:
            yield listener
        finally:
            for client in listener.clients:
                await client.close()
            await server.close(1.0)
        assert server.listener.budget._parts == 0, "bytes that were counted and never given back"

    return run


@pytest.fixture
def asking(listen: Listen) -> Listen:
    """`async with asking(...) as (listener, client)`: as `listen`, with a first connection."""

    @asynccontextmanager
    async def run(*backend: FakeBackend, **options: Any) -> AsyncIterator[tuple[Listener, Client]]:
        async with listen(*backend, **options) as listener:
            yield listener, await listener.connect()

    return run


class _Loop(uvloop.Loop):
    """Closes the servers that a failed test left open: `uvloop.Loop.close` may wait for them for ever."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        server = await super().create_server(*args, **kwargs)
        self._left = [*getattr(self, "_left", ()), server]
        return server

    def close(self) -> None:
        for server in getattr(self, "_left", ()):
            server.close()
        super().close()


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """Every test runs on both loops: they differ in how they read, pause and close."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": _Loop}
