"""A client connection against a faulty server, on both event loops."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.client.endpoint import (
    ConnectionLost,
    MalformedResponse,
    ResponseTooLarge,
    Unreachable,
    UntrustedCertificate,
    parse_url,
    tls_context,
)
from penstock.client.http import ClientConnection
from penstock.client.response import HttpResponse
from penstock.errors import BadRequest, DeadlineExceeded
from penstock.serving.http.auth import make_ssl_context
from support.captioner import (
    FakeCaptioner,
    Incoming,
    reset,
    with_raw,
    with_reset,
    with_status,
    with_wait,
)

TLS = Path(__file__).parents[2] / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
        yield runner.run


@pytest.fixture
def server() -> Iterator[FakeCaptioner]:
    with FakeCaptioner() as server:
        yield server


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, run on an event loop of asyncio, and on one of uvloop."""

    def call(run: Run, **fixtures: Any) -> None:
        run(test(**fixtures))

    parameters = [inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += inspect.signature(test).parameters.values()
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__name__, call.__module__ = test.__name__, test.__module__
    return call


@pytest.fixture
def connection(run: Run, server: FakeCaptioner) -> Iterator[ClientConnection]:
    """A connection to the server, not open yet."""
    connection = ClientConnection(parse_url(server.url))
    yield connection
    connection.close()


def echo(request: Incoming, server: FakeCaptioner) -> None:
    request.respond(200, request.body, "X-Two: a", "x-two: b")


async def post(connection: ClientConnection, *body: bytes | memoryview, **limits: Any) -> HttpResponse:
    return await connection.request("POST", "/echo", [("X-One", "1")], body, **{"timeout_s": 20.0, **limits})


def test_a_body_of_many_buffers_arrives_as_one(run: Run, server: FakeCaptioner, connection: ClientConnection):
    server.script_next(echo)
    response = run(post(connection, b"head", memoryview(b"x" * 5_000_000), memoryview(bytearray(b"tail"))))
    assert response.status == 200
    assert response.body == b"head" + b"x" * 5_000_000 + b"tail"
    assert response.headers["x-two"] == "a, b"
    assert server.seen[0].headers["x-one"] == "1"
    assert server.seen[0].path == "/echo"


@on_both_loops
async def test_a_connection_is_reused_for_the_next_request(server: FakeCaptioner, connection: ClientConnection):
    for text in (b"one", b"two", b""):
        server.script_next(echo)
        assert (await post(connection, text)).body == text
    assert server.connections == 1


@pytest.mark.parametrize("body", [b"x", b"x" * 3_000_000])
@on_both_loops
async def test_a_reused_connection_that_was_closed_is_reopened_silently(
    server: FakeCaptioner, connection: ClientConnection, body: bytes
):
    closed = threading.Event()

    def answer_and_close(request: Incoming, server: FakeCaptioner) -> None:
        request.respond(200, request.body)
        reset(request.connection)
        closed.set()

    server.script_next(answer_and_close, echo)
    await post(connection, b"first")
    closed.wait(10)  # blocks the loop, which learns of the reset only when it sends
    assert (await post(connection, body)).body == body
    assert server.connections == 2


@on_both_loops
async def test_a_server_killed_by_a_request_on_a_reused_connection_is_a_lost_connection(
    server: FakeCaptioner, connection: ClientConnection
):
    def die(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        server.stop()

    server.script_next(echo, die)
    await post(connection)
    with pytest.raises(ConnectionLost):
        await post(connection, b"x")
    with pytest.raises(Unreachable):
        await post(connection, b"x")


@on_both_loops
async def test_a_response_with_connection_close_ends_the_connection(
    server: FakeCaptioner, connection: ClientConnection
):
    server.script_next(with_status(200, "Connection: close"), echo)
    await post(connection)
    assert (await post(connection, b"x")).body == b"x"
    assert server.connections == 2


def test_a_reset_of_a_new_connection_is_not_retried(run: Run, server: FakeCaptioner, connection: ClientConnection):
    server.script_next(with_reset())
    with pytest.raises(ConnectionLost, match="without a response"):
        run(post(connection, b"x"))
    assert server.connections == 1


@on_both_loops
async def test_a_reset_in_the_middle_of_a_response_is_reported(server: FakeCaptioner, connection: ClientConnection):
    server.script_next(echo, with_reset(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"))
    await post(connection)
    with pytest.raises(ConnectionLost):
        await post(connection)


def test_a_closed_port_is_unreachable(run: Run, server: FakeCaptioner, connection: ClientConnection):
    server.stop()
    with pytest.raises(Unreachable, match="cannot connect"):
        run(post(connection))


def test_an_unknown_host_is_unreachable(run: Run):
    async def go() -> None:
        await post(ClientConnection(parse_url("http://nobody.invalid")))

    with pytest.raises(Unreachable):
        run(go())


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nT: r\r\n\r\n", b"abc"),
        (b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nX-Error-Code: a \t\r\nContent-Length: 2 \r\n\r\nok", b"ok"),
    ],
)
@on_both_loops
async def test_every_form_of_response_is_read_and_keeps_the_connection(
    server: FakeCaptioner, connection: ClientConnection, raw: bytes, body: bytes
):
    for pieces in ([raw], [bytes([b]) for b in raw]):
        server.script_next(with_raw(*pieces))
        response = await post(connection, b"x")
        assert response.body == body
        assert "x" not in response.headers
        assert response.headers.get("x-error-code", "a") == "a"
    assert server.connections == 1


def test_a_body_without_a_length_ends_with_the_connection(
    run: Run, server: FakeCaptioner, connection: ClientConnection
):
    def response(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        request.connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        request.connection.shutdown(1)

    server.script_next(response)
    assert run(post(connection)).body == b"all of it"


@pytest.mark.parametrize(
    "raw",
    [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
     b"HTTP/1.1 101 X\r\nUpgrade: y\r\nConnection: upgrade\r\n\r\n"],
)  # fmt: skip
def test_malformed_http_is_reported(run: Run, server: FakeCaptioner, connection: ClientConnection, raw: bytes):
    server.script_next(with_raw(raw))
    with pytest.raises(MalformedResponse):
        run(post(connection, timeout_s=5.0))


@pytest.mark.parametrize(
    ("first", "forever"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n", b"x" * 65536),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nA: ", b"x" * 65536),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x" * 65536),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: ", b"x" * 65536),
    ],
    ids=["declared", "chunked", "until the end", "headers", "one header", "interim", "extension", "trailer"],
)
def test_an_endless_response_is_rejected_before_it_is_stored(
    run: Run, server: FakeCaptioner, connection: ClientConnection, first: bytes, forever: bytes
):
    server.script_next(with_raw(first, forever=forever))
    with pytest.raises((ResponseTooLarge, MalformedResponse)):
        run(post(connection, max_response_bytes=200_000))


def test_a_response_of_the_largest_allowed_size_is_read(run: Run, server: FakeCaptioner, connection: ClientConnection):
    server.script_next(echo, echo)
    assert len(run(post(connection, b"x" * 1000, max_response_bytes=1000)).body) == 1000
    with pytest.raises(ResponseTooLarge, match="the 999 bytes allowed"):
        run(post(connection, b"x" * 1000, max_response_bytes=999))


@on_both_loops
async def test_an_early_rejection_is_received_while_the_body_is_being_sent(
    server: FakeCaptioner, connection: ClientConnection
):
    server.script_next(with_status(413, early=True), echo)
    response = await post(connection, memoryview(bytes(40_000_000)))
    assert response.status == 413
    assert (await post(connection, b"x")).body == b"x"
    assert server.connections == 2


def test_a_slow_drip_ends_at_the_request_timeout(run: Run, server: FakeCaptioner, connection: ClientConnection):
    stop = threading.Event()

    def drip(request: Incoming, server: FakeCaptioner) -> None:
        _ = request.body
        request.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not stop.wait(0.01):
            request.connection.sendall(b"x")

    server.script_next(drip)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
        run(post(connection, timeout_s=0.2))
    stop.set()


def test_a_server_that_reads_nothing_ends_at_the_request_timeout(
    run: Run, server: FakeCaptioner, connection: ClientConnection
):
    release = threading.Event()
    server.script_next(lambda request, server: release.wait(20) and None)
    with pytest.raises(DeadlineExceeded):
        run(post(connection, memoryview(bytes(40_000_000)), timeout_s=0.2))
    release.set()


@on_both_loops
async def test_a_request_after_a_failed_one_opens_a_new_connection(server: FakeCaptioner, connection: ClientConnection):
    release = threading.Event()

    server.script_next(with_wait(release, echo), echo)
    with pytest.raises(DeadlineExceeded):
        await post(connection, timeout_s=0.05)
    assert (await post(connection, b"x")).body == b"x"
    release.set()
    assert server.connections == 2


@on_both_loops
async def test_unsolicited_bytes_do_not_become_the_next_response(server: FakeCaptioner, connection: ClientConnection):
    server.script_next(with_raw(OK, OK.replace(b"ok", b"no")), echo)
    assert (await post(connection)).body == b"ok"
    await asyncio.sleep(0.05)  # the second response arrives while nothing waits for it
    assert (await post(connection, b"x")).body == b"x"


@on_both_loops
async def test_a_cancelled_caller_leaves_no_open_connection(server: FakeCaptioner, connection: ClientConnection):
    release = threading.Event()

    server.script_next(with_wait(release, echo), echo)
    task = asyncio.ensure_future(post(connection, b"x" * 1000))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await post(connection, b"y")).body == b"y"
    release.set()


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\n", "\r", "日本"])
def test_a_header_that_http_cannot_carry_is_rejected(run: Run, server: FakeCaptioner, value: str):
    async def go() -> None:
        await ClientConnection(parse_url(server.url)).request("GET", "/", [("Authorization", value)])

    with pytest.raises(BadRequest, match="HTTP cannot carry"):
        run(go())
    assert server.connections == 0


def test_a_path_with_a_space_is_rejected(run: Run, server: FakeCaptioner):
    async def go() -> None:
        await ClientConnection(parse_url(server.url)).request("GET", "/ HTTP/1.1\r\nX: y")

    with pytest.raises(BadRequest):
        run(go())


# ---- TLS


@pytest.fixture
def secure() -> Iterator[FakeCaptioner]:
    with FakeCaptioner(tls=make_ssl_context(CERT, KEY)) as server:
        yield server


def test_large_bodies_pass_through_tls_with_a_private_authority(run: Run, secure: FakeCaptioner):
    async def go() -> None:
        connection = ClientConnection(parse_url(secure.url, tls_context(CERT)))
        for size in (10, 3_000_000):
            secure.script_next(echo)
            assert (await post(connection, b"a", memoryview(b"x" * size))).body == b"a" + b"x" * size
        connection.close()

    run(go())
    assert secure.connections == 1


def test_a_certificate_of_an_unknown_authority_is_not_trusted(run: Run, secure: FakeCaptioner):
    async def go() -> None:
        await post(ClientConnection(parse_url(secure.url)))

    with pytest.raises(UntrustedCertificate, match="certificate"):
        run(go())


def test_a_certificate_for_another_name_is_not_trusted(run: Run, secure: FakeCaptioner):
    async def go() -> None:
        await post(ClientConnection(parse_url(f"https://127.1:{secure.port}", tls_context(CERT))))

    with pytest.raises(UntrustedCertificate):
        run(go())


def test_a_server_without_tls_is_unreachable_by_https(run: Run, server: FakeCaptioner):
    async def go() -> None:
        endpoint = parse_url(f"https://localhost:{server.port}", tls_context(CERT))
        await post(ClientConnection(endpoint, connect_timeout_s=0.2))

    with pytest.raises(Unreachable):
        run(go())


def test_an_early_rejection_is_received_through_tls_while_the_body_is_being_sent(run: Run, secure: FakeCaptioner):
    async def go() -> int:
        connection = ClientConnection(parse_url(secure.url, tls_context(CERT)))
        secure.script_next(with_status(413, early=True))
        response = await post(connection, memoryview(bytes(40_000_000)))
        connection.close()
        return response.status

    assert run(go()) == 413
