"""The listener under clients that are wrong, slow or hostile: refused precisely, in bounded time and memory."""

from __future__ import annotations

import asyncio
import tracemalloc

import msgspec
import pytest

from penstock.serving.http.context import HEAD
from penstock.serving.http.listener import BODY_RATE
from penstock.types import ItemResult
from support.backend import Call, FakeBackend

CHUNKED = b"POST /predictions/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = b"POST /predictions/echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
SHORT = {"header_timeout_s": 0.1, "body_timeout_s": 0.1, "idle_timeout_s": 0.1}


def hold(call: Call) -> None:
    """The model answers when the test says so."""


async def flood(client, data: bytes, times: int) -> None:
    """Sends until it is all gone or the server has had enough."""
    try:
        for _ in range(times):
            client.send(data)
            await client.writer.drain()
    except ConnectionError:
        pass


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("POST", "/predictions/nobody", 404, None),
        ("POST", "/predictions/echo/99", 404, None),
        ("POST", "/v2/models/nobody/infer", 404, None),
        ("GET", "/v2/models/nobody", 404, None),
        ("GET", "/v2/models/nobody/ready", 404, None),
        ("GET", "/nowhere", 404, None),
        ("POST", "/predictions", 404, None),
        ("POST", "/predictions//1", 404, None),
        ("POST", "/predictions/%C3%A9cho", 404, None),
        ("POST", "/predictions/../../etc/passwd", 404, None),
        ("POST", "/predictions/%2e%2e%2fetc", 404, None),
        ("POST", "/predictions/%00", 404, None),
        ("POST", "/v2/models/echo/versions/9/infer", 404, None),
        ("GET", "/predictions/%ff", 400, None),
        ("GET", "/predictions/echo", 405, "POST, PUT"),
        ("DELETE", "/predictions/echo", 405, "POST, PUT"),
        ("POST", "/ping", 405, "GET, HEAD"),
        ("OPTIONS", "/v2", 405, "GET, HEAD"),
    ],
)
async def test_unknown_routes_models_versions_and_methods_are_named(asking, method, path, status, allow):
    async with asking() as (_, client):
        answer = await client.fetch(path, "Content-Length: 0", method=method)
        assert (answer.status, answer.headers.get("allow")) == (status, allow)
        assert msgspec.json.decode(answer.body)["error"]
        client.get("/ping")  # the connection lives on
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"FETCH /ping HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nX: a\r\n b\r\n\r\n", 400),
        (b"POST /predictions/echo HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /predictions/echo HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (CHUNKED + b"zz\r\n", 400),
        (CHUNKED + b"1\r\nab\r\n", 400),
        (CHUNKED + b"ffffffffffffffffff\r\n", 400),
    ],
)
async def test_malformed_and_smuggled_requests_are_refused_and_the_connection_closed(asking, raw, status):
    async with asking() as (listener, client):
        client.send(raw + b"GET /ping HTTP/1.1\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert await client.closed()
        assert listener.backend.calls == []


async def test_a_refusal_waits_for_the_answers_before_it(asking, wait_until):
    async with asking(FakeBackend({"m": hold})) as (listener, client):
        client.post("/predictions/m", b"first")
        client.send(b"nonsense\r\n\r\n")
        await wait_until(lambda: listener.backend.calls)
        await asyncio.sleep(0)
        listener.backend.calls[0].reply()
        assert (await client.answer()).body == b"first"
        assert (await client.answer()).status == 400
        assert await client.closed()


@pytest.mark.parametrize("limit", [1000, 2**20])
async def test_a_body_over_the_limit_is_refused_before_it_is_read(asking, limit):
    async with asking(max_body_bytes=limit) as (listener, client):
        client.send(POST % (limit + 1))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert b"limits.max_body_bytes" in answer.body
        assert await client.closed()
        client = await listener.connect()
        assert (await client.ask("/predictions/echo", b"x" * limit)).status == 200


async def test_a_client_that_sends_on_after_413_reads_the_answer_and_costs_no_memory(asking):
    async with asking(max_body_bytes=2**20) as (listener, client):
        client.send(POST % 2**40)
        sending = asyncio.create_task(flood(client, b"x" * 65536, 500))
        assert (await client.answer()).status == 413
        tracemalloc.start()
        await sending
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 * 2**20
        assert listener.backend.used_bytes == 0


async def test_an_endless_chunked_body_is_cut_at_the_limit(asking):
    async with asking(max_body_bytes=300_000) as (listener, client):
        client.send(CHUNKED)
        sending = asyncio.create_task(flood(client, b"1000\r\n" + b"x" * 4096 + b"\r\n", 200))
        assert (await client.answer()).status == 413
        await sending
        assert listener.backend.used_bytes == 0


@pytest.mark.parametrize("junk", [b"1;" + b"e" * 4000, b"0\r\nX-T: " + b"t" * 4000])
async def test_endless_chunk_extensions_and_trailers_are_cut(asking, junk):
    async with asking() as (_, client):
        client.send(CHUNKED + junk)
        sending = asyncio.create_task(flood(client, b"e" * 4096, 200))
        assert (await client.answer()).status == 400
        await sending


async def test_ninety_megabytes_of_headers_are_refused_with_flat_memory(asking):
    async with asking() as (_, client):
        client.send(b"GET /ping HTTP/1.1\r\n")
        tracemalloc.start()
        sending = asyncio.create_task(flood(client, b"X-Header: " + b"h" * 8000 + b"\r\n", 90_000_000 // 8012))
        assert (await client.answer()).status == 431
        await sending
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * 2**20


@pytest.mark.parametrize(("size", "status"), [(900, 200), (1100, 431), (30_000, 431)])
async def test_the_head_limit_is_exact_for_a_head_in_one_piece(asking, size, status):
    async with asking(max_header_bytes=1000) as (_, client):
        assert (await client.fetch("/ping", "X: " + "h" * (size - 50))).status == status


@pytest.mark.parametrize("sent", [b"", b"GET /pi", b"POST /predictions/echo HTTP/1.1\r\nContent-Le"])
async def test_silent_and_half_sent_heads_are_timed_out(asking, sent):
    async with asking(**SHORT) as (_, client):
        client.send(sent)
        raw = await client.rest()
        assert raw.startswith(b"HTTP/1.1 408 ") if sent else raw == b""
        assert b"within 0.1 s (limits.header_timeout_s)" in raw or not sent


@pytest.mark.parametrize("start", [POST % 100, POST % 200_000, CHUNKED + b"5\r\n"])
async def test_half_a_body_is_timed_out_and_its_memory_given_back(asking, start):
    async with asking(**SHORT) as (listener, client):
        client.send(start + b"abc")
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert b"after 0.1 s (limits.body_timeout_s)" in answer.body
        assert listener.backend.used_bytes == 0


@pytest.mark.parametrize("framing", ["small", "large", "chunked"])
async def test_bytes_of_a_body_move_its_deadline_by_their_time_at_the_lowest_rate(asking, wait_until, framing):
    size = {"small": 60_000, "large": 3_000_000, "chunked": 0}[framing]
    line = f"Content-Length: {size}" if size else "Transfer-Encoding: chunked"
    async with asking() as (listener, client):
        client.send(f"POST /predictions/echo HTTP/1.1\r\nHost: a\r\n{line}\r\n\r\n".encode())

        async def deadline_after(nbytes: int, least: float) -> float:
            """The deadline once it has moved, from 5 s to `least`."""
            connection.deadline = 5.0 + (now := asyncio.get_running_loop().time())
            client.send(b"%x\r\n%b\r\n" % (nbytes, bytes(nbytes)) if not size else bytes(nbytes))
            await wait_until(lambda: connection.deadline >= now + least)
            return float(connection.deadline - now)

        await wait_until(lambda: listener.server.listener.connections)
        (connection,) = listener.server.listener.connections
        await wait_until(lambda: connection.phase > HEAD)
        assert await deadline_after(2 * BODY_RATE, 7.0) < 7.01
        assert await deadline_after(1, 5.00005) < 5.01
        if not size or size > 60_000:
            assert 30.0 <= await deadline_after(60 * BODY_RATE, 30.0) < 31.0
        connection.deadline = 0.0
        answer = await client.answer()
        assert answer.status == 408
        assert b"after 30 s (limits.body_timeout_s)" in answer.body
        assert listener.backend.used_bytes == 0


async def test_a_body_that_came_fast_may_not_stop_for_longer_than_any_other(asking):
    async with asking(**SHORT, max_body_bytes=2**24) as (_, client):
        client.send(
            b"POST /predictions/echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n" + bytes(9_000_000)
        )
        assert (await client.answer()).status == 408  # 550 s of the lowest rate


async def test_a_head_that_drips_is_timed_out_all_the_same(asking):
    async with asking(**SHORT) as (listener, client):
        async with asyncio.timeout(5):
            for byte in b"GET /ping HTTP/1.1\r\nX: " + b"a" * 10_000:
                client.send(bytes([byte]))
                await asyncio.sleep(0.005)
                if listener.server.listener.connections == set() or client.reader._buffer:  # type: ignore[attr-defined]
                    break
        assert (await client.answer()).status == 408


async def test_an_idle_keep_alive_connection_is_closed(asking):
    async with asking(header_timeout_s=5.0, body_timeout_s=5.0, idle_timeout_s=0.1) as (_, client):
        assert (await client.ask("/predictions/echo", b"a")).status == 200
        assert await client.closed()


async def test_a_running_request_is_not_timed_out_by_the_listener(asking, wait_until):
    async with asking(FakeBackend({"m": hold}), **SHORT) as (listener, client):
        client.post("/predictions/m", b"slow")
        await wait_until(lambda: listener.backend.calls)
        await asyncio.sleep(0.4)
        listener.backend.calls[0].reply()
        assert (await client.answer()).body == b"slow"


async def test_a_full_pool_pauses_reading_without_a_timer_until_memory_is_freed(listen, wait_until):
    backend = FakeBackend({"m": hold}, pool_bytes=300_000)
    async with listen(backend, **SHORT) as listener:
        first = await listener.connect()
        first.post("/predictions/m", b"1" * 200_000)
        await wait_until(lambda: backend.calls)
        second = await listener.connect()
        second.post("/predictions/m", b"2" * 200_000)
        await wait_until(lambda: backend.waiting)
        await asyncio.sleep(0.4)  # longer than the body timer
        backend.calls[0].reply()
        await wait_until(lambda: len(backend.calls) == 2)
        backend.calls[1].reply()
        assert (await second.answer()).body == b"2" * 200_000
        assert backend.used_bytes == 0


async def test_a_body_that_can_never_fit_the_pool_is_413(asking):
    async with asking(FakeBackend(pool_bytes=100_000)) as (_, client):
        assert (await client.ask("/predictions/echo", b"1" * 200_000)).status == 413


async def test_a_chunked_body_that_finds_the_pool_full_is_429(listen, wait_until):
    backend = FakeBackend({"m": hold, "echo": Call.reply}, pool_bytes=300_000)
    async with listen(backend) as listener:
        first, second = await listener.connect(), await listener.connect()
        first.post("/predictions/m", b"1" * 200_000)
        await wait_until(lambda: backend.calls)
        second.send(CHUNKED + b"20000\r\n" + b"x" * 0x20000 + b"\r\n0\r\n\r\n")
        answer = await second.answer()
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("size", [1000, 200_000])
async def test_a_request_with_an_incomplete_body_never_runs(asking, wait_until, size):
    async with asking() as (listener, client):
        client.send(POST % size + b"abc")
        await wait_until(lambda: listener.server.listener.connections)
        await client.close()
        await wait_until(lambda: not listener.server.listener.connections)
        assert listener.backend.calls == []
        assert listener.backend.used_bytes == 0


async def test_a_disconnect_cancels_all_requests_of_the_client(listen, wait_until):
    async with listen(FakeBackend({"m": hold})) as listener:
        calls = listener.backend.calls
        client = await listener.connect()
        for _ in range(3):
            client.post("/predictions/m", b"")
        await wait_until(lambda: len(calls) == 3)
        client.writer.transport.abort()
        await wait_until(lambda: all(call.cancelled for call in calls))
        calls[0].sink(ItemResult(body=b"late"))  # nobody is there: nothing happens


async def test_a_client_that_reads_nothing_is_disconnected(asking, wait_until):
    models = {"big": lambda call: call.reply(b"x" * 30_000_000)}
    async with asking(FakeBackend(models), write_timeout_s=0.2) as (listener, client):
        client.writer.transport.pause_reading()
        client.post("/predictions/big", b"")
        await wait_until(lambda: listener.server.listener.connections)
        await wait_until(lambda: not listener.server.listener.connections)


async def test_the_reader_of_a_stream_that_falls_behind_is_dropped(asking, wait_until):
    async with asking(FakeBackend({"m": hold}), write_buffer_bytes=65536) as (listener, client):
        client.writer.transport.pause_reading()
        client.post("/predictions/m", b"")
        await wait_until(lambda: listener.backend.calls)
        call = listener.backend.calls[0]
        for _ in range(100):
            call.reply(b"x" * 100_000, "text/plain", final=False)
        await wait_until(lambda: call.cancelled)


@pytest.mark.parametrize("path", ["/ping", "/v2", "/openapi.json"])
async def test_a_chunked_body_on_a_route_without_body_uses_no_shared_memory(asking, path):
    async with asking() as (listener, client):
        client.send(b"GET %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode())
        client.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n0\r\n\r\n")
        assert (await client.answer()).status == 200
        client.send(b"GET %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode())
        client.send(b"40000\r\n" + b"x" * 0x40000 + b"\r\n0\r\n\r\n")
        assert (await client.answer()).status == 413
        assert listener.backend.used_bytes == 0


async def test_requests_get_memory_in_order_and_a_large_body_does_not_starve(listen, wait_until):
    backend = FakeBackend({"m": hold}, pool_bytes=350_000)
    async with listen(backend) as listener:
        first, large, late = [await listener.connect() for _ in range(3)]
        first.post("/predictions/m", b"1" * 200_000)
        await wait_until(lambda: backend.calls)
        large.post("/predictions/m", b"2" * 300_000)
        await wait_until(lambda: backend.waiting)
        late.post("/predictions/m", b"3" * 100_000)  # there would be room for it
        await wait_until(lambda: len(listener.server.listener.memory) == 2)
        backend.calls[0].reply()
        await wait_until(lambda: len(backend.calls) == 2)
        assert len(backend.calls[1].item.payload.view) == 300_000
        backend.calls[1].reply()
        await wait_until(lambda: len(backend.calls) == 3)
        backend.calls[2].reply()
        assert (await late.answer()).body == b"3" * 100_000


async def test_clients_that_leave_while_they_wait_for_memory_are_passed_over(listen, wait_until):
    backend = FakeBackend({"m": hold, "echo": Call.reply}, pool_bytes=300_000)
    async with listen(backend) as listener:
        first = await listener.connect()
        first.post("/predictions/m", b"1" * 200_000)
        await wait_until(lambda: backend.calls)
        for n in range(4):
            client = await listener.connect()
            client.post("/predictions/echo", b"2" * 200_000)
            await wait_until(lambda n=n: len(listener.server.listener.memory) == n + 1)
            if n < 3:
                client.writer.transport.abort()
        assert len(backend.waiting) == 1
        backend.calls[0].reply()
        assert (await client.answer()).body == b"2" * 200_000
        await wait_until(lambda: len(listener.server.listener.connections) == 2)
        assert backend.used_bytes == 0


async def test_close_drops_requests_that_wait_for_memory(listen, wait_until):
    backend = FakeBackend({"m": hold}, pool_bytes=300_000)
    async with listen(backend) as listener:
        for n in range(3):
            client = await listener.connect()
            client.post("/predictions/m", b"1" * 200_000)
            await wait_until(lambda n=n: len(listener.server.listener.memory) == n)
        await wait_until(lambda: backend.calls)
        await listener.server.close(0.01)
        assert not listener.server.listener.memory
        assert len(backend.calls) == 1
