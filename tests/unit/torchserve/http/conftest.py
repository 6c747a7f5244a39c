"""A TorchServe listener over a fake administration, and a client that asks one thing a connection."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.config.schema import LimitsConfig
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.http.listener import make_listener
from support.backend import FakeBackend
from support.torchserve import FakeAdministration, KnownBackend

LIMIT_S = 10.0
ALL = frozenset({"inference", "management", "metrics"})


class Reply:
    """Status, headers (lower case) and body of one answer."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)


class Site:
    """A running listener: `await site(method, target, *header_lines, body=...)` is the reply."""

    def __init__(self, administration: FakeAdministration, backend: FakeBackend, port: int) -> None:
        self.administration = administration
        self.backend = backend
        self.port = port

    async def __call__(self, method: str, target: str, *lines: str, body: bytes = b"") -> Reply:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = [f"{method} {target} HTTP/1.1", "Host: t", f"Content-Length: {len(body)}", *lines, "Connection: close"]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        try:
            return Reply(await asyncio.wait_for(reader.read(), LIMIT_S))
        finally:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
def administration() -> FakeAdministration:
    return FakeAdministration()


@pytest.fixture
def site(administration: FakeAdministration) -> Callable[..., Any]:
    """`async with site(groups=..., scrape=..., **keys) as ask`; by default everything is on."""

    @asynccontextmanager
    async def run(groups: frozenset[Any] = ALL, scrape: Any = None, **keys: Any) -> AsyncIterator[Site]:
        async def show(names: list[str]) -> bytes:
            return b"metrics of " + ",".join(names).encode()

        backend = KnownBackend()
        config = ListenerConfig(
            groups, Properties(**{"enable_model_api": True, "ts_open_inference_protocol": True} | keys)
        )
        server = make_listener(backend, administration, config, LimitsConfig(), scrape=scrape or show)
        _, port = await server.start("127.0.0.1", 0)
        try:
            yield Site(administration, backend, port)
        finally:
            await server.close(1.0)

    return run
