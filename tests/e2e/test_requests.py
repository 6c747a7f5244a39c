"""What a model learns of its requests: over HTTP, gRPC, in forms, streams, steps and pipelines, and in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as messages
import tritonclient.grpc.service_pb2_grpc as service

from penstock import Engine, Item, ModelConfig, Portal
from penstock.request import pseudo_headers, request_of

SOURCE = """
    import asyncio
    from typing import Any

    import penstock
    from penstock import Request, Step


    def told(request: Request) -> dict:
        return {
            "id": request.id, "method": request.method, "path": request.path, "query": request.query,
            "client": request.client, "named": request.path_parameters, "token": request.headers.get("X-Token"),
            "files": request.files,
        }


    def items(items, requests):
        return [{"item": item if isinstance(item, str) else "form", **told(r)} for item, r in zip(items, requests)]


    class Annotated:
        def predict(self, items: list[Any], *, whence: list[Request], parameters) -> list:
            return [told(request) | {"parameters": p} for request, p in zip(whence, parameters)]


    class Prepares:
        def preprocess(self, item, request):
            if request.headers.get("x-token") == "wrong":
                raise penstock.BadRequest("the token is wrong")
            return told(request)

        def predict(self, items):
            return items


    async def waits(items, requests):
        await asyncio.sleep(0)
        return list(map(told, requests))


    def streams(items, requests):
        for part in range(2):
            yield [f"{request.headers['x-token']}{part} " for request in requests]


    class Steps:
        def admit(self, item, request):
            return [request.headers["x-token"]]

        def cost(self, item):
            return len(item)

        def step(self, states):
            return [Step(state[0], done=True) for state in states]


    class Texts:
        inputs = [penstock.TensorSpec("text", "BYTES", (-1,))]
        outputs = [penstock.TensorSpec("token", "BYTES", (-1,))]

        def predict(self, items, requests):
            return [{"token": [f"{r.headers['x-token']} {r.path} {r.id}"] * len(i["text"])}
                    for i, r in zip(items, requests)]
"""
PIPELINE = """
[pipeline]
client_request = true

[a]
ops = ["Identity"]
next = "b"

[b]
ops = ["Python[told.py:told]"]
"""
TOLD = """
def told(data, fields):
    request = fields["client_request"]
    return f"{data.decode()} {request.headers.get('x-token')} {request.query.get('k')}"
