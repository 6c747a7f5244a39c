"""The listener over real sockets: what well-behaved clients see."""

from __future__ import annotations

import asyncio
import json
import select
import socket

import msgspec
import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import (
    BadOutput,
    ConfigError,
    DeadlineExceeded,
    ItemFailed,
    ModelNotReady,
    PenstockError,
    Quarantined,
    QueueFull,
    WorkerDied,
)
from penstock.serving.http.server import HttpServer
from penstock.types import ItemResult
from support.backend import Call, FakeBackend, FakeBuffer


def hold(call: Call) -> None:
    """The model answers when the test says so."""


async def test_a_small_body_is_echoed_and_the_connection_kept(asking):
    """The name of the model may come percent-encoded, with a query behind it."""
    async with asking() as (listener, client):
        for n in range(3):
            answer = await client.ask("/predictions/%65cho?x=1", b"x" * n, "Content-Type: image/png")
            assert (answer.status, answer.body) == (200, b"x" * n)
            assert answer.headers["content-type"] == "application/octet-stream"
            assert answer.headers["date"].endswith("GMT")
        item = listener.backend.calls[-1].item
        assert (item.codec, item.content_type, item.rows) == ("native", "image/png", 1)


async def test_header_names_reach_the_model_as_they_were_sent(asking):
    async with asking() as (listener, client):
        client.post("/predictions/echo", b"", "X-CuStOm: a b", "x-two: 2")
        await client.answer()
        assert (b"X-CuStOm", b"a b") in listener.backend.calls[0].item.headers
        assert (b"x-two", b"2") in listener.backend.calls[0].item.headers


