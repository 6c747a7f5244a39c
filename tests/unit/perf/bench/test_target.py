from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.client.endpoint import Endpoint, Unreachable
from penstock.client.response import HttpResponse
from penstock.errors import ConfigError, ModelNotFound, ModelNotReady, PenstockError, Unauthorized
from penstock.perf.bench import target as module
from penstock.perf.bench.target import is_served, open_target

Pages = dict[str, Any]
FAR = "http://far.example:8080"

NATIVE: Pages = {
    "/v2": {"name": "penstock"},
    "/openapi.json": {"paths": {"/predictions/digits": {}, "/v2/models/digits/infer": {}, "/ping": {}}},
    "/v2/models/digits": {
        "name": "digits",
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 8, 8]}],
        "parameters": {"instances": 2},
    },
    "/v2/models/digits/ready": {"ready": True},
}
FOREIGN: Pages = {**NATIVE, "/v2": {"name": "triton", "version": "2"}}
TORCHSERVE: Pages = {"/ping": {"status": "Healthy"}}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`serve(pages, management)` fakes a server on far.example:8080: any other page answers 404."""

    def fake(pages: Pages | None, management: Pages | None = None, prefix: str = "") -> None:
        def fetch(endpoint: Endpoint, method: str, path: str, *_: object, **__: object) -> HttpResponse:
            if pages is None:
                raise Unreachable(f"{endpoint.url}: cannot connect: Connection refused")
            assert endpoint.prefix == prefix
            found = (management or {}) if endpoint.port == 8081 else pages
            status, page = found.get(path, (404, {})) if isinstance(found.get(path), tuple) else (200, found.get(path))
            return HttpResponse(404, {}, b"{}") if page is None else HttpResponse(status, {}, json.dumps(page).encode())

        beside = (None, Endpoint("127.0.0.1", 8081)) if management is not None else (None, None)
        monkeypatch.setattr(module, "fetch", fetch)
        monkeypatch.setattr(module, "check_reachable", lambda endpoint: fetch(endpoint, "GET", "/"))
        monkeypatch.setattr(module, "listening_process", lambda port: None)
        monkeypatch.setattr(module, "find_listeners", lambda endpoint, pid, token: beside)

    return fake


def opened(text: str, **more: Any) -> module.Target:
    with open_target(text, **more) as found:
        return found


def test_the_only_model_of_a_server_is_its_target(serve: Callable[..., None]) -> None:
    serve(NATIVE)
    for text in (FAR, f"{FAR}/"):
        found = opened(text)
        assert (found.model, found.path, found.protocol) == ("digits", "/predictions/digits", "native")
        assert found.url == f"{FAR}/predictions/digits"
        assert [spec.shape for spec in found.inputs] == [(-1, 8, 8)]
        assert found.parameters == {"instances": 2}
        assert (found.metrics, found.management, found.pids) == (None, None, ())


@pytest.mark.parametrize(
    ("path", "protocol", "route"),
    [
        ("/predictions/digits", "native", ""),
        ("/predictions/digits/1", "native", ""),
        ("/predictions/digits?x=1", "native", ""),
        ("/v2/models/digits/infer", "oip", ""),
        ("/v2/models/digits/versions/1/infer", "oip", ""),
        ("/v2/models/digits", "oip", "/v2/models/digits/infer"),
    ],
)
def test_a_route_determines_model_and_protocol(
    serve: Callable[..., None], path: str, protocol: str, route: str
) -> None:
    serve(NATIVE)
    found = opened(FAR + path)
    assert (found.model, found.protocol, found.path) == ("digits", protocol, route or path)
    other = "native" if protocol == "oip" else "oip"
    with pytest.raises(ConfigError, match=f"is not a route of --protocol {other}"):
        opened(FAR + path, protocol=other)
    serve(NATIVE, prefix="/team/one")
    found = opened(f"{FAR}/team/one{path}")
    assert (found.endpoint.prefix, found.path) == ("/team/one", route or path)
    found = opened(f"{FAR}/team/one", model="digits", protocol=protocol)
    assert found.path == ("/v2/models/digits/infer" if protocol == "oip" else "/predictions/digits")


def test_any_other_url_is_used_unchanged(serve: Callable[..., None]) -> None:
    serve({})
    found = opened(f"{FAR}/my/route?verbose=1")
    assert (found.model, found.path, found.protocol) == ("", "/my/route?verbose=1", "native")
    assert found.url == f"{FAR}/my/route?verbose=1"


def test_a_listener_of_metrics_that_is_named_is_the_one_that_is_watched(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(NATIVE)
    monkeypatch.setattr(module, "check_reachable", lambda endpoint: None)
    for url in ("http://far.example:9", "http://far.example:9/metrics", "http://far.example:9/"):
        assert opened(FAR, metrics=url).metrics == Endpoint("far.example", 9)
    assert opened(FAR).metrics is None
    monkeypatch.undo()
    with pytest.raises(Unreachable, match="cannot connect"):
        opened(FAR, metrics="http://127.0.0.1:1")


def test_an_unreachable_server_is_an_error(serve: Callable[..., None]) -> None:
    serve(None)
    for text in (FAR, f"{FAR}/predictions/digits", f"{FAR}/my/route"):
        with pytest.raises(Unreachable, match=r"far\.example:8080: cannot connect"):
            opened(text)
    with pytest.raises(Unreachable, match="taken as a model name") as raised:
        opened("digits")
    assert "app.py:Model" in str(raised.value)


@pytest.mark.parametrize(
    ("pages", "given", "error", "why"),
    [
        (NATIVE, {"text": f"{FAR}/predictions/digit"}, ModelNotFound, "did you mean 'digits'"),
        (NATIVE, {"text": "zebra"}, ModelNotFound, "it has digits"),
        (
            {**NATIVE, "/openapi.json": {"paths": {"/predictions/a": {}, "/predictions/digits": {}}}}, {"text": FAR},
            ConfigError, "has the models a, digits; choose one with --model",
        ),
        (
            {**NATIVE, "/v2/models/digits/ready": (503, {"ready": False})}, {"text": f"{FAR}/predictions/digits"},
            ModelNotReady, "not ready",
        ),
        ({**NATIVE, "/openapi.json": {"paths": {}}}, {"text": FAR}, ModelNotReady, "no model that is ready"),
        ({"/v2": (401, {"error": {}})}, {"text": FAR}, Unauthorized, "found none; give its file by --token-file"),
        ({}, {"text": FAR}, PenstockError, "give the whole URL of its inference route"),
        (FOREIGN, {"text": FAR}, ConfigError, "does not list its models; choose one"),
        (NATIVE, {"text": "two words"}, ConfigError, "expected a URL such as"),
        (NATIVE, {"text": "localhost:8080"}, ConfigError, "did you mean 'http://localhost:8080'"),
        (NATIVE, {"text": "localhost:8080/predictions/m"}, ConfigError, "did you mean 'http://localhost:8080/predict"),
        (NATIVE, {"text": "nowhere/model.mar"}, ConfigError, "no such file"),
        (NATIVE, {"text": FAR, "sets": ["models.m.instances=2"]}, ConfigError, "--option and --set are for"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_measured_is_refused_with_what_to_do(
    serve: Callable[..., None], pages: Pages, given: dict[str, Any], error: type[PenstockError], why: str
) -> None:
    serve(pages)
    with pytest.raises(error, match=why):
        opened(**given)


def test_a_third_party_server_that_speaks_open_inference_is_asked_so(serve: Callable[..., None]) -> None:
    serve(FOREIGN)
    assert opened(FAR, model="digits").path == "/v2/models/digits/infer"


def described(*workers: str) -> list[dict[str, Any]]:
    return [{"modelName": "bert", "workers": [{"status": status} for status in workers]}]


def test_a_torchserve_is_asked_for_its_workers(serve: Callable[..., None]) -> None:
    models = {"/models": {"models": [{"modelName": "bert"}]}}
    near = "http://127.0.0.1:8080/predictions/bert"
    serve(TORCHSERVE, {**models, "/models/bert": described("UNLOADING", "READY")})
    found = opened(near)
    assert (found.protocol, found.path, found.inputs) == ("torchserve", "/predictions/bert", ())
    assert opened("http://127.0.0.1:8080").model == "bert"  # the only one
    serve(TORCHSERVE, {**models, "/models/bert": described("UNLOADING")})
    with pytest.raises(ModelNotReady, match="no worker"):
        opened(near)
    serve(TORCHSERVE, {**models, "/models/bern": (404, {})})
    with pytest.raises(ModelNotFound, match="did you mean 'bert'"):
        opened("http://127.0.0.1:8080/predictions/bern")
    serve(TORCHSERVE)  # on another host, its management API is not visible
    assert opened(f"{FAR}/predictions/bert").model == "bert"
    with pytest.raises(ConfigError, match="does not list its models; choose one with --model"):
        opened(FAR)


def test_something_to_serve_is_distinguished_from_a_model_name() -> None:
    for text in ("app.py:Model", "app.py", "pkg.mod:Model", "n=app.py:Model", "a/model.onnx", "x.toml", "m.mar"):
        assert is_served(text), text
    for text in ("digits", "resnet.v2", "localhost:8080", "far.example:8080/v2/models/m", "with-dash_1", ":Model"):
        assert not is_served(text), text


class Served:
    """Replaces ServerProcess: records its arguments and serves nothing."""

    words: tuple[str, ...] = ()
    pid = 1
    urls = dict.fromkeys(("inference", "metrics", "management"), "http://127.0.0.1:8081")

    def __init__(self, words: list[str], **_: object) -> None:
        Served.words = tuple(words)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None: ...

    def output_tail(self) -> str:
        return "no weights"


def test_a_started_server_without_a_ready_model_shows_its_output(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ServerProcess", Served)
    serve(TORCHSERVE, management={"/models": {"models": []}})
    with pytest.raises(ModelNotReady, match="no model that is ready; the server output:\nno weights"):
        opened("app.py:Model")
    serve(TORCHSERVE, management={"/models": (401, {})})
    with pytest.raises(Unauthorized, match="wants a token, found none"):
        opened("app.py:Model")


def test_an_archive_is_named_by_its_file_as_far_as_a_model_can_be(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "ServerProcess", Served)
    for file, name in (("up-1.0.mar", "up-1.0"), ("my new model.mar", "my_new_model"), ("_.mar", "model")):
        (tmp_path / file).touch()
        pages = {"/models": {"models": [{"modelName": name}]}, f"/models/{name}": [{"workers": [{"status": "READY"}]}]}
        serve(TORCHSERVE, management={**TORCHSERVE, **pages})
        assert opened(str(tmp_path / file)).model == name
        assert Served.words == ("--model-store", str(tmp_path), "--models", f"{name}={file}")
    (tmp_path / "a,b.mar").touch()
    with pytest.raises(ConfigError, match="rename the file"):
        opened(str(tmp_path / "a,b.mar"))
