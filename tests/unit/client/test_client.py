"""The clients against a server that fails in every way that a test scripts."""

import asyncio
import gc
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.client.endpoint import (
    ConnectionLost,
    MalformedResponse,
    ResponseTimeout,
    ResponseTooLarge,
    Unreachable,
    UntrustedCertificate,
)
from penstock.client.response import UnexpectedResponse
from penstock.errors import (
    BadOutput,
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    ModelNotReady,
    NotSupported,
    PenstockError,
    QueueFull,
)
from penstock.serving.http.auth import make_ssl_context
from penstock.types import SequenceRequest
from support.captioner import FakeCaptioner, Incoming, with_raw, with_reset, with_status, with_wait

TLS = Path(__file__).parents[2] / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: application/x-ndjson\r\n\r\n"


@pytest.fixture
def server() -> Iterator[FakeCaptioner]:
    with FakeCaptioner() as server:
        yield server


@pytest.fixture
def client(server: FakeCaptioner) -> Iterator[Client]:
    with Client(server.url, timeout_s=20.0, retries=3) as client:
        yield client


def echo(request: Incoming, server: FakeCaptioner) -> None:
    request.respond(200, request.body)


def busy(status: int = 503, *headers: str) -> Any:
    return with_status(status, "Retry-After: 0.01", *headers)


# ---- retries


def test_a_refused_request_is_sent_again_after_the_pause_that_the_server_asks_for(server, client):
    server.script_next(with_status(429, "Retry-After: 0.2"), busy(), echo)
    start = time.monotonic()
    assert client.predict("m", [1]) == [1]
    assert len(server.seen) == 3
    assert time.monotonic() - start >= 0.2


def test_the_last_error_is_raised_with_its_status(server, client):
    server.script_next(*[busy(429)] * 9)
    with pytest.raises(QueueFull, match="it is a 429") as raised:
        client.predict("m", 1)
    assert (raised.value.status, raised.value.retry_after_s, len(server.seen)) == (429, 0.01, 4)


def test_a_pause_that_is_too_long_for_the_caller_is_not_begun(server, client):
    server.script_next(with_status(503, "Retry-After: 5"))
    start = time.monotonic()
    with pytest.raises(ModelNotReady):
        client.predict("m", 1, timeout_s=2.0)
    server.script_next(with_status(503, "Retry-After: 5"))
    with pytest.raises(ModelNotReady):
        client.predict("m", 1, deadline_s=2.0)
    assert time.monotonic() - start < 2.0


def test_a_lost_response_is_final_unless_the_request_has_a_key(server, client):
    server.script_next(with_reset())
    with pytest.raises(ConnectionLost):
        client.predict("m", 1)
    server.script_next(with_reset(), with_status(503, "x-error-code: worker_died", "Retry-After: 0"), echo)
    assert client.predict("m", 1, idempotency_key=True) == 1
    keys = [request.headers.get("idempotency-key") for request in server.seen]
    assert keys[0] is None
    assert len(set(keys[1:])) == 1
    assert len(keys) == 4


def test_a_lost_response_on_a_reused_connection_is_final_too(server, client):
    """The connection layer must not send it again on its own."""
    server.script_next(echo, with_reset(), echo)
    assert client.predict("m", 1) == 1
    with pytest.raises(ConnectionLost):
        client.predict("m", 2)
    assert len(server.seen) == 2


def test_keys_of_the_client_differ_between_requests(server):
    with Client(server.url, idempotency_keys=True) as client:
        server.script_next(echo, echo, with_reset(), echo)
        assert [client.predict("m", n) for n in range(3)] == [0, 1, 2]
    assert len({request.headers["idempotency-key"] for request in server.seen}) == 3


def test_a_server_that_starts_late_is_waited_for():
    server = FakeCaptioner()
    server.start()
    server.stop()
    with Client(server.url, retries=20) as client:
        timer = threading.Timer(0.3, server.start)
        timer.start()
        server.script_next(echo)
        assert client.predict("m", 1) == 1
        timer.join()
        server.stop()
        with pytest.raises((Unreachable, DeadlineExceeded)):
            client.predict("m", 1, timeout_s=0.3)


