"""Routes served by a function of the whole request: bodies, errors, order, metrics and Open Inference routes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock import __version__
from penstock.config.schema import LimitsConfig
from penstock.errors import BadRequest
from penstock.serving.http.server import HttpServer
from penstock.serving.protocols.route import HttpRequest, Template
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.http.flavor import TorchServeFlavor
from penstock.types import ItemResult
from support.torchserve import FakeAdministration, KnownBackend

LIMIT_S = 10.0
Function = Callable[[HttpRequest], Awaitable[ItemResult]]


@asynccontextmanager
async def serving(function: Function, path: str = "/do/{what}", **limits: Any) -> AsyncIterator[tuple[HttpServer, int]]:
    table = [Template(path, "", serve=function, methods=frozenset({"PUT", "GET", "POST"}))]
    flavor = TorchServeFlavor(FakeAdministration(), ListenerConfig(frozenset({"management"}), Properties()), table)
    server = HttpServer(KnownBackend(), LimitsConfig(**limits), flavor=flavor)
    _, port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.close(1.0)


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), LIMIT_S)
    writer.close()
    return answer


async def echo(request: HttpRequest) -> ItemResult:
    return ItemResult(body=request.body)


async def test_the_function_receives_the_whole_request():
    asked: list[HttpRequest] = []

    async def note(request: HttpRequest) -> ItemResult:
        asked.append(request)
        return ItemResult(body=b"fine", status=202)

    async with serving(note) as (_, port):
        target = b"/do/a%20b?x=1&y=%C3%A9+z&x=2&empty=&bare"
        head = b"PUT %b HTTP/1.1\r\nX-Mine: 1\r\nContent-Type: a/b\r\nConnection: close\r\n" % target
        answer = await ask(port, head + b"Content-Length: 3\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 202 Accepted\r\n")
        assert answer.endswith(b"\r\n\r\nfine")
    (request,) = asked
    assert (request.method, request.path, request.names) == ("PUT", target.decode(), {"what": "a b"})
    assert request.query == {"x": ["1", "2"], "y": ["\xe9 z"], "empty": [""], "bare": [""]}
    assert (request.content_type, request.body) == ("a/b", b"abc")
    assert (b"X-Mine", b"1") in request.headers


@pytest.mark.parametrize("size", [0, 1000, 65_536, 65_537])
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_up_to_64_kib_are_bytes_without_shared_memory(size, chunked):
    body = (
        b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size) if chunked and size else b"0\r\n\r\n" if chunked else b"x" * size
    )
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    async with serving(echo, max_body_bytes=300_000) as (server, port):
        answer = await ask(port, b"POST /do/it HTTP/1.1\r\nConnection: close\r\n%b\r\n\r\n%b" % (framing, body))
        if size > 65_536:
            assert answer.startswith(b"HTTP/1.1 413 ")
        else:
            assert answer.partition(b"\r\n\r\n")[2] == b"x" * size
        assert server.listener.backend.used_bytes == 0  # type: ignore[attr-defined]


async def test_an_error_is_answered_and_a_bug_reveals_nothing(caplog):
    async def fail(request: HttpRequest) -> ItemResult:
        if request.names["what"] == "bad":
            raise BadRequest("found a, expected b")
        raise KeyError("/a/secret/path")

    async with serving(fail) as (_, port):
        answer = await ask(port, b"GET /do/bad HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b'"message": "found a, expected b"' in answer
        answer = await ask(port, b"GET /do/bug HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        assert b"secret" not in answer
        assert "event=bug where=route path='/do/bug'" in caplog.text


async def test_a_change_completes_after_its_client_leaves_and_closing_waits_for_it():
    begun, gate, made = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def change(request: HttpRequest) -> ItemResult:
        begun.set()
        await gate.wait()
        made.set()
        return ItemResult(body=b"nobody reads this")

    async with serving(change) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PUT /do/it HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        writer.close()
        while server.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        closing = asyncio.ensure_future(server.close(LIMIT_S))
        await asyncio.sleep(0.01)
        assert not closing.done()
        gate.set()
        await asyncio.wait_for(closing, LIMIT_S)
        assert made.is_set()


# ---- metrics

METRICS = frozenset({"metrics"})


async def test_metrics_can_be_selected_by_name(site):
    async with site(METRICS) as ask:
        reply = await ask("GET", "/metrics")
        assert (reply.status, reply.body) == (200, b"metrics of ")
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (await ask("GET", "/metrics?name[]=a&name%5B%5D=b&other=c")).body == b"metrics of a,b"


async def test_metrics_need_no_token_and_are_only_on_their_listener(site, administration):
    administration.keys = {"management": b"k", "inference": b"i", "token": b"t"}
    async with site(METRICS) as ask:
        assert (await ask("GET", "/metrics")).status == 200
        assert (await ask("GET", "/models")).status == 404
    async with site(frozenset({"management"})) as ask:
        assert (await ask("GET", "/metrics", "Authorization: Bearer k")).status == 404


async def test_disabled_metrics_are_not_found(site):
    async with site(METRICS, enable_metrics_api=False) as ask:
        assert (await ask("GET", "/metrics")).status == 404


async def test_a_failure_of_the_metrics_reveals_nothing(site, caplog):
    async def fail(names: list[str]) -> bytes:
        raise RuntimeError("secret")

    async with site(METRICS, scrape=fail) as ask:
        reply = await ask("GET", "/metrics")
    assert (reply.status, reply.json()["type"]) == (500, "InternalServerException")
    assert b"secret" not in reply.body
    assert "event=bug" in caplog.text


# ---- the Open Inference Protocol

INFERENCE = frozenset({"inference"})
ROUTES = (
    ("/v2", 200, {"name": "Torchserve", "version": __version__, "extenstion": ["kserve", "kubeflow"]}),
    ("/v2/health/live", 200, {"live": True}),
    ("/v2/health/ready", 200, {"ready": True}),
    ("/v2/models/m/versions/1", 501, {"error": "Model versioning is not yet supported."}),
    ("/v2/models/m/versions/1/infer", 501, {"error": "Model versioning is not yet supported."}),
)


@pytest.mark.parametrize(("target", "status", "value"), ROUTES)
async def test_the_open_inference_routes_return_torchserves_json(site, target, status, value):
    async with site(INFERENCE) as ask:
        for method in ("GET", "POST"):
            reply = await ask(method, target)
            assert (reply.status, reply.json()) == (status, value)


KSERVE = (
    ("/", {"status": "alive"}),
    ("/v1/models", {"models": ["m"]}),
    ("/v1/models/m", {"name": "m", "ready": True}),
    ("/v2/models/m", {"name": "m", "versions": ["1.0", "2.0"], "platform": "", "inputs": [], "outputs": []}),
    ("/v2/models/m/ready", {"name": "m", "ready": True}),
)


@pytest.mark.parametrize(("target", "value"), KSERVE)
async def test_the_questions_of_kserves_clients_are_answered(site, target, value):
    async with site(INFERENCE) as ask:
        reply = await ask("GET", target)
        assert (reply.status, reply.json()) == (200, value)


@pytest.mark.parametrize("target", ["/v1/models/m", "/v2/models/m/ready", "/v2/health/ready"])
async def test_what_is_not_ready_is_503(site, administration, target):
    async def describe(*model: object, **options: object) -> list[dict[str, Any]]:
        return [{"workers": [{"status": "LOADING"}]}]

    administration.describe, administration.is_healthy = describe, False
    async with site(INFERENCE) as ask:
        reply = await ask("GET", target)
        assert (reply.status, reply.json()["ready"]) == (503, False)


@pytest.mark.parametrize("target", ["/v1/models/no", "/v2/models/no", "/v2/models/no/ready", "/v1/models/no:predict"])
async def test_an_unknown_model_is_an_error_in_kserves_form_too(site, target):
    text = "Model not found: no"
    async with site(INFERENCE) as ask:
        reply = await ask("GET", target)
        body = {"code": 404, "type": "ModelNotFoundException", "message": text, "error": text}
        assert (reply.status, reply.json()) == (404, body)
        assert "error" not in (await ask("GET", "/predictions/no")).json()
    async with site(INFERENCE, ts_open_inference_protocol=False) as ask:
        assert "error" not in (await ask("GET", "/v1/models/no:predict")).json()


@pytest.mark.parametrize("target", [target for target, *_ in (*ROUTES, *KSERVE) if target not in ("/", "/v1/models/m")])
async def test_open_inference_routes_exist_only_if_enabled(site, target):
    async with site(INFERENCE, ts_open_inference_protocol=False) as ask:
        assert (await ask("GET", target)).status == 404
    async with site(frozenset({"management"})) as ask:
        assert (await ask("GET", target)).status == 404