@pytest.mark.parametrize("size", [64 * 1024, 64 * 1024 + 1, 1_000_000])
async def test_a_large_body_arrives_whole_and_its_buffer_is_freed(asking, size):
    body = bytes(range(256)) * (size // 256 + 1)
    async with asking() as (listener, client):
        for _ in range(2):  # the parser is fresh after it
            assert (await client.ask("/predictions/echo", body[:size])).body == body[:size]
        assert isinstance(listener.backend.calls[0].item.payload, FakeBuffer) == (size > 64 * 1024)
        assert listener.backend.used_bytes == 0


async def test_a_request_pipelined_behind_a_large_body_is_answered(asking):
    async with asking() as (_, client):
        client.post("/predictions/echo", b"a" * 200_000)
        assert (await client.ask("/predictions/echo", b"second")).body == b"a" * 200_000
        assert (await client.answer()).body == b"second"


@pytest.mark.parametrize("total", [1, 1000, 64 * 1024 + 1, 500_000])
async def test_chunked_bodies_of_any_size_arrive_whole(asking, total):
    body = bytes(i % 251 for i in range(total))
    async with asking() as (listener, client):
        client.send(b"POST /predictions/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, total, 7001):
            piece = body[start : start + 7001]
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.send(b"0\r\nX-Trailer: 1\r\n\r\n")
        assert (await client.ask("/predictions/echo", b"next")).body == body
        assert (await client.answer()).body == b"next"
        assert all(name != b"X-Trailer" for name, _ in listener.backend.calls[0].item.headers)
        assert listener.backend.used_bytes == 0


async def test_a_body_in_chunks_of_one_byte_arrives_whole_in_linear_time(asking):
    async with asking(max_body_bytes=2**20) as (_, client):
        client.send(b"POST /predictions/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(b"1\r\nz\r\n" * 200_000 + b"0\r\n\r\n")
        assert (await client.answer()).body == b"z" * 200_000


async def test_pipelined_requests_are_answered_in_order_whatever_order_they_finish_in(asking, wait_until):
    async with asking(FakeBackend({"m": hold})) as (listener, client):
        for n in range(5):
            client.post("/predictions/m", b"%d" % n)
        await wait_until(lambda: len(listener.backend.calls) == 5)
        for call in reversed(listener.backend.calls):
            call.reply()
        assert [(await client.answer()).body for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


async def test_no_more_than_max_pipelined_requests_of_a_connection_are_in_flight(listen, wait_until):
    async with listen(FakeBackend({"m": hold}), max_pipelined=2) as listener:
        calls = listener.backend.calls
        client = await listener.connect()
        for n in range(500):
            client.post("/predictions/m", b"%d" % n)
        client.get("/ping")
        for n in range(500):
            await wait_until(lambda n=n: len(calls) > n)
            assert len(calls) <= n + 2
            calls[n].reply()
        assert [(await client.answer()).body for _ in range(500)] == [b"%d" % n for n in range(500)]
        assert (await client.answer()).body == b'{"status":"Healthy"}'


async def test_no_more_requests_of_a_connection_begin_while_its_client_reads_no_answer(listen, wait_until):
    async with listen(FakeBackend({"m": hold}), max_pipelined=2) as listener:
        calls = listener.backend.calls
        client = await listener.connect()
        client.writer.transport.pause_reading()
        large = b"x" * 20_000_000
        for n in range(6):
            client.post("/predictions/m", b"%d" % n)
        await wait_until(lambda: len(calls) == 2)
        calls[0].reply(large)
        calls[1].reply(large)
        await asyncio.sleep(0)
        assert len(calls) == 2
        client.writer.transport.resume_reading()
        for _ in range(2):
            assert (await client.answer()).body == large
        for n in range(2, 6):
            await wait_until(lambda n=n: len(calls) > n)
            calls[n].reply()
            assert (await client.answer()).body == b"%d" % n


async def test_thousands_of_pipelined_gets_do_not_recurse(asking):
    async with asking() as (_, client):
        client.send(b"GET /ping HTTP/1.1\r\n\r\n" * 4000)
        for _ in range(4000):
            assert (await client.answer()).status == 200


async def test_expect_100_continue_is_answered_before_the_body_is_sent(asking):
    async with asking() as (_, client):
        head = b"POST /predictions/echo HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 5\r\n\r\n"
        client.send(head)
        assert (await client.head())[0] == 100
        client.send(b"hello")
        assert (await client.answer()).body == b"hello"


@pytest.mark.parametrize(
    ("line", "length", "status"),
    [
        ("POST /predictions/nobody", 5, 404),
        ("POST /nowhere", 5, 404),
        ("PATCH /predictions/echo", 5, 405),
        ("POST /predictions/echo", 10**10, 413),
    ],
)
async def test_expect_is_refused_without_100_when_the_request_cannot_succeed(asking, line, length, status):
    async with asking() as (_, client):
        client.send(f"{line} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n".encode())
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert await client.closed()


async def test_an_unknown_expectation_is_refused_with_417(asking):
    async with asking() as (_, client):
        assert (await client.ask("/predictions/echo", b"", "Expect: tea")).status == 417


async def test_http_1_0_closes_unless_asked_to_keep_alive(asking):
    async with asking() as (_, client):
        client.send(b"POST /predictions/echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na")
        assert (await client.answer()).headers["connection"] == "keep-alive"
        client.send(b"POST /predictions/echo HTTP/1.0\r\nContent-Length: 1\r\n\r\nb")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"b", "close")
        assert await client.closed()


async def test_connection_close_is_honoured_and_later_requests_do_not_run(asking):
    async with asking() as (listener, client):
        client.post("/predictions/echo", b"a", "Connection: close")
        assert (await client.ask("/predictions/echo", b"b")).headers["connection"] == "close"
        assert await client.closed()
        assert len(listener.backend.calls) == 1


OFFERS = {
    "h2c": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA"],
    "tls": ["Upgrade: TLS/1.0", "Connection: upgrade"],
    "websocket": ["Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"],
}


def offering(offer: str, framing: bytes, path: str = "/predictions/echo", version: str = "1.1") -> bytes:
    """A request that offers an upgrade, up to its body."""
    lines = [f"POST {path} HTTP/{version}", "Host: a", "Content-Type: text/plain", *OFFERS[offer]]
    return "\r\n".join(lines).encode() + b"\r\n" + framing + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("offer", "size", "piece"), [("h2c", 0, 2**30), ("tls", 5, 7), ("websocket", 70_000, 2**30), ("h2c", 300_000, 7)]
)
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_upgrade_that_nobody_takes_is_ignored_and_the_body_read(asking, offer, size, framing, piece):
    body = bytes(i % 251 for i in range(size))
    if framing == "length":
        sent = offering(offer, b"Content-Length: %d" % size) + body
    else:
        chunks = [body[at : at + 9000] for at in range(0, size, 9000)]
        sent = offering(offer, b"Transfer-Encoding: chunked")
        sent += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    sent += offering(offer, b"Content-Length: 4") + b"next" + b"GET /ping HTTP/1.1\r\n\r\n"
    async with asking() as (listener, client):
        for at in range(0, 700, piece):
            client.send(sent[at : min(at + piece, 700)])
            await asyncio.sleep(0)
        client.send(sent[700:])
        first, second, last = [await client.answer() for _ in range(3)]
        assert (first.status, first.body, second.body) == (200, body, b"next")
        assert (last.status, last.headers.get("connection")) == (200, None)
        assert listener.backend.used_bytes == 0
        item = listener.backend.calls[1].item
        assert item.content_type == "text/plain"
        assert (b"Host", b"a") in item.headers


async def test_an_offer_changes_nothing_else_of_a_request(asking):
    async with asking() as (_, client):
        client.send(offering("h2c", b"Expect: 100-continue\r\nContent-Length: 5"))
        assert (await client.head())[0] == 100
        client.send(b"hello")
        assert (await client.answer()).body == b"hello"
        client.send(offering("tls", b"Content-Length: 3", "/nowhere") + b"abc")
        assert (await client.answer()).status == 404
        client.send(offering("websocket", b"Content-Length: 1", version="1.0") + b"a")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"a", "keep-alive")
        client.send(offering("h2c", b"Connection: close\r\nContent-Length: 1") + b"b")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"b", "close")
        assert await client.closed()


