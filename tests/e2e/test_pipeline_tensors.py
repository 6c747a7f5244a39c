"""Pipelines with declared tensors behind a real server: the example of the page by Triton's clients, and refusals."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from support.pages import blocks, write

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
MATRIX = """
[pipeline.inputs]
image = "UINT8[-1,-1,-1,3]"
text = "BYTES[-1,1]"

[pipeline.outputs]
size = "INT64[-1,2]"
upper = "BYTES[-1]"

[measure]
inputs = ["image"]
ops = ["CvtColorMat(color=rgb)", "Python[more.py:size]"]

[upper]
inputs = ["text"]
ops = ["Python[more.py:upper]"]

[both]
inputs = {data = "measure", upper = "upper"}
ops = ["Python[more.py:both]"]
"""
MORE = """
import numpy as np


def size(data):
    return np.array(data.shape[:2])


def upper(data):
    if data == b"bad":
        raise ValueError("bad")
    return data.decode().upper()


def both(data, fields):
    return {"size": data, "upper": fields["upper"]}


def odd(data):
    return np.zeros((1, 3 if data[0, 0] == 3 else 2), np.float32)
"""
NAMED = '[pipeline]\ninputs = ["B"]\n[a]\ninputs = ["B"]\n'
ODD = """
[pipeline.inputs]
x = "FP32[-1,1]"
[pipeline.outputs]
y = "FP32[-1,2]"
[a]
ops = ["Python[more.py:odd]"]
"""
PORTS = ["--port", "0", "--set=server.management_port=0", "--set=server.metrics_port=0"]


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tensors")
    for language, block in blocks(PAGE.read_text()):
        if (language, block.partition("\n")[0]) in (("toml", "# ensemble.toml"), ("python", "# steps.py")):
            write(block, folder)
    (folder / "more.py").write_text(MORE)
    for name, text in (("matrix", MATRIX), ("named", NAMED), ("odd", ODD)):
        (folder / f"{name}.toml").write_text(text)
    files = ("ensemble.toml", "matrix.toml", "named.toml", "odd.toml")
    return serve_all(None, *files, ports=PORTS, cwd=folder)


@pytest.fixture(scope="module", params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(server: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    of = request.param
    address = (
        server.url.removeprefix("http://") if of is tritonclient.http else server.urls["grpc"].removeprefix("grpc://")
    )
    with closing(of.InferenceServerClient(address)) as client:

        def infer(model: str, outputs: Any = None, **arrays: Any) -> Any:
            inputs = []
            for name, array in arrays.items():
                inputs.append(of.InferInput(name, list(array.shape), _datatype(array)))
                inputs[-1].set_data_from_numpy(array)
            wanted = None if outputs is None else [of.InferRequestedOutput(name) for name in outputs]
            return client.infer(model, inputs, outputs=wanted)

        client.call = infer
        yield client


def _datatype(array: Any) -> str:
    return tritonclient.utils.np_to_triton_dtype(array.dtype)  # type: ignore[no-any-return]


ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_metadata_and_configuration_are_those_of_an_ensemble(server: Any) -> None:
    with closing(tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"))) as client:
        found = client.get_model_metadata("ensemble")
        config = client.get_model_config("ensemble")
    assert found["inputs"] == [{"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in "AB"]
    assert found["outputs"] == [
        {"name": "SUM", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]},
    ]
    assert [(i["name"], i["data_type"], i["dims"]) for i in config["output"]] == [
        ("SUM", "TYPE_FP32", [4]),
        ("TEXT", "TYPE_STRING", [1]),
    ]
    assert '"const": "TEXT"' in json.dumps(json.loads(server.get("/openapi.json")[1]))


def test_clients_of_an_ensemble_send_and_receive_named_tensors(triton: Any) -> None:
    result = triton.call("ensemble", A=ROWS, B=ROWS * 10)
    assert result.as_numpy("SUM").tolist() == (ROWS * 11).tolist()
    assert result.as_numpy("TEXT").tolist() == [[b"the sum is 66"], [b"the sum is 242"]]


def test_only_the_outputs_that_a_request_wants_are_returned(triton: Any) -> None:
    result = triton.call("ensemble", ["TEXT"], A=ROWS, B=ROWS)
    assert result.as_numpy("TEXT").shape == (2, 1)
    assert result.as_numpy("SUM") is None
    with pytest.raises(InferenceServerException, match="output 'NONE'"):
        triton.call("ensemble", ["NONE"], A=ROWS, B=ROWS)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"A": ROWS}, "input 'B' is missing; the model needs A, B"),
        ({"A": ROWS, "B": ROWS, "C": ROWS}, "unknown input 'C'; the model has A, B"),
        ({"A": ROWS, "B": ROWS.astype(np.int32)}, "input 'B': datatype must be FP32, found 'INT32'"),
        ({"A": ROWS, "B": ROWS[:, :3].copy()}, "input 'B': shape must be"),
        ({"A": ROWS, "B": ROWS[:1]}, "the same number of rows"),
    ],
)
def test_requests_that_are_not_as_declared_are_refused_like_those_of_models(
    triton: Any, arrays: dict[str, Any], message: str
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        triton.call("ensemble", **arrays)
    assert message in refused.value.message()
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_branches_begin_with_their_own_inputs_of_images_and_text(triton: Any) -> None:
    images, text = np.zeros((2, 6, 8, 3), np.uint8), np.array([["a"], ["b"]], object)
    result = triton.call("matrix", image=images, text=text)
    assert result.as_numpy("size").tolist() == [[6, 8], [6, 8]]
    assert result.as_numpy("upper").tolist() == [b"A", b"B"]


def test_a_bad_row_fails_its_request_alone(server: Any, triton: Any) -> None:
    image = np.zeros((1, 6, 8, 3), np.uint8)
    with pytest.raises(InferenceServerException, match="upper"):
        triton.call("matrix", image=image, text=np.array([["bad"]], object))
    assert triton.call("matrix", image=image, text=np.array([["good"]], object)).as_numpy("upper").tolist() == [b"GOOD"]


def test_results_that_are_not_as_declared_are_errors_of_the_server(server: Any) -> None:
    status, body = server.post("/predictions/odd", b'{"x": [2]}')
    assert (status, json.loads(body)) == (200, {"y": [0.0, 0.0]})
    status, body = server.post("/predictions/odd", b'{"x": [3]}')
    assert status == 500
    assert "output 'y': " in body.decode()


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b'{"A": [1, 2, 3, 4], "B": [1, 0, 0, 0]}', {"SUM": [2, 2, 3, 4], "TEXT": ["the sum is 11"]}),
        (b'{"A": [[1, 2, 3, 4]], "B": [[1, 0, 0, 0]]}', {"SUM": [[2, 2, 3, 4]], "TEXT": [["the sum is 11"]]}),
    ],
)
def test_plain_json_is_read_by_the_declaration(server: Any, body: bytes, answer: Any) -> None:
    status, found = server.post("/predictions/ensemble", body)
    assert (status, json.loads(found)) == (200, answer)


def test_an_input_without_a_datatype_may_have_any_name(server: Any) -> None:
    def ask(name: str) -> tuple[int, Any]:
        tensor = {"name": name, "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}
        status, body = server.post("/v2/models/named/infer", json.dumps({"inputs": [tensor]}).encode())
        return status, json.loads(body)

    status, found = ask("B")
    assert (status, found["outputs"][0]["data"]) == (200, [1, 2])
    status, found = ask("C")
    assert status == 400
    assert "'C', which the pipeline does not take; it takes B" in found["error"]
    assert server.post("/predictions/named", b"[1, 2]")[1] == b"[1,2]"
