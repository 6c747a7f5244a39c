"""The load sends whole passes, never two requests at once on a connection, and counts what it lost."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable

import pytest

from penstock.demo import load as load_module
from penstock.demo.load import Load, percentile, post

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


async def serving(handle: Handle) -> tuple[asyncio.Server, int]:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)  # type: ignore[misc]
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(closing, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def read_body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return await reader.readexactly(length)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        body = await read_body(reader)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        for piece in (head[:10], head[10:], body[:1], body[1:]):
            writer.write(piece)
            await writer.drain()


REQUESTS = [post("h", "/p", "image/png", b"body %d" % number) for number in range(5)]


async def test_every_request_of_every_pass_is_answered_once() -> None:
    server, port = await serving(echo)
    answers: Counter[tuple[int, int, bytes]] = Counter()
    async with server:
        load = Load(REQUESTS, lambda number, status, body: answers.update([(number, status, body)]))
        figures = await load.run("127.0.0.1", port, connections=3, at_least=7)
        await load.run("127.0.0.1", port, connections=8)
    assert answers == {(number, 200, b"body %d" % number): 3 for number in range(5)}, "two passes, then one"
    assert len(figures.latencies_s) == 10
    assert figures.lost == 0
    assert 0 < max(figures.latencies_s) <= figures.seconds


async def test_a_lost_connection_is_counted_and_the_others_go_on() -> None:
    seen = 0

    async def dies_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        while True:
            body = await read_body(reader)
            seen += 1
            if seen == 2:
                return
            writer.write(b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    statuses: list[int] = []
    server, port = await serving(dies_once)
    async with server:
        load = Load(REQUESTS, lambda number, status, body: statuses.append(status))
        figures = await load.run("127.0.0.1", port, connections=2)
    assert (figures.lost, statuses) == (1, [503] * 4)


async def test_an_answer_that_is_no_http_ends_the_run() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_body(reader)
        writer.write(b"what?\r\n\r\n")
        await reader.read()

    server, port = await serving(babble)
    async with server:
        figures = await Load(REQUESTS, lambda *_: None).run("127.0.0.1", port, connections=2)
    assert (figures.lost, len(figures.latencies_s)) == (2, 0)


async def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # takes the request, and ends when the client does

    monkeypatch.setattr(load_module, "PATIENCE_S", 0.02)
    server, port = await serving(silent)
    async with server:
        with pytest.raises(TimeoutError, match="2 requests are open"):
            await Load(REQUESTS, lambda *_: None).run("127.0.0.1", port, connections=2)


async def test_a_server_that_is_not_there_raises() -> None:
    server, port = await serving(echo)
    server.close()
    await server.wait_closed()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await Load(REQUESTS, lambda *_: None).run("127.0.0.1", port, connections=1)


def test_percentiles_are_the_nearest_rank() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
    assert math.isnan(percentile([], 0.5))
