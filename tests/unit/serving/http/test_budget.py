"""`limits.max_transit_bytes` on HTTP: parts of bodies and unread answers count, and too much is refused with 503."""

from __future__ import annotations

import pytest

from penstock.core.contracts import ListenerSnapshot
from penstock.serving.http.context import HEAD as HTTP_HEAD
from penstock.serving.http.listener import reading_of
from support.backend import FakeBackend

INFER = "/v2/models/echo/infer"
HEAD = f"POST {INFER} HTTP/1.1\r\nHost: test\r\n".encode()
BODIES = {
    "of known length": HEAD + b"Content-Length: 60000\r\n\r\n" + bytes(50_000),
    "in chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\nc350\r\n" + bytes(50_000) + b"\r\n",
}


@pytest.mark.parametrize("name", BODIES)
async def test_bodies_under_way_count_over_all_connections(name, listen, wait_until):
    async with listen(max_transit_bytes=220_000) as listener:
        budget = listener.server.listener.budget
        senders = [await listener.connect() for _ in range(5)]
        for client in senders[:4]:
            client.send(BODIES[name])
        await wait_until(lambda: budget._parts >= 200_000)
        senders[4].send(BODIES[name])
        answer = await senders[4].answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert b"limits.max_transit_bytes" in answer.body
        whole = await listener.connect()
        assert (await whole.ask(INFER, b"{}")).status == 200  # what comes whole costs nothing
        for client in senders:
            await client.close()
        await wait_until(lambda: budget._parts == 0)


async def test_who_does_not_read_is_refused_and_then_dropped_and_others_are_served(
    listen, wait_until, monkeypatch, caplog
):
    monkeypatch.setattr("penstock.serving.http.listener.STUCK_S", 0.5)
    backend = FakeBackend({"echo": lambda call: call.reply(bytes(30_000_000) if call.body() == b"large" else None)})
    limits = {"header_timeout_s": 0.2, "write_timeout_s": 30.0, "write_buffer_bytes": 2**26}
    async with listen(backend, max_transit_bytes=1_000_000, **limits) as listener:
        budget = listener.server.listener.budget
        slow = await listener.connect()
        slow.writer.transport.pause_reading()
        slow.post(INFER, b"large")
        await wait_until(lambda: budget.full)
        assert reading_of([listener.server.listener]).unsent_bytes > 1_000_000
        slow.post(INFER, b"more")
        other = await listener.connect()  # now, because silence ends a connection soon
        assert (await other.ask(INFER, b"{}")).status == 200
        await wait_until(lambda: listener.server.connections == 1)
        assert [call.body() for call in backend.calls] == [b"large", b"{}"]
        await wait_until(lambda: not budget.full)
        assert reading_of([listener.server.listener]) == ListenerSnapshot(0, {"listener_full": 1})
    assert "event=requests_refused port=" in caplog.text
    assert "reason=listener_full count=1 hint='raise limits.max_transit_bytes" in caplog.text


async def test_heads_and_requests_that_wait_count(asking, wait_until):
    limits = {"header_timeout_s": 5.0, "write_timeout_s": 0.2, "max_transit_bytes": 20_000}
    async with asking(**limits) as (listener, client):
        client.send(HEAD + b"x-a: " + b"b" * 30_000)
        await wait_until(lambda: [each.phase for each in listener.server.listener.connections] == [HTTP_HEAD])
        client.send(b"b" * 30_000)
        await wait_until(lambda: listener.server.listener.budget.full)
    async with asking(FakeBackend({"echo": lambda call: None}), **limits, max_pipelined=1) as (listener, client):
        client.send((HEAD + b"Content-Length: 2\r\n\r\n{}") * 100)
        await wait_until(lambda: listener.server.listener.budget.full)


async def test_the_time_until_a_slow_client_has_a_response_counts_for_its_model(listen, wait_until):
    backend = FakeBackend({"echo": lambda call: call.reply(bytes(30_000_000) if call.body() == b"large" else None)})
    async with listen(backend, header_timeout_s=0.2, write_timeout_s=30.0, write_buffer_bytes=2**26) as listener:
        written, sweep_s = listener.server.listener.counts.write_s, listener.server.listener.clock.sweep_s
        quick, slow = await listener.connect(), await listener.connect()
        assert (await quick.ask(INFER, b"{}")).status == 200
        slow.writer.transport.pause_reading()
        slow.post("/v2/models/nothing/infer", b"large")
        slow.post(INFER, b"large")
        await wait_until(lambda: written["echo", None] >= 3 * sweep_s)
        assert set(written) == {("echo", None)}
