"""One suite over both faces of the routes: the listener, and the ASGI app (bare, mounted, and on uvicorn)."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from penstock.config.schema import LimitsConfig
from penstock.errors import (
    BadRequest,
    DeadlineExceeded,
    DecodeError,
    ItemFailed,
    ModelNotFound,
    ModelNotReady,
    PayloadTooLarge,
    PenstockError,
    QueueFull,
    WorkerDied,
)
from penstock.serving.http.asgi import InferenceApp, error_response
from penstock.serving.http.server import HttpServer
from penstock.types import ItemResult
from support.asgi_server import serving_app
from support.backend import Call, FakeBackend

LIMITS = LimitsConfig(max_body_bytes=1_000_000)


def parts(call: Call) -> None:
    call.reply(b"a\nb", "text/plain", final=False)
    call.reply(b"c", "text/plain")


def events(call: Call) -> None:
    call.reply(b"data: a\n\n", "text/event-stream", final=False)
    call.sink(ItemResult(error=ItemFailed("it raised")))


MODELS = {
    "events": events,
    "echo": Call.reply,
    "parts": parts,
    "bad": lambda call: call.sink(ItemResult(error=ItemFailed("it raised", detail="secret"))),
    "own": lambda call: call.reply(b"tea", "text/x", status=418, headers=[("X-Pot", "1")]),
}


@asynccontextmanager
async def face(kind: str, backend: FakeBackend, tokens: frozenset[bytes]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of one of the faces."""
    app = InferenceApp(backend, LIMITS, tokens=tokens)
    stack = AsyncExitStack()
    transport, base = None, "http://test"
    if kind == "listener":
        server = HttpServer(backend, LIMITS, tokens=tokens)
        base = f"http://127.0.0.1:{(await server.start('127.0.0.1', 0))[1]}"
        stack.push_async_callback(server.close, 1.0)
    elif kind == "uvicorn":
        base = await stack.enter_async_context(serving_app(app))
    elif kind == "mounted":
        transport, base = httpx.ASGITransport(Starlette(routes=[Mount("/ml", app)])), "http://test/ml"
    else:
        transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=base, trust_env=False) as client:
        yield client
    await stack.aclose()


@pytest.fixture(params=["listener", "asgi", "mounted", "uvicorn"])
async def face_of(request):
    """`face_of(backend, tokens)` gives a client of this parameter's face."""
    return lambda backend=None, tokens=frozenset(): face(request.param, backend or FakeBackend(MODELS), tokens)


@pytest.mark.parametrize("size", [0, 10, 300_000])
async def test_bodies_come_back(face_of, size):
    backend = FakeBackend(MODELS)
    async with face_of(backend) as client:
        answer = await client.post("/predictions/echo", content=b"x" * size, headers={"x-request-id": "r-1"})
        assert (answer.status_code, answer.content) == (200, b"x" * size)
        assert answer.headers["x-request-id"] == "r-1"
        assert backend.used_bytes == 0


async def test_put_is_post(face_of):
    async with face_of() as client:
        answer = await client.put("/predictions/echo", content=b"from curl -T")
        assert (answer.status_code, answer.content) == (200, b"from curl -T")


async def test_chunked_bodies_come_back(face_of):
    async def body() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"y" * 1999

    async with face_of() as client:
        assert (await client.post("/predictions/echo/1", content=body())).content == b"y" * 199_900


async def test_a_body_over_the_limit_is_413(face_of):
    backend = FakeBackend(MODELS)
    async with face_of(backend) as client:
        assert (await client.post("/predictions/echo", content=b"x" * 1_000_001)).status_code == 413
        assert backend.calls == []


