"""Python models with declared tensors behind a real server: every entrance, the metadata, and the errors in a batch."""

import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from penstock import Client

SOURCE = """
    import numpy as np
    import penstock

    @penstock.model(inputs={"x": "FP32[-1,2]", "bias": "FP32[-1,1]"}, outputs={"y": "FP32[-1,2]", "rows": "INT64[-1]"})
    class Head:
        def predict(self, x, bias=None):
            if (x < 0).any():
                raise ValueError("negative")
            return {"y": x * 2 if bias is None else x * 2 + bias, "rows": np.full(len(x), len(x))}

    class Text:
        inputs, outputs = {"text": "BYTES[-1]"}, {"upper": "BYTES[-1]"}

        def predict(self, text):
            return [each.upper() for each in text]

    async def later(x):
        return x + 1

    def listed(items):
        return [{"y": item["x"] * 2} for item in items]

    def wide(x):
        return x.astype(np.float64)

    def plain(items):
        return items
"""
TENSORS = {"inputs": '{ x = "FP32[-1,2]" }', "outputs": '{ y = "FP32[-1,2]" }'}
SET = [f"--set=models.{model}.{key}={value}" for model in ("later", "listed") for key, value in TENSORS.items()]
HELD = ["policy=fixed", "max_hold_s=0.2", "max_batch_size=64"]  # callers that come together share a batch
PORTS = ["--port", "0", "--set=server.management_port=0", "--set=server.metrics_port=0", "--set=server.grpc_port=0"]
GRPC = ["--port", "0", "--set=server.management_port=0", "--set=server.metrics_port=0"]


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    held = [f"--set=models.head.batching.{key}" for key in HELD]
    more = ["--set=server.shared_memory=true"]
    return serve_all(SOURCE, "Head", "Text", "later", "listed", "plain", *SET, *held, *more, ports=GRPC)


@pytest.fixture(scope="module")
def triton(server: Any) -> Iterator[Any]:
    with closing(tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"))) as client:
        yield client


def tensor(x: Any, name: str = "x", of: Any = tritonclient.http) -> Any:
    array = np.asarray(x, np.float32)
    found = of.InferInput(name, list(array.shape), "FP32")
    found.set_data_from_numpy(array)
    return found


def test_metadata_configuration_and_openapi_show_the_declaration(server: Any, triton: Any) -> None:
    metadata = triton.get_model_metadata("head")
    assert metadata["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "bias", "datatype": "FP32", "shape": [-1, 1], "optional": True},
    ]
    assert [(spec["name"], spec["datatype"], spec["shape"]) for spec in metadata["outputs"]] == [
        ("y", "FP32", [-1, 2]),
        ("rows", "INT64", [-1]),
    ]
    config = triton.get_model_config("head")
    assert [(i["name"], i["data_type"], i["dims"], i["optional"]) for i in config["input"]] == [
        ("x", "TYPE_FP32", [2], False),
        ("bias", "TYPE_FP32", [1], True),
    ]
    assert json.dumps({"const": "bias"}) in json.dumps(json.loads(server.get("/openapi.json")[1]))
    for model in ("later", "listed"):  # from the configuration
        assert triton.get_model_metadata(model)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]


def test_a_model_without_inputs_says_in_its_metadata_how_to_declare_them(triton: Any) -> None:
    metadata = triton.get_model_metadata("plain")
    assert metadata["inputs"] == []
    assert 'set inputs = {"x": "FP32[-1,64]"}' in metadata["parameters"]["hint"]
    assert "hint" not in triton.get_model_metadata("head")["parameters"]


@pytest.mark.parametrize("model", ["head", "listed"])
def test_both_forms_of_a_model_answer_every_form_of_a_request(server: Any, triton: Any, model: str) -> None:
    x, doubled = np.array([[1, 2], [3, 4]], np.float32), [[2, 4], [6, 8]]
    assert triton.infer(model, [tensor(x)]).as_numpy("y").tolist() == doubled
    plain = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": x.ravel().tolist()}]}
    status, body = server.post(f"/v2/models/{model}/infer", json.dumps(plain).encode())
    assert status == 200
    assert json.loads(body)["outputs"][0]["data"] == [2, 4, 6, 8]
    npy = io.BytesIO()
    np.save(npy, x)
    status, body = server.post(f"/v2/models/{model}/infer", npy.getvalue(), "application/x-npy")
    assert status == 200
    assert json.loads(body)["outputs"][0]["data"] == [2, 4, 6, 8]
    status, body = server.post(f"/v1/models/{model}:predict", json.dumps({"instances": [{"x": [1, 2]}]}).encode())
    assert status == 200
    assert json.loads(body)["predictions"] == [[2, 4] if model == "listed" else {"y": [2, 4], "rows": 1}]
    with Client(server.url) as client:
        assert client.infer(model, {"x": x}).outputs["y"].tolist() == doubled
    with tritonclient.grpc.InferenceServerClient(server.urls["grpc"].removeprefix("grpc://")) as rpc:
        assert rpc.infer(model, [tensor(x, of=tritonclient.grpc)]).as_numpy("y").tolist() == doubled


