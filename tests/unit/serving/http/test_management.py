"""The routes of the management listener: what each asks of `Management`, and the status of every refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from penstock.config.schema import LimitsConfig
from penstock.errors import BadRequest, Conflict, Forbidden, LoadFailed, ModelNotFound, ModelNotReady, PenstockError
from penstock.metrics import CONTENT_TYPE
from penstock.serving.http.admin import management_routes, metrics_routes
from penstock.serving.http.intake import BIG_BYTES
from penstock.serving.http.server import HttpServer, NativeFlavor
from penstock.serving.protocols.route import Template
from penstock.types import ModelStatus
from support.backend import FakeBackend


class FakeManagement:
    """Notes what it is asked, or refuses it with `error`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.error: PenstockError | None = None
        self.closed: PenstockError | None = None

    def check_open(self) -> None:
        if self.closed is not None:
            raise self.closed

    def statuses(self) -> list[ModelStatus]:
        return [ModelStatus("m", v, "READY", 1, 1, 8, ("cpu",), 0, v == "1", float(v == "1")) for v in "21"]

    def learned(self, model: str, version: str) -> dict[str, object]:
        return {"a_s": 0.5} if version == "1" else {}

    async def _do(self, *what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append(what)

    async def put(self, model: str, version: str | None, keys: Mapping[str, Any]) -> None:
        await self._do("put", model, version, keys)

    async def unload(self, model: str, version: str | None) -> None:
        await self._do("unload", model, version)

    async def scale(self, model: str, version: str | None, instances: int) -> None:
        await self._do("scale", model, version, instances)

    async def drain(self, model: str, version: str, drained: bool) -> None:
        await self._do("drain", model, version, drained)

    async def set_default(self, model: str, version: str) -> None:
        await self._do("default", model, version)

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> None:
        await self._do("traffic", model, weights)


@pytest.fixture
def management() -> FakeManagement:
    return FakeManagement()


@asynccontextmanager
async def client(
    management: FakeManagement | None, tokens: frozenset[bytes] = frozenset(), routes: Sequence[Template] = ()
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the management API, or of a listener with these routes."""
    flavor = NativeFlavor(tokens, routes or management_routes(FakeBackend(), management))
    server = HttpServer(FakeBackend(), LimitsConfig(), flavor=flavor)
    _, port = await server.start("127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            yield http
    finally:
        await server.close(1.0)


CHANGES = [
    ("PUT", "/models/m", b'{"target":"a.py:M"}', ("put", "m", None, {"target": "a.py:M"})),
    ("PUT", "/models/m/2", b'{"target":"a.py:M"}', ("put", "m", "2", {"target": "a.py:M"})),
    ("DELETE", "/models/m", b"", ("unload", "m", None)),
    ("DELETE", "/models/m/2", b"", ("unload", "m", "2")),
    ("PUT", "/models/m/scale", b'{"instances":3}', ("scale", "m", None, 3)),
    ("PUT", "/models/m/2/scale", b'{"instances":3}', ("scale", "m", "2", 3)),
    ("PUT", "/models/m/2/drain", b'{"drained":true}', ("drain", "m", "2", True)),
    ("PUT", "/models/m/default", b'{"version":"2"}', ("default", "m", "2")),
    ("PUT", "/models/m/traffic", b'{"1":0.9,"2":0.1}', ("traffic", "m", {"1": 0.9, "2": 0.1})),
]


@pytest.mark.parametrize(("method", "path", "body", "asked"), CHANGES)
async def test_a_change_is_made_and_answered_with_the_model(
    management: FakeManagement, method: str, path: str, body: bytes, asked: tuple[Any, ...]
) -> None:
    async with client(management) as c:
        answer = await c.request(method, path, content=body)
    assert answer.status_code == 200
    assert management.asked == [asked]
    assert [v["version"] for v in answer.json()["versions"]] == ["1", "2"]
    assert answer.json()["versions"][0]["default"] is True


@pytest.mark.parametrize(("method", "path", "body", "asked"), CHANGES)
async def test_a_change_needs_the_token_and_the_word_of_the_configuration(
    management: FakeManagement, method: str, path: str, body: bytes, asked: tuple[Any, ...]
) -> None:
    async with client(management, frozenset({b"t"})) as c:
        assert (await c.request(method, path, content=body)).status_code == 401
    async with client(None) as c:
        answer = await c.request(method, path, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert "management = true in [server]" in answer.json()["error"]["message"]
    management.closed = ModelNotReady("the server is draining")
    async with client(management) as c:
        answer = await c.request(method, path, content=b"not looked at")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert not management.asked


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequest("no"), 400, "bad_request"),
        (Forbidden("no"), 403, "forbidden"),
        (ModelNotFound("no"), 404, "model_not_found"),
        (Conflict("no"), 409, "conflict"),
        (LoadFailed("no"), 500, "load_failed"),
        (ModelNotReady("no"), 503, "model_not_ready"),
    ],
)
async def test_every_refusal_has_its_status(
    management: FakeManagement, error: PenstockError, status: int, code: str
) -> None:
    management.error = error
    async with client(management) as c:
        for method, path, body, _ in CHANGES:
            answer = await c.request(method, path, content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/models", "GET, HEAD"),
        ("DELETE", "/models", "GET, HEAD"),
        ("POST", "/models/m", "DELETE, GET, HEAD, PUT"),
        ("POST", "/models/m/1", "DELETE, GET, HEAD, PUT"),
        ("GET", "/models/m/scale", "PUT"),
        ("DELETE", "/models/m/1/scale", "PUT"),
        ("GET", "/models/m/default", "PUT"),
        ("POST", "/models/m/traffic", "PUT"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(
    management: FakeManagement, method: str, path: str, allow: str
) -> None:
    async with client(management) as c:
        answer = await c.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["error"]["code"] == "method_not_allowed"


SCALE = "/models/m/scale"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[(SCALE, b) for b in (b"", b"3", b"{}", b"[]", b'{"instances":', b'{"instances":""}')],
        *[(SCALE, b) for b in (b'{"instances":NaN}', b'{"instances":1e99}', b'{"instances":2.5}')],
        *[(SCALE, b) for b in (b'{"instances":"3"}', b'{"instances":true}', b'{"instances":1,"more":2}')],
        *[(SCALE, b) for b in (b'{"instances":null}', b"\xff\xfe", b"[" * 5000)],
        ("/models/m/2/drain", b'{"drained":1}'),
        ("/models/m/2/drain", b""),
        ("/models/m/default", b'{"version":2}'),
        ("/models/m/default", b'{"versio":"2"}'),
        ("/models/m/traffic", b'{"1":"all"}'),
        ("/models/m/traffic", b'{"1":NaN}'),
        ("/models/m/traffic", b'{"1":1e999}'),
        ("/models/m/traffic", b"[0.9,0.1]"),
        ("/models/m", b'"app.py:Model"'),
        ("/models/m/2", b"target=a.py:M"),
        ("/models/m/2", b'{"a":' * 5000),
    ],
)
async def test_a_body_that_cannot_be_meant_is_a_bad_request(management: FakeManagement, path: str, body: bytes) -> None:
    async with client(management) as c:
        answer = await c.put(path, content=body)
    assert answer.status_code == 400, answer.text
    assert "expected, for example, {" in answer.json()["error"]["message"]
    assert not management.asked


async def test_a_body_is_bounded(management: FakeManagement) -> None:
    async with client(management) as c:
        answer = await c.put("/models/m", content=b" " * (BIG_BYTES + 1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        assert (await c.put("/models/m", content=b'{"target":"a"}' + b" " * (BIG_BYTES - 14))).status_code == 200


async def test_a_version_shows_its_scheduler_statistics(management: FakeManagement) -> None:
    async with client(management) as c:
        found = (await c.get("/models/m/1")).json()
        assert (found["version"], found["traffic"], found["batching"]) == ("1", 1.0, {"a_s": 0.5})
        missing = await c.get("/models/m/9")
        assert (missing.status_code, missing.json()["error"]["message"][-11:]) == (404, "it has 1, 2")
        assert (await c.get("/models/x/1")).status_code == 404
        assert (await c.head("/models/m/1")).status_code == 200
    async with client(None) as c:
        assert (await c.get("/models/echo/1")).json()["batching"] == {}


async def test_models_are_listed_and_only_health_needs_no_token() -> None:
    async with client(None, frozenset({b"t"})) as c:
        assert (await c.get("/models")).status_code == 401
        assert (await c.get("/ping")).json() == {"status": "Healthy"}
        c.headers["authorization"] = "Bearer t"
        assert [m["name"] for m in (await c.get("/models")).json()["models"]] == ["echo"]
        answer = await c.get("/models/echo")
        assert answer.json()["versions"][0]["state"] == "READY"
        assert answer.headers["content-type"] == "application/json"
        assert (await c.get("/models/ecko")).json()["error"]["message"].endswith("did you mean 'echo'?")
        missing = await c.get("/nowhere")
        assert (missing.status_code, missing.json()["error"]) == (
            404, {"code": "not_found", "message": "no route has this path"}
        )  # fmt: skip


async def test_the_metrics_api() -> None:
    async def scrape(accepted: bytes) -> tuple[bytes, str]:
        return b"up 1\n", CONTENT_TYPE

    async with client(None, frozenset({b"t"}), metrics_routes(scrape, lambda model, limit: b"%d" % limit)) as c:
        assert (await c.get("/metrics")).status_code == 401
        c.headers["authorization"] = "Bearer t"
        answer = await c.get("/metrics")
        assert (answer.text, answer.headers["content-type"]) == ("up 1\n", "text/plain; version=0.0.4; charset=utf-8")
        assert (await c.head("/metrics")).headers["content-length"] == "5"
        assert (await c.post("/metrics")).headers["allow"] == "GET, HEAD"
        assert (await c.get("/debug/batches?limit=7&model=m")).text == "7"
        for limit in ("1e3", "0", "1001", "x", "-1", ""):
            assert "limit is " in (await c.get(f"/debug/batches?limit={limit}")).json()["error"]["message"]
        assert "did you mean 'limit'" in (await c.get("/debug/batches?limits=1")).json()["error"]["message"]


@pytest.mark.parametrize("sent", [10, 20])
async def test_a_client_that_leaves_during_a_change_leaves_no_trace_in_the_log(
    management: FakeManagement, sent: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After half of the body, and after all of it: then the change is completed."""
    begun, gate, made = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def scale(model: str, version: str | None, instances: int) -> None:
        begun.set()
        await gate.wait()
        made.set()

    management.scale = scale  # type: ignore[method-assign]
    async with client(management) as c:
        _, writer = await asyncio.open_connection("127.0.0.1", c.base_url.port)
        head = b"PUT /models/m/scale HTTP/1.1\r\nhost: localhost\r\ncontent-length: 16\r\n\r\n"
        writer.write(head + b'{"instances": 3}'[:sent])
        await writer.drain()
        if sent > 16:
            await asyncio.wait_for(begun.wait(), 10)
        writer.transport.abort()
        assert (await c.get("/models")).status_code == 200
        gate.set()
        if sent > 16:
            await asyncio.wait_for(made.wait(), 10)
    assert begun.is_set() == (sent > 16)
    assert not [record for record in caplog.records if record.name.startswith(("penstock", "asyncio"))]