async def test_a_body_in_a_coding_is_unpacked_on_every_route(face_of):
    backend = FakeBackend(MODELS)
    bodies = [bytes(range(200)) * n for n in (0, 5, 1500)]
    packed = [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
    refused = [
        ("br", b"x", 415),
        ("gzip, gzip", b"x", 415),
        ("gzip", b"x", 400),
        ("gzip", gzip.compress(bytes(10**6 + 1)), 413),
    ]
    async with face_of(backend) as client:
        for path in ("/predictions/echo", "/v2/models/echo/infer", "/v1/models/echo:predict"):
            for name, pack in packed:
                for body in bodies:
                    answer = await client.post(path, content=pack(body), headers={"content-encoding": name})
                    assert (answer.status_code, answer.content) == (200, body)
            for name, content, status in refused:
                answer = await client.post(path, content=content, headers={"content-encoding": name})
                assert answer.status_code == status
                assert (b"limits.max_body_bytes" in answer.content) is (status == 413)
                assert answer.headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
        unpacked = [call.item for call in backend.calls if (b"content-encoding", b"identity") not in call.item.headers]
        assert len(unpacked) == 27
        assert not any(name == b"content-encoding" for item in unpacked for name, _ in item.headers)
        assert {item.codec for item in unpacked} == {"native", "oip_json", "kserve"}
        assert backend.used_bytes == 0


async def test_a_repeated_request_is_answered_without_the_model(face_of):
    backend = FakeBackend(MODELS)
    async with face_of(backend) as client:
        for body in (b"abc", b"x" * 300_000):
            key = {"idempotency-key": f"k{len(body)}"}
            answers = [await client.post("/predictions/echo", content=body, headers=key) for _ in range(2)]
            assert [answer.content for answer in answers] == [body, body]
            assert (await client.post("/predictions/echo", content=b"ab", headers=key)).status_code == 422
        assert len(backend.calls) == 2
        for coding in ("gzip", "deflate", "deflate"):  # the stored answer would have the wrong one
            await client.post("/predictions/echo", content=b"abc", headers={"accept-encoding": coding, **key})
        assert len(backend.calls) == 4
        assert backend.used_bytes == 0


async def test_tensors_come_in_three_forms_and_never_as_a_pickle(face_of):
    backend = FakeBackend(MODELS)
    async with face_of(backend) as client:
        for headers, codec in (
            ({"content-type": "application/octet-stream"}, "oip_json"),
            ({"Inference-Header-Content-Length": "2"}, "oip_binary"),
            ({"Inference-Header-Content-Length": "0"}, "oip_binary"),
            ({"content-type": "application/X-npy"}, "oip_npy"),
            ({"content-type": "application/x-npy", "inference-header-content-length": "2"}, "oip_binary"),
            ({"accept-encoding": "deflate", "content-type": "application/json"}, "oip_json_coded"),
            ({"accept-encoding": "gzip, deflate", "content-type": "application/json"}, "oip_json"),
            ({"accept-encoding": "gzip", "inference-header-content-length": "2"}, "oip_binary_coded"),
            ({"accept-encoding": "gzip", "content-type": "application/x-npy"}, "oip_npy_coded"),
        ):
            assert (await client.post("/v2/models/echo/infer", content=b"{}", headers=headers)).status_code == 200
            assert backend.calls[-1].item.codec == codec
        for headers, status in (
            ({"content-type": "application/x-python-pickle"}, 415),
            ({"content-encoding": "br", "inference-header-content-length": "2"}, 415),
            ({"content-type": "application/vnd.pickle", "inference-header-content-length": "2"}, 415),
            ({"inference-header-content-length": "-1"}, 400),
        ):
            answer = await client.post("/v2/models/echo/infer", content=b"{}", headers=headers)
            assert answer.status_code == status
            assert list(answer.json()) == ["error"]
        assert len(backend.calls) == 9
        native = await client.post("/predictions/echo", content=b"{}", headers={"content-type": "application/x-pickle"})
        assert native.status_code == 200
        assert backend.calls[-1].item.content_type == "application/x-pickle"


async def test_open_inference_routes(face_of):
    async with face_of() as client:
        assert (await client.get("/v2")).json()["name"] == "penstock"
        assert (await client.get("/v2/models/echo")).json()["inputs"] == [
            {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
        ]
        assert (await client.get("/v2/models/echo/versions/1/ready")).json() == {"name": "echo", "ready": True}
        assert (await client.get("/v2/models/echo/versions/2/ready")).status_code == 404
        assert (await client.post("/v2/models/bad/infer")).json() == {"error": "it raised"}


async def test_the_body_of_openais_routes_names_the_model(face_of):
    backend = FakeBackend(MODELS)
    async with face_of(backend) as client:
        for size in (1, 60_000, 70_000, 900_000):  # also in shared memory
            body = b'{"input": "%b", "model": "echo"}' % (b"x" * size)
            for content in (body, chunked(body)):
                answer = await client.post("/v1/embeddings", content=content, headers={"accept": "text/event-stream"})
                assert (answer.status_code, answer.content) == (200, body)  # never wrapped in an event of ours
            assert backend.calls[-1].item.codec == "openai_embeddings"
            for bad, status in ((body.replace(b"echo", b"ecco"), 404), (body.replace(b"model", b"mode"), 400)):
                answer = await client.post("/v1/embeddings", content=bad)
                assert answer.status_code == status
                assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await client.post("/v1/embeddings", content=b"x" * 1_100_000)).status_code == 413
        assert backend.used_bytes == 0
        assert (await client.put("/v1/embeddings", content=body)).status_code == 405


async def chunked(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 50_000):
        yield body[at : at + 50_000]


async def test_an_error_within_events_is_an_event(face_of):
    async with face_of() as client:
        answer = await client.post("/v1/completions", content=b'{"model": "events"}')
        assert answer.headers["content-type"] == "text/event-stream"
        first, error = answer.text.removesuffix("\n\n").split("\n\n")
        assert first == "data: a"
        assert json.loads(error.removeprefix("event: error\ndata: "))["error"]["type"] == "server_error"


@pytest.mark.parametrize(("path", "told"), [("/v2/models/echo/config", str), ("/v1/nothing", dict)])
async def test_an_unknown_route_uses_the_error_format_of_its_neighbours(face_of, path, told):
    async with face_of() as client:
        answer = await client.get(path)
        assert (answer.status_code, type(answer.json()["error"])) == (404, told)


async def test_health_follows_the_backend(face_of):
    backend = FakeBackend(MODELS)
    async with face_of(backend, frozenset({b"t"})) as client:
        for path, body in (("/ping", {"status": "Healthy"}), ("/readyz", {"ready": True})):
            assert (await client.get(path)).json() == body
        backend.is_ready = False
        for path in ("/ping", "/readyz", "/v2/health/ready"):
            assert (await client.get(path)).status_code == 503
        for path in ("/healthz", "/v2/health/live"):
            assert (await client.get(path)).json() == {"live": True}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/nowhere", {}, 404),
        ("POST", "/predictions/nobody", {}, 404),
        ("GET", "/predictions/echo", {}, 405),
        ("POST", "/predictions/echo", {"x-deadline-ms": "x"}, 400),
        ("POST", "/predictions/echo", {"x-deadline-ms": "0"}, 504),
        ("POST", "/predictions/echo", {"x-priority": "-1"}, 400),
        ("POST", "/predictions/bad", {}, 500),
    ],
)
async def test_errors_have_the_same_status_everywhere(face_of, method, path, headers, status):
    async with face_of() as client:
        answer = await client.request(method, path, headers=headers)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"code", "message"}
        assert "secret" not in answer.text