async def test_the_head_of_an_offer_is_bounded_and_framed_as_any_other(listen):
    async with listen(max_header_bytes=1000) as listener:
        for more, status in (
            (b"X: " + b"h" * 1000, 431),
            (b"Content-Length: 3\r\nTransfer-Encoding: chunked", 400),
            (b"Content-Length: 3\r\nContent-Length: 4", 400),
            (b"Content-Length: 99999999999", 413),
        ):
            client = await listener.connect()
            client.send(offering("h2c", more) + b"abc")
            assert (await client.answer()).status == status
            assert await client.closed()
        assert listener.backend.calls == []
        client = await listener.connect()
        client.send(offering("h2c", b"Content-Length: 0") + b"GET /ping HTTP/1.1\r\nX: %b\r\n\r\n" % (b"h" * 1000))
        assert [(await client.answer()).status for _ in range(2)] == [200, 431]


@pytest.mark.parametrize("target", ["/predictions/echo", "example.org:443"])
async def test_no_tunnel_is_opened_and_what_follows_is_not_read_as_http(asking, target):
    async with asking() as (listener, client):
        client.send(f"CONNECT {target} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi".encode())
        answer = await client.ask("/predictions/echo", b"smuggled")
        assert (answer.status, answer.headers["connection"]) == (405, "close")
        assert await client.closed()
        assert listener.backend.calls == []


@pytest.mark.parametrize("blank", [" ", "\t", " \t "])
async def test_blanks_around_the_value_of_a_header_are_not_part_of_it(asking, blank):
    async with asking() as (listener, client):
        lines = ["x-priority: 1", "idempotency-key: k", "x-deadline-ms: 9000", "x-request-id: r1", "X-Own: a b"]
        answer = await client.ask(
            "/predictions/echo", b"1", *(line.replace(": ", f":{blank}") + blank for line in lines)
        )
        assert (answer.status, answer.headers["x-request-id"]) == (200, "r1")
        call = listener.backend.calls[0]
        assert (call.priority, call.budget_s, call.item.headers[-1]) == (1, 9.0, (b"X-Own", b"a b"))
        framing = f"Transfer-Encoding: chunked \r\nExpect: 100-continue{blank}\r\nConnection: close{blank}"
        client.send(f"POST /predictions/echo HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode())
        assert (await client.head())[0] == 100
        client.send(b"1\r\na\r\n0\r\n\r\n")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"a", "close")


