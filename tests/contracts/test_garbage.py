"""Requests leave nothing to the garbage collector, whichever way they come: it would stop a server for milliseconds."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from penstock import ThreadedStreamer, tracing
from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.errors import BadRequest
from penstock.serving.http.asgi import InferenceApp
from penstock.serving.http.server import HttpServer
from support.grpc_site import OPEN, request, site

REQUESTS = 60
MODEL = """\
from penstock import BadRequest

def echo(items):
    return [BadRequest("odd") if item == 1 else item for item in items]

def parts(item):
    yield from (item, item)
"""
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}
BODIES = {
    "an item": ("/predictions/echo", b'{"a": 2}', 200),
    "an item that fails": ("/predictions/echo", b"1", 400),
    "an item that is no JSON": ("/predictions/echo", b"{", 400),
    "a tensor": ("/v2/models/echo/infer", msgspec.json.encode({"inputs": [TENSOR]}), 200),
    "a model that is missing": ("/predictions/missing", b"2", 404),
}


async def left(ask: Callable[[], Awaitable[Any]]) -> dict[str, int]:
    """How many objects of each class of this package only the collector would free, if each request left one."""
    for _ in range(20):
        await ask()
    gc.collect()
    gc.disable()
    try:
        for _ in range(REQUESTS):
            await ask()
        await asyncio.sleep(0.05)  # what ends after the answer
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(o).__qualname__ for o in gc.garbage if type(o).__module__.startswith("penstock"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return {name: count for name, count in found.items() if count >= REQUESTS}


@pytest.fixture
async def engine(tmp_path):
    file = tmp_path / "app.py"
    file.write_text(MODEL)
    async with Engine(LimitsConfig()) as engine:
        for name in ("echo", "parts"):
            await engine.load(name, ModelConfig(target=f"{file}:{name}", transport="thread"))
        yield engine


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("kind", BODIES)
async def test_http(engine, kind, traced, monkeypatch):
    if traced:
        monkeypatch.setattr(tracing, "tracer", tracing.Tracer(lambda span: None, ratio=1.0, max_per_s=1e9))
    path, body, status = BODIES[kind]
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    server = HttpServer(engine, LimitsConfig())
    reader, writer = await asyncio.open_connection(*await server.start("127.0.0.1", 0))

    async def ask() -> None:
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 %d" % status)
        await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r")[0]))

    try:
        assert await left(ask) == {}
    finally:
        writer.close()
        await server.close(1)


async def test_grpc(engine):
    async with site(backend=engine) as found:
        client = await found.connect(OPEN)
        ids = iter(range(1, 10_000, 2))

        async def ask() -> None:
            number = next(ids)
            await client.infer(number, request(16))
            assert (await client.reply(number))[0] == "0"

        assert await left(ask) == {}


async def test_asgi(engine):
    app = InferenceApp(engine)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predictions/echo",
        "headers": [(b"content-type", b"application/json")],
    }

    async def ask() -> None:
        received, sent = iter([{"type": "http.request", "body": b'{"a": 2}'}]), []

        async def receive() -> Any:
            return next(received, None) or await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        assert sent[0]["status"] == 200

    assert await left(ask) == {}


async def test_engine(engine):
    async def ask() -> None:
        assert await engine.infer("echo", 2) == 2
        assert await engine.infer_many("echo", [2, 3]) == [2, 3]
        with suppress(BadRequest):
            await engine.infer("echo", 1)

    assert await left(ask) == {}


async def test_stream(engine):
    async def ask() -> None:
        assert [part async for part in engine.stream("parts", 2)] == [2, 2]

    assert await left(ask) == {}


async def test_streamer():
    with ThreadedStreamer(lambda items: items, batch_size=4) as streamer:

        async def ask() -> None:
            assert streamer.predict([2]) == [2]
            assert streamer.submit([2]).result() == [2]

        assert await left(ask) == {}