async def test_a_full_queue_is_429_with_retry_after(face_of):
    backend = FakeBackend(MODELS)
    backend.refuse = QueueFull("full", retry_after_s=1.2)
    async with face_of(backend) as client:
        answer = await client.post("/predictions/echo")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


async def test_results_choose_status_and_headers(face_of):
    async with face_of() as client:
        answer = await client.post("/predictions/own")
        assert (answer.status_code, answer.headers["x-pot"], answer.text) == (418, "1", "tea")


async def test_streams_and_events(face_of):
    async with face_of() as client:
        assert (await client.post("/predictions/parts")).text == "a\nbc"
        answer = await client.post("/predictions/parts", headers={"accept": "text/event-stream"})
        assert answer.text == "data: a\ndata: b\n\ndata: c\n\n"


async def test_tokens(face_of):
    async with face_of(tokens=frozenset({b"right"})) as client:
        answer = await client.post("/predictions/echo")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await client.post("/predictions/echo", headers={"authorization": "Bearer right"})).status_code == 200


async def test_openapi_lists_only_the_models_that_are_loaded(face_of):
    backend = FakeBackend(MODELS)
    async with face_of(backend) as client:
        page = (await client.get("/openapi.json")).json()
        assert page["openapi"].startswith("3.1")
        assert set(page["paths"]["/predictions/echo"]) == {"post", "put"}
        assert "/v2/models/parts/infer" in page["paths"]
        assert not any("{" in path for path in page["paths"])
        backend.is_ready = False
        page = (await client.get("/openapi.json")).json()
        assert not any(path.startswith("/predictions") for path in page["paths"])