def test_shared_memory_holds_inputs_and_outputs(triton: Any) -> None:
    x = np.array([[1, 2], [3, 4]], np.float32)
    region = shm.create_shared_memory_region("declared", "/penstock-declared", 2 * x.nbytes)
    try:
        shm.set_shared_memory_region(region, [x])
        triton.register_system_shared_memory("declared", "/penstock-declared", 2 * x.nbytes)
        given = tritonclient.http.InferInput("x", [2, 2], "FP32")
        given.set_shared_memory("declared", x.nbytes)
        wanted = tritonclient.http.InferRequestedOutput("y")
        wanted.set_shared_memory("declared", x.nbytes, x.nbytes)
        triton.infer("head", [given], outputs=[wanted])
        assert shm.get_contents_as_numpy(region, np.float32, [4, 2])[2:].tolist() == [[2, 4], [6, 8]]
        triton.unregister_system_shared_memory("declared")
    finally:
        shm.destroy_shared_memory_region(region)


def test_json_of_one_row_and_of_several_has_results_of_the_same_form(server: Any) -> None:
    for body, answer in (
        ({"x": [1, 2]}, {"y": [2, 4], "rows": 1}),
        ({"x": [[1, 2]]}, {"y": [[2, 4]], "rows": [1]}),
        ({"x": [1, 2], "bias": [1]}, {"y": [3, 5], "rows": 1}),
        ([1, 2], {"y": [2, 4], "rows": 1}),
    ):
        status, found = server.post("/predictions/head", json.dumps(body).encode())
        assert (status, json.loads(found)) == (200, answer)
    status, found = server.post("/predictions/text", b'"a"')
    assert (status, found) == (200, b"A")
    status, found = server.post("/predictions/text", b'{"text": ["a", "\xc3\xa9"]}')
    assert (status, json.loads(found)) == (200, {"upper": ["A", "\u00e9"]})  # `bytes.upper` knows ASCII only
    status, found = server.post("/predictions/later", b"[1, 2]")
    assert (status, json.loads(found)) == (200, [2, 3])


def test_callers_share_a_call_and_bad_ones_fail_alone(server: Any) -> None:
    def ask(inputs: Any) -> Any:
        with closing(tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"))) as client:
            try:
                found = client.infer("head", inputs)
            except InferenceServerException as e:
                return e.status(), e.message()
        return found.as_numpy("y").tolist(), int(found.as_numpy("rows")[0])

    with ThreadPoolExecutor(8) as pool:
        asked = [[tensor([[n, n]])] for n in range(4)]
        found = list(pool.map(ask, asked))
        assert [y for y, _ in found] == [[[2 * n, 2 * n]] for n in range(4)]
        assert max(rows for _, rows in found) > 1
        wrong = tritonclient.http.InferInput("x", [1, 2], "FP64")
        wrong.set_data_from_numpy(np.ones((1, 2)))
        bad = [[tensor([[-1, 0]])], [tensor([[1, 2, 3]])], [wrong], [tensor([[1]], "bias")]]
        found = list(pool.map(ask, [*asked, *bad]))
    assert [y for y, _ in found[:4]] == [[[2 * n, 2 * n]] for n in range(4)]
    assert found[4:] == [
        ("500", "the model raised ValueError"),
        ("400", "input 'x': shape must be [-1, 2] (-1 is any size), found [1, 3]"),
        ("400", "input 'x': datatype must be FP32, found 'FP64'"),
        ("400", "input 'x' is missing; the model needs x"),
    ]


def test_a_model_that_returns_other_tensors_than_it_declares_does_not_start(serve: Callable[..., Any]) -> None:
    keys = [f"--set=models.wide.{key}={value}" for key, value in TENSORS.items()]
    with pytest.raises(RuntimeError, match=r"predict returned float64 \[1, 2\], but the model declares FP32 \[-1, 2\]"):
        serve(SOURCE, "wide", *keys, ports=PORTS)
    with pytest.raises(RuntimeError, match=r"models\.wide\.outputs\.y: found 'FP32\[2\]', expected a datatype and"):
        serve(SOURCE, "wide", "--set=models.wide.outputs={ y = 'FP32[2]' }", ports=PORTS)
    with pytest.raises(RuntimeError, match=r"found predict\(x\) for the inputs z: give each parameter the name"):
        serve(SOURCE, "wide", "--set=models.wide.inputs={ z = 'FP32[-1]' }", ports=PORTS)