async def test_head_has_the_head_of_get_and_no_body(asking):
    async with asking() as (_, client):
        client.get("/ping", method="HEAD")
        answer = await client.answer(bodiless=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "20")
        client.get("/ping")
        assert len((await client.answer()).body) == 20


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Quarantined("poison"), 422, None),
        (QueueFull("full", retry_after_s=2.1), 429, "3"),
        (QueueFull("full"), 429, "1"),
        (ModelNotReady("loading"), 503, "1"),
        (WorkerDied("gone"), 503, "1"),
        (DeadlineExceeded("late"), 504, None),
        (ItemFailed("raised", detail="secret"), 500, None),
        (BadOutput("nan"), 500, None),
        (PenstockError("internal"), 500, None),
    ],
)
@pytest.mark.parametrize("when", ["submit", "result"])
async def test_errors_become_status_and_terse_json(asking, error, status, retry, when):
    backend = FakeBackend({"m": lambda call: call.sink(ItemResult(error=error))})
    if when == "submit":
        backend.refuse = error
    async with asking(backend) as (_, client):
        answer = await client.ask("/predictions/m", b"")
        assert (answer.status, answer.headers.get("retry-after")) == (status, retry)
        assert msgspec.json.decode(answer.body) == {"error": {"code": error.code, "message": error.message}}
        client.post("/v2/models/m/infer", b"")
        assert msgspec.json.decode((await client.answer()).body) == {"error": error.message}


async def test_a_backend_bug_is_a_500_without_details(asking, caplog):
    backend = FakeBackend()
    backend.refuse = ZeroDivisionError("secret")  # type: ignore[assignment]
    async with asking(backend) as (_, client):
        client.post("/predictions/echo", b"")
        backend.submit = lambda *a, **k: 1 / 0  # type: ignore[method-assign,assignment,misc,return-value]
        answer = await client.answer()
        answer = await client.ask("/predictions/echo", b"")
        assert answer.status == 500
        assert b"division" not in answer.body
        assert "ZeroDivisionError" in caplog.text


async def test_status_headers_and_content_type_of_a_result_go_out(asking):
    def teapot(call: Call) -> None:
        call.reply(b"tea", "text/plain", status=418, headers=[("X-Pot", "1")])

    async with asking(FakeBackend({"m": teapot, "empty": lambda call: call.reply(b"", "", status=204)})) as (
        _,
        client,
    ):
        answer = await client.ask("/predictions/m", b"")
        assert (answer.status, answer.headers["x-pot"], answer.headers["content-type"]) == (418, "1", "text/plain")
        answer = await client.ask("/predictions/empty", b"")
        assert answer.status == 204
        assert "content-length" not in answer.headers
        assert (await client.fetch("/ping")).status == 200


async def test_the_request_id_is_echoed_when_it_is_sane(asking):
    async with asking() as (listener, client):
        assert (await client.ask("/predictions/echo", b"", "X-Request-Id: abc-1")).headers["x-request-id"] == "abc-1"
        assert listener.backend.calls[0].item.request_id == "abc-1"
        for bad in ("a b", "x" * 129, "\xe9"):
            client.post("/predictions/echo", b"", f"X-Request-Id: {bad}")
            assert "x-request-id" not in (await client.answer()).headers


async def test_deadline_and_priority_headers_reach_the_backend(asking):
    async with asking() as (listener, client):
        client.post("/predictions/echo", b"", "x-deadline-ms: 1500", "x-priority: 2")
        await client.answer()
        assert (listener.backend.calls[0].budget_s, listener.backend.calls[0].priority) == (1.5, 2)


