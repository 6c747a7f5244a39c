"""Clients that leave at every stage of a request: nothing is left of them, and the others are answered."""

import asyncio
import json
import random
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from penstock.config.schema import BatchingConfig, LimitsConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.serving.http.asgi import InferenceApp
from penstock.serving.http.server import HttpServer
from penstock.serving.observe.prometheus import PrometheusObserver
from support.asgi_server import serving_app

LARGE = 300_000
BODY = b"x" * LARGE
SOURCE = """
    import os
    import time
    from pathlib import Path

    HERE = Path(__file__).parent

    def wait():
        (HERE / "reached").touch()
        while not (HERE / "gate").exists():
            time.sleep(0.002)

    def gated(items):
        wait()
        return [len(item) for item in items]

    def rows(items):
        wait()
        return [[len(part) for part in item] for item in items]

    def stream(items):
        yield ["first" for _ in items]
        wait()
        for _ in range(50):
            yield ["x" * 100_000 for _ in items]

    def endless(items):
        while True:
            yield ["x" for _ in items]
            time.sleep(0.001)

    def dies(items):
        wait()
        os._exit(3)
"""


class Site:
    """An engine and its listener, in this process; the models wait for `open_gate`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = PrometheusObserver()
        self.engine = Engine(LimitsConfig(pool_bytes=64 * 2**20), [self.metrics])
        self.http = HttpServer(self.engine, LimitsConfig())
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def load(self, name: str, **batching: Any) -> None:
        target = f"{self.folder / 'app.py'}:{name}"
        await self.engine.load(name, ModelConfig(target=target, batching=BatchingConfig(max_hold_s=0.0, **batching)))

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    async def reached(self) -> None:
        await until((self.folder / "reached").exists)

    def pending(self, name: str) -> int:
        batcher = self.engine._registry.find(name, None).batcher
        assert batcher is not None
        return batcher.pending

    async def post(self, name: str, body: bytes, sent: int | None = None, *lines: str) -> asyncio.StreamWriter:
        """Sends a request, or the first bytes of one."""
        self.reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        first = f"POST /predictions/{name} HTTP/1.1"
        head = "\r\n".join([first, "Host: a", f"Content-Length: {len(body)}", *lines, "", ""])
        writer.write(head.encode() + body[:sent])
        await writer.drain()
        return writer

    async def post_rows(self, name: str, rows: int) -> asyncio.StreamWriter:
        """Sends a large request of so many rows."""
        body = json.dumps(["x" * (LARGE // rows)] * rows).encode()
        return await self.post(name, body, None, f"X-Rows: {rows}", "Content-Type: application/json")

    async def empty(self, name: str) -> None:
        """Returns when nothing of any request is left."""
        await until(lambda: not self.pending(name) and not self.engine.pool.in_use_bytes and not self.http.connections)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    (tmp_path / "app.py").write_text(textwrap.dedent(SOURCE))
    site = Site(tmp_path)
    _, site.port = await site.http.start("127.0.0.1", 0)
    yield site
    site.open_gate()
    for writer in site.writers:
        writer.transport.abort()
    await site.http.close(1.0)
    await site.engine.close(5.0)


async def test_before_the_body_ends(site: Site) -> None:
    await site.load("gated")
    for length in (1000, LARGE):
        writer = await site.post("gated", b"x" * length, length // 2)
        await until(lambda: site.http.connections)
        writer.transport.abort()
        await site.empty("gated")
    assert not (site.folder / "reached").exists()


@pytest.mark.parametrize("resets", [True, False])
async def test_in_the_queue(site: Site, resets: bool) -> None:
    await site.load("gated", max_batch_size=1)
    for _ in range(2):  # one runs, one is ahead of the queue
        await site.post("gated", BODY)
    await site.reached()
    await until(lambda: site.pending("gated") == 2)
    used = site.engine.pool.in_use_bytes
    waiting = [await site.post("gated", BODY) for _ in range(3)]
    await until(lambda: site.pending("gated") == 5)
    for writer in waiting:
        if resets:
            writer.transport.abort()
        else:
            writer.close()
    await until(lambda: site.pending("gated") == 2)
    assert site.engine.pool.in_use_bytes == used  # given back at once, while the others still run
    site.open_gate()
    await until(lambda: not site.pending("gated") and not site.engine.pool.in_use_bytes)
    page = site.metrics.render().decode()
    assert 'penstock_rejections_total{model="gated",version="1",reason="cancelled"} 3\n' in page


async def test_while_it_runs(site: Site) -> None:
    await site.load("gated")
    writer = await site.post("gated", BODY)
    await site.reached()
    writer.transport.abort()
    await until(lambda: not site.http.connections)
    assert site.engine.pool.in_use_bytes > 0  # a worker still reads it
    site.open_gate()
    await site.empty("gated")


async def test_while_parts_of_a_split_request_run_and_wait(site: Site) -> None:
    await site.load("rows", max_batch_size=2, rows="header:x-rows")
    writer = await site.post_rows("rows", 9)
    await site.reached()
    writer.transport.abort()
    await until(lambda: not site.http.connections)
    site.open_gate()
    await site.empty("rows")


async def test_while_its_answer_streams(site: Site) -> None:
    await site.load("stream")
    writer = await site.post("stream", BODY)
    assert b"200 OK" in await site.reader.readline()
    await site.reached()
    writer.transport.abort()
    await until(lambda: not site.http.connections)
    site.open_gate()
    await site.empty("stream")


async def test_an_endless_stream_ends_when_its_reader_leaves(site: Site) -> None:
    await site.load("endless")
    for _ in range(2):
        writer = await site.post("endless", BODY)
        assert b"200 OK" in await site.reader.readline()
        writer.transport.abort()
        await site.empty("endless")


@pytest.mark.parametrize("rows", [1, 9])
async def test_before_its_worker_dies(site: Site, rows: int) -> None:
    await site.load("dies", max_batch_size=2, rows="header:x-rows")
    leaves = await site.post_rows("dies", rows)
    await site.reached()
    leaves.transport.abort()
    stays = await site.post("dies", BODY)
    reader = site.reader
    await until(lambda: site.pending("dies") == 2)
    site.open_gate()
    assert b" 503 " in await asyncio.wait_for(reader.readline(), 10)
    stays.close()
    await site.empty("dies")


async def test_a_storm_of_clients_that_leave_when_they_like(site: Site) -> None:
    await site.load("gated", max_batch_size=4, max_queue=1000)
    site.open_gate()
    chance = random.Random(7)

    async def client(i: int) -> bytes:
        size = chance.choice([10, 1000, LARGE])
        leaves = chance.random() < 0.6
        sent = chance.randrange(size) if leaves and chance.random() < 0.5 else None
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        head = f"POST /predictions/gated HTTP/1.1\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode() + b"x" * (size if sent is None else sent))
        if leaves:
            await asyncio.sleep(chance.random() * 0.02)
            writer.transport.abort()
            return b""
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.endswith(b"\r\n\r\n%d" % size), answer
        return answer

    await asyncio.gather(*(client(i) for i in range(150)))
    await site.empty("gated")


async def test_an_engine_mounted_in_an_app_answers_and_forgets_who_leaves(site: Site) -> None:
    await site.load("gated", max_batch_size=1)
    app = Starlette(routes=[Mount("/models", InferenceApp(site.engine, LimitsConfig()))])
    async with serving_app(app) as root, httpx.AsyncClient() as client:
        url = f"{root}/models"
        leaves = asyncio.create_task(client.post(f"{url}/predictions/gated", content=BODY))
        await site.reached()
        leaves.cancel()
        stays = asyncio.create_task(client.post(f"{url}/predictions/gated", content=BODY))
        await until(lambda: site.pending("gated") == 2)
        site.open_gate()
        answer = await stays
        assert (answer.status_code, answer.text) == (200, str(LARGE))
        assert (await client.get(f"{url}/v2/models/gated/ready")).status_code == 200
        assert (await client.post(f"{url}/predictions/other", content=b"")).status_code == 404
        assert "/predictions/gated" in (await client.get(f"{url}/openapi.json")).json()["paths"]
        await site.empty("gated")