async def test_a_client_that_hangs_up_is_cancelled(wait_until):
    backend = FakeBackend({"m": lambda call: None})
    app = InferenceApp(backend, LIMITS)
    messages = [{"type": "http.request", "body": b"x"}]
    gone = asyncio.Event()

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError("nothing may be sent")

    headers = [(b"x-priority", b" 1\t"), (b"x-own", b"a b ")]
    scope = {"type": "http", "method": "POST", "path": "/predictions/m", "headers": headers}
    running = asyncio.create_task(app(scope, receive, send))
    await wait_until(lambda: backend.calls)
    gone.set()
    await running
    (call,) = backend.calls
    assert call.cancelled
    assert (call.priority, call.item.headers) == (1, [(b"x-priority", b"1"), (b"x-own", b"a b")])


async def test_a_stream_to_a_slow_reader_is_aborted(wait_until):
    backend = FakeBackend({"m": lambda call: None})
    app = InferenceApp(backend, LimitsConfig(write_buffer_bytes=1000))
    messages = [{"type": "http.request", "body": b"x"}]
    reading, sent = asyncio.Event(), []

    async def receive():
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message):
        sent.append(message)
        await reading.wait()

    scope = {"type": "http", "method": "POST", "path": "/predictions/m", "headers": []}
    running = asyncio.create_task(app(scope, receive, send))
    await wait_until(lambda: backend.calls)
    for _ in range(40):
        backend.calls[0].reply(b"x" * 500, "text/plain", final=False)
        await asyncio.sleep(0)
    assert backend.calls[0].cancelled
    reading.set()
    with pytest.raises(RuntimeError, match="stream failed"):
        await running
    assert sum(len(message.get("body", b"")) for message in sent) < 40 * 500


async def test_the_lifespan_is_answered():
    sent = []

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message["type"])

    await InferenceApp(FakeBackend(), LIMITS)({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_the_listener_loads_neither_uvicorn_nor_starlette_nor_numpy():
    import subprocess
    import sys

    code = "import penstock.serving.http.server, sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"uvicorn", "starlette", "numpy", "python_multipart"} & set(loaded)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (BadRequest("no"), 400, {}),
        (DecodeError("no"), 400, {}),
        (ModelNotFound("no"), 404, {}),
        (PayloadTooLarge("no"), 413, {}),
        (QueueFull("no", retry_after_s=2.5), 429, {"retry-after": "3"}),
        (ItemFailed("no", detail="secret"), 500, {}),
        (ModelNotReady("no"), 503, {"retry-after": "1"}),
        (WorkerDied("no"), 503, {"retry-after": "1"}),
        (DeadlineExceeded("no"), 504, {}),
    ],
)
async def test_fastapi_answers_errors_of_penstock_as_the_native_routes_do(error, status, headers, caplog):
    async def fail():
        raise error

    app = FastAPI()
    app.add_exception_handler(PenstockError, error_response)
    app.add_api_route("/fail", fail)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/fail")
    assert answer.status_code == status
    assert answer.json() == {"error": {"code": error.code, "message": "no"}}
    assert {name: answer.headers.get(name) for name in headers} == headers
    logged = [record.getMessage() for record in caplog.records if "event=failed" in record.getMessage()]
    assert len(logged) == (status >= 500)


async def test_other_errors_are_not_answered():
    with pytest.raises(KeyError):
        await error_response(None, KeyError("x"))


def test_the_error_handler_needs_no_web_framework():
    code = "import sys, penstock.serving.http.asgi; assert not {'starlette', 'fastapi', 'uvicorn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