"""
PORTS = ["--port", "0", "--set=server.management_port=0", "--set=server.metrics_port=0"]
MODELS = ("items", "Annotated", "Prepares", "waits", "streams", "Steps", "Texts")


@pytest.fixture(scope="module", params=["process", "thread"])
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, request: Any) -> Any:
    folder = tmp_path_factory.mktemp("requests")
    (folder / "told.toml").write_text(PIPELINE)
    (folder / "told.py").write_text(TOLD)
    names = MODELS if request.param == "process" else tuple(n for n in MODELS if n not in ("waits", "Steps"))
    keys = [] if request.param == "process" else [f"--set=models.{name.lower()}.transport=thread" for name in names]
    return serve_all(SOURCE, *names, str(folder / "told.toml"), *keys, ports=PORTS)


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    headers = {"x-token": "secret"}
    with httpx.Client(base_url=f"{server.url}/predictions/", headers=headers, timeout=30) as found:
        yield found


def test_predict_sees_the_request_of_each_item(client: httpx.Client) -> None:
    answer = client.post("items?k=1&k=2&empty=", json="a", headers={"x-request-id": "r1", "X-TOKEN": "mine"})
    told = {"id": "r1", "method": "POST", "path": "/predictions/items", "query": {"k": ["1", "2"], "empty": [""]}}
    told |= {"client": "127.0.0.1", "named": {"model": "items"}, "token": "mine", "files": {}}
    assert answer.json() == {"item": "a", **told}
    for _ in range(2):  # the same head again, on a connection that stays open
        assert client.post("items?q", json="b").json()["query"] == {"q": [""]}
    told = [client.post("items", json=i, headers={"x-token": i}).json()["token"] for i in "012"]
    assert told == [*"012"]


def test_a_form_tells_its_file_names(client: httpx.Client) -> None:
    files = [("photo", ("dog.jpg", b"1")), ("photo", ("cät.jpg", b"2")), ("note", (None, b"text"))]
    assert client.post("items", files=files).json()["files"] == {"photo": ["dog.jpg", "cät.jpg"]}


def test_annotations_and_hooks_ask_too(client: httpx.Client, server: Any) -> None:
    assert client.post("annotated", json=1).json()["token"] == "secret"
    assert client.post("prepares", json=1).json()["path"] == "/predictions/prepares"
    refused = client.post("prepares", json=1, headers={"x-token": "wrong"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "the token is wrong")


def test_streams_steps_and_coroutines_ask_too(client: httpx.Client, server: Any) -> None:
    assert client.post("streams", json=1).text.split() == ["secret0", "secret1"]
    if "steps" in httpx.get(f"{server.url}/v2/models").json()["models"]:
        assert client.post("steps", json=[1]).text == "secret"
        assert client.post("waits?a=b", json=1).json()["query"] == {"a": ["b"]}


def test_a_pipeline_has_the_request_as_a_field(client: httpx.Client) -> None:
    answer = client.post("told?k=v", content=b"hello", headers={"content-type": "application/octet-stream"})
    assert answer.text == "hello secret ['v']"


def test_metadata_are_the_headers_of_a_call(server: Any) -> None:
    tensor = messages.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[2])
    tensor.contents.bytes_contents.extend([b"a", b"b"])
    request = messages.ModelInferRequest(model_name="texts", inputs=[tensor])
    with grpc.insecure_channel(server.urls["grpc"].removeprefix("grpc://")) as channel:
        stub = service.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request, metadata=[("x-token", "mine"), ("x-request-id", "r2")])
    told = b"mine /inference.GRPCInferenceService/ModelInfer r2"
    assert answer.raw_output_contents[0] == 2 * (len(told).to_bytes(4, "little") + told)


def test_a_call_in_python_has_an_empty_request(tmp_path: Path) -> None:
    def tells(items: list[Any], requests: list[Any]) -> list[Any]:
        return [(r.path, dict(r.headers), r.query) for r in requests]

    with Portal() as portal:
        portal.load("m", ModelConfig(target="m", transport="thread"), target=tells)
        assert portal.predict("m", [1, 2]) == [("", {}, {})] * 2


class Odd:
    """A claim that JSON cannot hold."""

    def __str__(self) -> str:
        return "Odd"


def test_names_may_have_any_letters() -> None:
    headers = pseudo_headers(b"POST", b"/x", ("::1", 1), "größe", "2")
    item = Item(b"", source=SimpleNamespace(pseudo_headers=lambda: headers), headers=[(b"a", b"\xe9"), (b"A", b"2")])
    found = request_of(item)
    assert (found.path_parameters, found.client) == ({"model": "größe", "version": "2"}, "::1")
    assert dict(found.headers) == {"a": "\u00e9, 2"}


@pytest.mark.parametrize("transport", ["process", "thread"])
async def test_an_application_passes_claims(transport: str) -> None:
    from penstock.serving.http.asgi import InferenceApp

    async with Engine() as engine:
        config = ModelConfig(target="support.told:claims", transport=transport)  # type: ignore[arg-type]
        await engine.load("m", config)
        app = InferenceApp(engine)

        async def middleware(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"state": {"claims": {"sub": "ann", "of": Odd()}}}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://t") as client:
            answer = await client.post("/predictions/m?a=1", json=1)
    assert answer.json() == [{"sub": "ann", "of": "Odd"}, "/predictions/m?a=1"]


def test_an_array_model_that_asks_is_refused() -> None:
    class Model:
        inputs = {"x": "FP32[-1,2]"}  # noqa: RUF012

        def predict(self, x: Any, requests: Any) -> Any:
            return np.asarray(x)

    with Portal() as portal, pytest.raises(Exception, match="an array comes without the parameters"):
        portal.load("m", ModelConfig(target="m", transport="thread"), target=Model)