@pytest.mark.parametrize(
    ("parameters", "headers", "expected"),
    [
        ({"timeout": 1_500_000}, [], (None, 1.5, 0)),
        ({"timeout": 0, "priority": 0}, ["x-priority: 2"], (None, None, 2)),
        ({"priority": 1}, ["x-priority: 2"], (None, None, 0)),
        ({"priority": 3, "timeout": 9_000_000}, ["x-deadline-ms: 1500"], (1.5, 9.0, 2)),
        ({"binary_data_output": True}, [], (None, None, 0)),
        ({"timeout": "soon"}, [], (None, None, 0)),  # the worker refuses it
    ],
)
@pytest.mark.parametrize("binary", [False, True])
async def test_timeout_and_priority_of_an_open_inference_body_reach_the_backend(
    asking, parameters, headers, expected, binary
):
    head = json.dumps({"inputs": [], "parameters": parameters}).encode()
    lines = [*headers, *([f"Inference-Header-Content-Length: {len(head)}"] if binary else [])]
    async with asking() as (listener, client):
        assert (
            await client.ask("/v2/models/echo/infer", head + (b'"timeout": "priority"' if binary else b""), *lines)
        ).status == 200
        call = listener.backend.calls[0]
        assert (call.budget_s, call.wait_s, call.priority) == expected


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("x-deadline-ms: soon", 400),
        ("x-deadline-ms: nan", 400),
        ("x-deadline-ms: inf", 400),
        ("x-deadline-ms: 0", 504),
        ("x-deadline-ms: -5", 504),
        ("x-priority: -1", 400),
        ("x-priority: high", 400),
        ("x-priority: 1.5", 400),
        ("x-priority: 9999999999", 400),
    ],
)
async def test_bad_deadlines_and_priorities_are_never_run(asking, line, status):
    async with asking() as (listener, client):
        assert (await client.ask("/predictions/echo", b"abc", line)).status == status
        assert listener.backend.calls == []
        client.post("/predictions/echo", b"abc")  # the connection lives on
        assert (await client.answer()).body == b"abc"


