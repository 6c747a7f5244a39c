"""The routes of the management listener: what each asks of `Management`, and the status of every refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from penstock.errors import BadRequest, Conflict, Forbidden, LoadFailed, ModelNotFound, ModelNotReady, PenstockError
from penstock.serving.http.admin import MAX_BODY_BYTES, admin_app
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
        return [ModelStatus("m", v, "READY", 1, 1, 8, ("cpu",), 0, v == "1", float(v == "1")) for v in "12"]

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

    async def set_default(self, model: str, version: str) -> None:
        await self._do("default", model, version)

    async def set_traffic(self, model: str, weights: Mapping[str, float]) -> None:
        await self._do("traffic", model, weights)


@pytest.fixture
def management() -> FakeManagement:
    return FakeManagement()


def client(management: FakeManagement | None, tokens: frozenset[bytes] = frozenset()) -> httpx.AsyncClient:
    app = admin_app(FakeBackend(), tokens, management)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


CHANGES = [
    ("PUT", "/models/m", b'{"target":"a.py:M"}', ("put", "m", None, {"target": "a.py:M"})),
    ("PUT", "/models/m/2", b'{"target":"a.py:M"}', ("put", "m", "2", {"target": "a.py:M"})),
    ("DELETE", "/models/m", b"", ("unload", "m", None)),
    ("DELETE", "/models/m/2", b"", ("unload", "m", "2")),
    ("PUT", "/models/m/scale", b'{"instances":3}', ("scale", "m", None, 3)),
    ("PUT", "/models/m/2/scale", b'{"instances":3}', ("scale", "m", "2", 3)),
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
        answer = await c.request(method, path, content=b"not even read")
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
        answer = await c.put("/models/m", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


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