def test_management_requests_are_sent_once(server):
    server.script_next(with_reset(), echo)
    with Client(server.url, protocol="triton") as client, pytest.raises(ConnectionLost):
        client.load("m")
    assert len(server.seen) == 1


# ---- bad servers


def test_a_slow_server_ends_in_a_timeout_and_not_in_a_wait(server, client):
    done = threading.Event()
    server.script_next(with_wait(done, echo), with_wait(done, echo))
    start = time.monotonic()
    with pytest.raises(ResponseTimeout):
        client.predict("m", 1, timeout_s=0.2)
    with pytest.raises(DeadlineExceeded):
        client.predict("m", 1, deadline_s=0.1)
    assert time.monotonic() - start < 5
    done.set()
    assert 0 < float(server.seen[1].headers["x-deadline-ms"]) <= 100


GARBAGE = {
    b"\x16\x03\x01 not http \r\n\r\n": MalformedResponse,
    b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort": ConnectionLost,
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n": ResponseTooLarge,
    b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000: ResponseTooLarge,
    b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nContent-Type: application/json\r\n\r\n{\"a\": ": UnexpectedResponse,
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n": UnexpectedResponse,
}  # fmt: skip


@pytest.mark.parametrize(("answer", "error"), GARBAGE.items(), ids=lambda value: str(value)[:30])
def test_garbage_is_reported_and_the_next_request_works(server, answer, error):
    with Client(server.url, max_response_bytes=10_000) as client:
        server.script_next(with_reset(answer) if error is ConnectionLost else with_raw(answer), echo)
        with pytest.raises(error):
            client.predict("m", 1)
        assert client.predict("m", 2) == 2


def test_an_endless_response_ends(server):
    with Client(server.url, max_response_bytes=100_000) as client:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        server.script_next(with_raw(head, forever=b"a\r\n0123456789\r\n"))
        with pytest.raises(ResponseTooLarge):
            client.predict("m", 1)


def test_an_answer_that_is_no_inference_answer_is_reported(server, client):
    for body in (b"{}", b"[]", b"\xff", b'{"model_name": "m", "model_version": "1", "outputs": [{"name": "x"}]}'):
        server.script_next(lambda request, server, body=body: request.respond(200, body))
        with pytest.raises(BadOutput):
            client.infer("m", {"x": [1]})


def test_a_server_killed_in_the_middle_of_a_request_is_a_lost_connection(server, client):
    server.script_next(lambda request, server: server.stop())
    with pytest.raises(ConnectionLost):
        client.predict("m", 1)


def test_tls_is_verified_and_the_client_identifies_itself():
    with FakeCaptioner(make_ssl_context(CERT, KEY, client_ca=CERT)) as server:
        server.script_next(echo)
        with Client(server.url, ca=CERT, cert=CERT, key=KEY) as client:
            assert client.predict("m", 1) == 1
        with Client(server.url) as client, pytest.raises(UntrustedCertificate):
            client.predict("m", 1)


# ---- streams


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_a_stream_is_not_sent_again_after_its_first_part(server, client):
    server.script_next(busy(), with_reset(STREAM + chunk(b"1\n") + chunk(b"2\n")))
    stream = client.stream("m", 1)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ConnectionLost):
        next(stream)
    assert len(server.seen) == 2


def test_a_stream_that_stalls_ends_in_a_timeout(server, client):
    done = threading.Event()
    server.script_next(
        lambda request, server: (request.connection.sendall(STREAM + chunk(b"1\n")), done.wait(30)),
    )
    stream = client.stream("m", 1, timeout_s=0.2)
    assert next(stream) == 1
    with pytest.raises(ResponseTimeout):
        next(stream)
    done.set()