async def test_a_token_is_needed_except_for_health(asking):
    async with asking(tokens=frozenset({b"right", b"other"})) as (_, client):
        for line, status in (
            ("Authorization: Bearer right", 200),
            ("authorization: bearer other", 200),
            ("Authorization: Bearer wrong", 401),
            ("Authorization: Basic right", 401),
            ("X-Nothing: 1", 401),
        ):
            answer = await client.ask("/predictions/echo", b"a", line)
            assert answer.status == status
            assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        for path in ("/ping", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
            assert (await client.fetch(path)).status == 200
        assert (await client.fetch("/openapi.json")).status == 401


async def test_a_health_check_that_is_not_ready_is_no_server_error(asking):
    backend = FakeBackend({"m": lambda call: call.reply(b"", "", status=503)})
    backend.is_ready = False
    async with asking(backend) as (listener, client):
        for path in ("/ping", "/readyz", "/v2/health/ready", "/v2/models/m/ready"):
            assert (await client.fetch(path)).status == 503
        assert (await client.ask("/predictions/m", b"")).status == 503
        assert listener.server.listener.counts.responses() == {0: 4, 5: 1}


async def test_a_stream_is_sent_in_chunks_without_delay(asking, wait_until):
    async with asking(FakeBackend({"m": hold})) as (listener, client):
        client.post("/predictions/m", b"")
        await wait_until(lambda: listener.backend.calls)
        call = listener.backend.calls[0]
        call.reply(b"one", "text/plain", final=False)
        status, headers = await client.head()
        assert (status, headers["transfer-encoding"], headers["content-type"]) == (200, "chunked", "text/plain")
        chunks = client.chunks()
        assert await anext(chunks) == b"one"
        call.reply(b"two", "text/plain", final=False)
        assert await anext(chunks) == b"two"
        call.reply(b"", "text/plain")
        assert [chunk async for chunk in chunks] == []
        assert (await client.fetch("/ping")).status == 200


def stream(*parts: bytes, content_type: str = "text/plain", error: PenstockError | None = None):
    def run(call: Call) -> None:
        for part in parts:
            call.reply(part, content_type, final=False)
        call.sink(ItemResult(error=error) if error else ItemResult(content_type=content_type))

    return run


async def test_a_stream_of_json_is_lines(asking):
    async with asking(FakeBackend({"m": stream(b"1", b"[2]", content_type="application/json")})) as (_, client):
        answer = await client.ask("/predictions/m", b"")
        assert (answer.headers["content-type"], answer.body) == ("application/x-ndjson", b"1\n[2]\n")
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


async def test_silent_events_are_kept_alive_by_comments(asking):
    calls = []
    arrived = asyncio.Event()

    def take(call):
        calls.append(call)
        arrived.set()

    async with asking(FakeBackend({"m": take})) as (listener, client):
        state = listener.server.listener

        def sweep(seconds):
            for _ in range(round(seconds / state.clock.sweep_s)):
                for connection in state.connections:
                    connection.check_writing(state.now())

        async def ask(*lines):
            arrived.clear()
            client.post("/predictions/m", b"", *lines)
            await asyncio.wait_for(arrived.wait(), 10)
            sweep(20)  # before the head, which has the status, nothing can be sent
            return calls[-1]

        call = await ask("Accept: text/event-stream")
        call.reply(b"a", "text/plain", final=False)
        await client.head()
        sweep(14)
        call.reply(b"b", "text/plain", final=False)
        sweep(31)
        call.reply(b"c", "text/plain")
        parts = [chunk async for chunk in client.chunks()]
        assert parts == [b"data: a\n\n", b"data: b\n\n", b": \n\n", b": \n\n", b"data: c\n\n"]
        call = await ask()
        call.reply(b"1", "application/json", final=False)
        sweep(31)
        call.reply(b"2", "application/json")
        assert (await client.answer()).body == b"1\n2\n"  # lines have no comments


async def test_server_sent_events_are_sent_on_request(asking):
    models = {"m": stream(b"a\nb\r\nc", b"d"), "bad": stream(b"a", error=ItemFailed("oh")), "one": Call.reply}
    async with asking(FakeBackend(models)) as (_, client):
        answer = await client.ask("/predictions/m", b"", "Accept: text/event-stream")
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.body == b"data: a\ndata: b\ndata: c\n\ndata: d\n\n"
        client.post("/predictions/bad", b"", "Accept: text/event-stream")
        body = (await client.answer()).body
        assert body == b'data: a\n\nevent: error\ndata: {"error":{"code":"item_failed","message":"oh"}}\n\n'
        answer = await client.ask("/predictions/one", b"whole", "Accept: text/event-stream")
        assert answer.headers["x-part-type"] == "application/octet-stream;base64"
        assert answer.body == b"event: base64\ndata: d2hvbGU=\n\n"


async def test_a_stream_that_fails_is_cut_without_its_last_chunk(asking):
    async with asking(FakeBackend({"m": stream(b"part", error=WorkerDied("gone"))})) as (_, client):
        client.post("/predictions/m", b"")
        await client.head()
        assert await client.rest() == b"4\r\npart\r\n"


async def test_lines_that_fail_end_with_a_line_of_the_error_and_are_cut(asking):
    models = {"m": stream(b"1", error=WorkerDied("gone"), content_type="application/json")}
    line = b'{"error":{"code":"worker_died","message":"gone"}}\n'
    async with asking(FakeBackend(models)) as (listener, client):
        client.post("/predictions/m", b"")
        await client.head()
        assert await client.rest() == b"2\r\n1\n\r\n%x\r\n%b\r\n" % (len(line), line)
        old = await listener.connect()
        old.send(b"POST /predictions/m HTTP/1.0\r\n\r\n")
        assert (await old.answer()).body == b"1\n" + line


async def test_a_stream_to_http_1_0_ends_with_the_connection(asking):
    async with asking(FakeBackend({"m": stream(b"a", b"b")})) as (_, client):
        client.send(b"POST /predictions/m HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"ab", "close")


async def test_close_answers_requests_in_flight_and_announces_the_end(listen, wait_until):
    async with listen(FakeBackend({"m": hold})) as listener:
        busy, idle = await listener.connect(), await listener.connect()
        busy.post("/predictions/m", b"last")
        await wait_until(lambda: listener.backend.calls and len(listener.server.listener.connections) == 2)
        closing = asyncio.create_task(listener.server.close(5.0))
        assert await idle.closed()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)
        listener.backend.calls[0].reply()
        answer = await busy.answer()
        assert (answer.body, answer.headers["connection"]) == (b"last", "close")
        await closing


async def test_close_drops_requests_after_the_drain_time(asking, wait_until):
    async with asking(FakeBackend({"m": hold})) as (listener, client):
        client.post("/predictions/m", b"")
        await wait_until(lambda: listener.backend.calls)
        await listener.server.close(0.01)
        assert listener.backend.calls[0].cancelled
        assert await client.closed()


async def test_a_port_in_use_is_named_with_the_key_to_change(listen):
    async with listen() as listener:
        other = HttpServer(FakeBackend(), LimitsConfig())
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{listener.port}: the port is in use.*server\.port"):
            await other.start("127.0.0.1", listener.port)


async def test_without_connections_no_timer_runs(listen, wait_until):
    async with listen() as listener:
        assert listener.server.listener.clock._timer is None
        client = await listener.connect()
        await wait_until(lambda: listener.server.listener.clock._timer is not None)
        await client.close()
        await wait_until(lambda: listener.server.listener.clock._timer is None)


async def test_close_also_ends_a_connection_whose_last_answer_waits_for_an_earlier_one(asking, wait_until):
    async with asking(FakeBackend({"slow": lambda call: None, "echo": Call.reply})) as (listener, client):
        client.post("/predictions/slow", b"first")
        client.post("/predictions/echo", b"second")
        await wait_until(lambda: len(listener.backend.calls) == 2)
        await asyncio.sleep(0.01)  # the second is answered, and kept back
        closing = asyncio.create_task(listener.server.close(5.0))
        await asyncio.sleep(0)
        listener.backend.calls[0].reply()
        assert (await client.answer()).body == b"first"
        assert (await client.answer()).body == b"second"
        async with asyncio.timeout(2.0):  # long before the drain is over
            assert await client.closed()
            await closing


@pytest.mark.parametrize("model", ["echo", "held", "parts"])
async def test_a_client_that_closes_its_sending_side_gets_all_answers(asking, wait_until, model):
    models = {"echo": Call.reply, "held": hold, "parts": stream(b"a", b"b")}
    async with asking(FakeBackend(models)) as (listener, client):
        client.post("/predictions/echo", b"first")
        client.post(f"/predictions/{model}", b"second")
        client.send(b"POST /predictions/echo HTTP/1.1\r\ncontent-length: 9\r\n\r\nnot all")
        client.writer.write_eof()
        assert (await client.answer()).body == b"first"
        if model == "held":
            await wait_until(lambda: len(listener.backend.calls) == 2)
            listener.backend.calls[1].reply()
        answer = await client.answer()
        assert answer.body == (b"ab" if model == "parts" else b"second")
        assert await client.closed()
        assert len(listener.backend.calls) == 2
        await wait_until(lambda: not listener.server.connections)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_slow_answer_reaches_a_client_that_closed_its_sending_side(asking, wait_until, version):
    async with asking(FakeBackend({"m": hold}), idle_timeout_s=0.1) as (listener, client):
        client.send(f"POST /predictions/m HTTP/{version}\r\ncontent-length: 1\r\n\r\n1".encode())
        client.writer.write_eof()
        await wait_until(lambda: listener.backend.calls)
        await asyncio.sleep(0.2)
        listener.backend.calls[0].reply()
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"1", "close")
        assert await client.closed()


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="without epoll the next sweep drops them")
async def test_requests_of_a_client_that_left_without_a_reset_are_cancelled_at_once(listen, wait_until, monkeypatch):
    monkeypatch.setattr("penstock.serving.http.listener.SWEEP_S", 1000.0)  # without the sweep
    limits = dict.fromkeys(("header_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s"), 10_000.0)
    async with listen(FakeBackend({"m": hold}), **limits) as listener:
        stays, leaves = await listener.connect(), await listener.connect()
        for client in (stays, leaves):
            client.post("/predictions/m", b"1")
            client.send(b"POST /predictions/m HTTP/1.0\r\ncontent-length: 1\r\n\r\n2")
        await wait_until(lambda: len(listener.backend.calls) == 4)
        stays.writer.write_eof()
        await leaves.close()
        await wait_until(lambda: sum(call.cancelled for call in listener.backend.calls) == 2)
        assert listener.server.connections == 1
        for call in listener.backend.calls:
            call.reply()
        assert [(await stays.answer()).body for _ in range(2)] == [b"1", b"2"]
        assert await stays.closed()


