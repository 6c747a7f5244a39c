"""Heads that arrive again: handled as the first time, whatever surrounds them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config.schema import LimitsConfig
from penstock.serving.http.listener import KNOWN_HEADS
from penstock.serving.http.server import HttpServer
from support.backend import FakeBackend

HEADS = st.sampled_from(
    [
        ("POST", "/predictions/echo", ()),
        ("POST", "/predictions/echo", ("Content-Type: image/png",)),
        ("POST", "/predictions/echo?a=1", ("content-type: text/plain", "X-Own: 1", "x-own: 2")),
        ("POST", "/predictions/echo", ("Connection: keep-alive", "Accept: */*")),
        ("POST", "/predictions/echo", ("Accept: text/event-stream",)),
        ("POST", "/predictions/echo", ("X-Request-Id: r1",)),
        ("POST", "/predictions/echo", ("X-Deadline-Ms: soon",)),
        ("POST", "/predictions/none", ()),
        ("POST", "/v2/models/echo/infer", ("Content-Type: application/json",)),
        ("POST", "/v2/models/echo/infer", ("Content-Type: application/octet-stream", "Connection: Keep-Alive")),
        ("POST", "/v2/models/echo/infer", ("Inference-Header-Content-Length: 2",)),
        ("PUT", "/predictions/echo", ()),
        ("GET", "/v2/health/live", ()),
        ("GET", "/ping", ("Connection: keep-alive", "Accept: */*")),
        ("GET", "/v2/models/none/ready", ()),
        (
            "POST",
            "/predictions/echo",
            ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA"),
        ),
        ("GET", "/ping", ("Upgrade: TLS/1.0", "Connection: upgrade")),
        ("POST", "/predictions/echo", ("X-Priority: 1 ", "Content-Type: text/plain ")),
        ("GET", "/predictions/echo", ()),
        ("POST", "/ping", ()),
        ("POST", "/nowhere", ()),
    ]
)
REQUESTS = st.lists(st.tuples(HEADS, st.sampled_from([b"", b"{}", b"x" * 5000])), min_size=2, max_size=8)


def encoded(request: Any) -> bytes:
    (method, path, lines), body = request
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *lines, "", ""])
    return head.encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"date:")]
    if b"transfer-encoding: chunked" in lines:
        return b"\n".join(lines), await reader.readuntil(b"0\r\n\r\n")
    length = next(int(line[16:]) for line in lines if line.startswith(b"content-length: "))
    return b"\n".join(lines), await reader.readexactly(length)


async def exchange(pieces: list[bytes], count: int) -> list[Any]:
    """The answers to `count` requests sent as these pieces, each with what the backend received for it."""
    backend = FakeBackend()
    server = HttpServer(backend, LimitsConfig())
    _, port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.001)
    answers = [await asyncio.wait_for(answer(reader), 10.0) for _ in range(count)]
    writer.close()
    await server.close(1.0)
    items = [
        (replace(call.item, source=None), call.item.source.pseudo_headers(), call.budget_s, call.priority)
        for call in backend.calls
    ]
    return [answers, items]


@settings(max_examples=25, deadline=None)
@given(requests=REQUESTS, cuts=st.lists(st.integers(0, 20_000), max_size=4), whole=st.booleans())
def test_a_repeated_head_is_handled_like_the_first(requests: list[Any], cuts: list[int], whole: bool) -> None:
    async def run() -> None:
        alone = [await exchange([encoded(request)], 1) for request in requests]
        sent = [encoded(request) for request in requests]
        if not whole:
            data = b"".join(sent)
            places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
            sent = [data[start:end] for start, end in itertools.pairwise(places) if start < end]
        answers, items = await exchange(sent * 2, 2 * len(requests))
        assert answers == [found for one, _ in alone * 2 for found in one]
        assert items == [item for _, one in alone * 2 for item in one]

    asyncio.run(run())


async def test_a_known_head_is_refused_once_its_token_is_revoked(asking):
    async with asking(tokens=frozenset({b"old"})) as (listener, client):
        for status in (200, 200, 200, 401, 401):
            if status == 401:
                listener.server.flavor.set_tokens(frozenset({b"new"}))
            assert (await client.ask("/predictions/echo", b"{}", "Authorization: Bearer old")).status == status
            assert (await client.fetch("/v2", "Authorization: Bearer old")).status == status


async def test_a_known_health_check_is_answered_from_the_state_of_now(asking):
    async with asking() as (listener, client):
        for healthy in (True, True, True, False, True):
            listener.backend.ready = lambda healthy=healthy: healthy
            reply = await client.fetch("/ping")
            assert (reply.status, reply.body) == (
                (200, b'{"status":"Healthy"}') if healthy else (503, b'{"status":"Unhealthy"}')
            )


async def test_heads_that_never_repeat_fill_no_memory(asking, monkeypatch):
    monkeypatch.setattr("penstock.serving.http.listener.SWEEP_S", 1000.0)  # a sweep clears what is full
    limits = dict.fromkeys(("header_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s"), 10_000.0)
    async with asking(**limits) as (listener, client):
        for n in range(KNOWN_HEADS + 100):
            assert (await client.ask("/predictions/echo", b"", f"x-trace: {n}")).status == 200
        known = listener.server.listener.clock.known_heads
        assert len(known) == KNOWN_HEADS
        listener.server.listener.clock.tick()
        assert not known
        assert (await client.ask("/predictions/echo", b"", "x-long: " + "x" * 5000)).status == 200
        assert not known