def test_leaving_a_stream_closes_its_connection_and_ending_it_keeps_it(server, client):
    closed = threading.Event()

    def until_closed(request: Incoming, server: FakeCaptioner) -> None:
        request.connection.sendall(STREAM + chunk(b"1\n"))
        try:
            while request.connection.recv(100):
                pass
        finally:
            closed.set()

    server.script_next(with_raw(STREAM + chunk(b"1\n"), b"0\r\n\r\n"), echo, until_closed)
    assert list(client.stream("m", 1)) == [1]
    assert client.predict("m", 5) == 5
    assert server.connections == 1
    for part in client.stream("m", 1):
        assert part == 1
        break
    assert closed.wait(10)


def test_a_stream_that_nobody_reads_does_not_fill_the_memory(server, client):
    sent = [0]

    def flood(request: Incoming, server: FakeCaptioner) -> None:
        request.connection.sendall(STREAM)
        request.connection.settimeout(1.0)
        line = chunk(b'"' + b"x" * 99_990 + b'"\n')
        while sent[0] < 200_000_000:
            request.connection.sendall(line)
            sent[0] += len(line)

    server.script_next(flood)
    stream = client.stream("m", 1)
    next(stream)
    for thread in server._threads:
        if thread is not server._threads[0]:
            thread.join(20)
    assert sent[0] < 30_000_000
    stream.close()


# ---- many


def test_many_requests_are_bounded_in_number_and_in_order(server, client):
    pulled = itertools.count()
    server.script_next(*[echo] * 60)
    results = client.predict_many("m", pulled, concurrency=4)  # endless
    assert [next(results) for _ in range(40)] == list(range(40))
    results.close()
    assert next(pulled) <= 40 + 4 + 1
    assert server.most_at_once <= 4


def test_the_calling_thread_pulls_the_values(server, client):
    server.script_next(*[echo] * 3)
    threads = set()

    def values() -> Iterator[int]:
        for n in range(3):
            threads.add(threading.get_ident())
            yield n

    assert sorted(client.predict_many("m", values(), ordered=False)) == [(0, 0), (1, 1), (2, 2)]
    assert threads == {threading.get_ident()}


def test_an_error_ends_many_requests_or_takes_the_place_of_a_result(server, client):
    server.script_next(with_status(400), echo, echo)
    results = list(client.predict_many("m", range(3), concurrency=1, return_exceptions=True))
    assert isinstance(results[0], BadRequest)
    assert results[1:] == [1, 2]
    server.script_next(echo, with_status(400), *[echo] * 9)
    results = client.predict_many("m", range(100), concurrency=1)
    assert next(results) == 0
    with pytest.raises(BadRequest):
        next(results)
    with pytest.raises(BadRequest, match="concurrency is 0"):
        client.predict_many("m", [], concurrency=0)


async def test_the_asynchronous_client_takes_both_kinds_of_iterables(server):
    async def values() -> Any:
        for n in range(5):
            await asyncio.sleep(0)
            yield n

    server.script_next(*[echo] * 10)
    async with AsyncClient(server.url) as client:
        assert [n async for n in client.predict_many("m", values())] == list(range(5))
        assert [n async for n in client.predict_many("m", range(5), concurrency=2)] == list(range(5))


async def test_requests_beyond_the_connections_wait_for_one(server):
    server.script_next(*[echo] * 20)
    async with AsyncClient(server.url, connections=2) as client:
        assert await asyncio.gather(*[client.predict("m", n) for n in range(20)]) == list(range(20))
        assert server.connections <= 2
        done = threading.Event()
        server.script_next(with_wait(done, echo), with_wait(done, echo), echo)
        blocked = [asyncio.ensure_future(client.predict("m", n)) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ResponseTimeout, match="none of 2 connections"):
            await client.predict("m", 2, timeout_s=0.1)
        done.set()
        assert await asyncio.gather(*blocked) == [0, 1]
        assert await client.predict("m", 2) == 2