async def test_http_1_0_with_a_transfer_coding_is_refused_and_never_kept(asking):
    async with asking() as (listener, client):
        client.send(
            b"POST /predictions/echo HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"1\r\na\r\n0\r\n\r\nPOST /predictions/echo HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
        )
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert b"HTTP/1.0" in answer.body
        assert await client.closed()
        assert listener.backend.calls == []


@pytest.mark.parametrize("path", ["/predictions/echo", "/healthz"])
async def test_close_answers_clients_that_wait_to_be_accepted(listen, path):
    async with listen() as listener:
        waiting = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(300)]  # the loop does not run
        body = b"POST %b HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi" if "echo" in path else b"GET %b HTTP/1.1\r\n\r\n"
        for client in waiting:
            client.sendall(body % path.encode())
        await listener.server.close(5.0)
        for client in waiting:
            with client, client.makefile("rb") as file:
                answer = file.read()
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"connection: close\r\n" in answer
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)


async def test_close_answers_a_request_on_a_silent_connection_and_announces_the_end(listen):
    async with listen() as listener:
        silent, client = await listener.connect(), await listener.connect()
        client.post("/predictions/echo", b"before")
        assert "connection" not in (await client.answer()).headers
        closing = asyncio.create_task(listener.server.close(5.0))
        await asyncio.sleep(0.1)
        answer = await client.ask("/predictions/echo", b"after")
        assert (answer.body, answer.headers["connection"]) == (b"after", "close")
        assert await client.closed()
        assert await silent.closed()
        await client.close()
        async with asyncio.timeout(2.0):  # long before the drain is over
            await closing