async def test_a_cancelled_request_closes_its_connection(server):
    arrived = threading.Event()

    def until_closed(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        arrived.set()
        while request.connection.recv(100):
            pass
        closed.set()

    closed = threading.Event()
    server.script_next(until_closed, echo)
    async with AsyncClient(server.url) as client:
        task = asyncio.ensure_future(client.predict("m", 1))
        assert await asyncio.to_thread(arrived.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(closed.wait, 10)
        assert await client.predict("m", 2) == 2


# ---- what is sent


def test_options_become_the_headers_of_each_protocol(server):
    options: dict[str, Any] = {
        "version": 2,
        "priority": 1,
        "request_id": "r-1",
        "deadline_s": 5.0,
        "sequence": SequenceRequest("7", start=True),
        "headers": {"X-Mine": "1"},
    }
    with Client(server.url, token="secret") as client:
        server.script_next(echo)
        client.predict("a/b", 1, **options)
        headers = server.seen[-1].headers
        assert server.seen[-1].path == "/predictions/a%2Fb/2"
        assert headers["authorization"] == "Bearer secret"
        assert 4000 < float(headers["x-deadline-ms"]) <= 5000
        names = ("x-priority", "x-request-id", "x-sequence-id", "x-sequence-start", "x-mine")
        assert [headers[name] for name in names] == ["1", "r-1", "7", "true", "1"]
    with Client(server.url, protocol="triton") as client:
        server.script_next(lambda r, s: r.respond(200, b'{"model_name":"m","model_version":"2","outputs":[]}'))
        assert client.infer("m", {"x": np.ones((1, 2), np.float32)}, outputs=["y"], **options).outputs == {}
        seen = server.seen[-1]
        assert seen.path == "/v2/models/m/versions/2/infer"
        head = json.loads(seen.body[: int(seen.headers["inference-header-content-length"])])
        assert head["parameters"] == {
            "binary_data_output": True, "timeout": 5_000_000, "priority": 2,
            "sequence_id": 7, "sequence_start": True, "sequence_end": False,
        }  # fmt: skip
        assert (head["id"], head["outputs"]) == ("r-1", [{"name": "y"}])
        assert not {"x-priority", "x-deadline-ms", "x-sequence-id"} & seen.headers.keys()


TRITON = [
    (lambda c: c.models(), "POST /v2/repository/index", {}),
    (lambda c: c.load("m", config="{}"), "POST /v2/repository/models/m/load", {"parameters": {"config": "{}"}}),
    (lambda c: c.unload("m"), "POST /v2/repository/models/m/unload", {}),
]


@pytest.mark.parametrize(("call", "line", "body"), TRITON, ids=["index", "load", "unload"])
def test_management_of_triton(server, call, line, body):
    server.script_next(lambda request, server: request.respond(200, b'[{"name": "m"}]'))
    with Client(server.url, protocol="triton") as client:
        assert call(client) == [{"name": "m"}]
    assert (f"{server.seen[0].method} {server.seen[0].path}", json.loads(server.seen[0].body)) == (line, body)


def test_statistics_of_triton(server):
    server.metadata.append(lambda request, server: request.respond(200, b'{"model_stats": [{"name": "m"}]}'))
    server.metadata.append(lambda request, server: request.respond(200, b"{}"))
    with Client(server.url, protocol="triton") as client:
        assert client.statistics("m") == [{"name": "m"}]
        with pytest.raises(UnexpectedResponse, match="without 'model_stats'"):
            client.statistics("m")


def test_what_a_protocol_lacks_is_refused_with_advice():
    with Client("http://127.0.0.1:1", protocol="triton") as client:
        for call in (lambda: client.predict("m", 1), lambda: client.scale("m", 2), lambda: client.set_default("m", 2)):
            with pytest.raises(NotSupported, match=r"^The Open Inference Protocol has no .*; "):
                call()
    with Client("http://127.0.0.1:1", protocol="torchserve", management_url="http://127.0.0.1:1") as client:
        for call in (lambda: client.infer("m", {"x": [1]}), lambda: client.set_traffic("m", {"1": 1})):
            with pytest.raises(NotSupported, match=r"^TorchServe has no .*; "):
                call()


def test_wrong_arguments_are_errors_at_once():
    for url, options, text in (
        ("ftp://x", {}, "no known scheme"),
        ("http://h", {"protocol": "tritn"}, "did you mean 'triton'"),
        ("http://h", {"connections": 0}, "connections is 0"),
        ("https://h", {"ca": "/nowhere"}, "TLS files"),
        ("grpc://h:1/prefix", {}, "after the address of a gRPC server"),
        ("grpc://h:1", {"management_url": "http://h"}, "gRPC has the Open Inference Protocol only"),
    ):
        with pytest.raises(ConfigError, match=text):
            Client(url, **options)
    with Client("http://127.0.0.1:1") as client:
        for call, error, text in (
            (lambda: client.predict("m", 1, deadine_s=1), TypeError, "did you mean 'deadline_s'"),
            (lambda: client.predict("m", 1, timeout_s=0), BadRequest, "timeout_s is 0"),
            (lambda: client.predict("m", 1, priority=-1), BadRequest, "priority is -1"),
            (lambda: client.predict_many("m", [1], idempotency_key="k"), BadRequest, "belongs to one request"),
            (lambda: client.predict_many("m", [1], concurency=2), TypeError, "unknown option 'concurency'"),
            (lambda: client.predict("", 1), BadRequest, "empty name"),
            (lambda: client.predict("m", 1, headers={"a": "b\r\nc: d"}), BadRequest, "line break"),
            (lambda: client.unload("m"), ConfigError, "management_url"),
        ):
            with pytest.raises(error, match=text):
                call()


def test_a_token_that_others_can_read_is_warned_of(caplog):
    for url in ("http://server.example", "grpc://server.example:8001"):
        Client(url, token="t").close()
        assert f"server={url.replace('grpc', 'http')} the token is sent unencrypted" in caplog.text
        caplog.clear()
    for url in ("https://server.example", "http://127.0.0.1:8080", "unix:/tmp/s"):
        Client(url, token="t").close()
    assert not caplog.text


# ---- threads, loops, processes


def test_many_threads_share_a_client(server, client):
    server.script_next(*[echo] * 400)
    wrong = []

    def work(n: int) -> None:
        wrong.extend(k for k in range(n, n + 25) if client.predict("m", k) != k)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(server.seen) == 400


async def test_the_synchronous_client_works_inside_a_running_loop(server):
    server.script_next(echo)
    with Client(server.url) as client:
        assert client.predict("m", 1) == 1


async def test_a_client_belongs_to_one_loop(server):
    client = AsyncClient(server.url)
    assert await client.ready("m")
    with pytest.raises(PenstockError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(client.ready()))
    await client.close()
    with pytest.raises(PenstockError, match="closed"):
        await client.ready()


def test_a_closed_client_says_so_and_leaves_nothing(server):
    before = set(threading.enumerate())
    client = Client(server.url)
    assert client.ready("m")
    assert set(threading.enumerate()) - before - set(server._threads)
    client.close()
    client.close()
    assert not set(threading.enumerate()) - before - set(server._threads)
    with pytest.raises(PenstockError, match="closed"):
        client.predict("m", 1)


def test_a_forgotten_client_ends_its_thread(server):
    before = set(threading.enumerate())
    client = Client(server.url)
    assert client.ready("m")
    del client
    gc.collect()
    assert not set(threading.enumerate()) - before - set(server._threads)


def test_closing_ends_requests_in_progress(server):
    done, errors = threading.Event(), []
    server.script_next(with_wait(done, echo))
    client = Client(server.url)

    def call() -> None:
        try:
            client.predict("m", 1)
        except PenstockError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not server.seen:
        time.sleep(0.01)
    client.close()
    thread.join(10)
    done.set()
    assert not thread.is_alive()
    assert len(errors) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_gets_a_clear_error(server):
    with Client(server.url) as client:
        assert client.ready("m")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                client.predict("m", 1)
            except PenstockError as error:
                os._exit(7 if "create one in each process" in error.message else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert client.ready("m")