async def test_a_full_port_is_reported_once_with_its_key_and_the_consequence(listen, caplog, wait_until):
    async with listen(max_connections=1) as listener:
        first = await listener.connect()
        assert (await first.fetch("/ping")).status == 200
        for _ in range(3):
            answer = await (await listener.connect()).answer()
            assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        (record,) = (r for r in caplog.records if "event=port_full" in r.message)
        assert "port=server.port cause=max_connections connections=1 most=1" in record.message
        assert "consequence=new_connections_are_refused" in record.message
        listener.server.listener.clock.starved = True
        await first.close()
        await wait_until(lambda: not listener.server.connections)
        again = await listener.connect()  # without connections nothing is known about descriptors
        assert (await again.fetch("/ping")).status == 200


async def test_connections_are_refused_while_no_descriptors_are_left(asking, caplog, monkeypatch, wait_until):
    none_left = True
    monkeypatch.setattr("penstock.serving.http.listener.none_left", lambda: none_left)
    async with asking(idle_timeout_s=4.0, write_timeout_s=0.04) as (listener, client):
        await wait_until(lambda: listener.server.listener.clock.starved)
        assert (await (await listener.connect()).answer()).status == 503
        assert (await client.fetch("/ping")).status == 200
        assert "cause=no_descriptors" in caplog.text
        none_left = False
        await wait_until(lambda: not listener.server.listener.clock.starved)
        again = await listener.connect()
        assert (await again.fetch("/ping")).status == 200


@pytest.mark.parametrize("request_", [b"GET /ping HTTP/1.1\r\n\r\n", b"GET /nowhere HTTP/1.1\r\n\r\n"])
async def test_thousands_of_cheap_requests_of_one_connection_let_others_have_their_turn(listen, request_):
    asked: list[int] = []
    backend = FakeBackend({"m": lambda call: (asked.append(answered()), call.reply())})
    async with listen(backend) as listener:
        counts = listener.server.listener.counts
        answered = lambda: counts.plain + sum(counts.other)  # noqa: E731
        greedy, modest = await listener.connect(), await listener.connect()
        for client in (greedy, modest):
            client.get("/ping")
            await client.answer()
        greedy.send(request_ * 1000)
        modest.post("/predictions/m", b"x")
        await greedy.answer()  # all have arrived by now
        modest.post("/predictions/m", b"x")
        for _ in range(2):
            assert (await modest.answer()).body == b"x"
        for _ in range(999):
            await greedy.answer()
        assert answered() == 1004
        assert max(asked) < 500
