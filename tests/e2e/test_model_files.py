"""Files of models served as they are."""

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.files import scores

X = [[1.0, 2, 3, 4], [0, 0, 1, 0]]


def infer(server: Any, model: str, rows: Any, name: str = "x") -> tuple[int, Any]:
    data = np.asarray(rows, np.float32)
    tensor = {"name": name, "datatype": "FP32", "shape": list(data.shape), "data": data.ravel().tolist()}
    status, body = server.post(f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())
    return status, json.loads(body)


def test_files_are_served_and_one_wrong_request_harms_no_other(serve: Callable[..., Any], model_files: Path) -> None:
    server = serve(
        None,
        "net.onnx",
        "scripted=net.ts",
        "eager=net.py:Net",
        "--set=models.eager.weights=weights.pt",
        "--set=server.management=true",
        f"--set=server.model_store={model_files}",
        cwd=model_files,
    )
    put = json.dumps({"target": "net.pt2"}).encode()
    request = urllib.request.Request(server.urls["management"] + "/models/exported", put, method="PUT")
    assert server.fetch(request)[0] == 200
    for model, output in (
        ("net", "scores"),
        ("scripted", "OUTPUT__0"),
        ("eager", "OUTPUT__0"),
        ("exported", "softmax"),
    ):
        status, answer = infer(server, model, X)
        assert (status, [o["name"] for o in answer["outputs"]]) == (200, [output])
        assert np.allclose(np.reshape(answer["outputs"][0]["data"], (2, 3)), scores(X), atol=1e-5)
        status, body = server.post(f"/predictions/{model}", json.dumps(X[0]).encode())
        assert (status, np.allclose(json.loads(body), scores(X[0]), atol=1e-5)) == (200, True)
    assert json.loads(server.get("/v2/models/net")[1])["platform"] == "onnxruntime_onnx"

    def ask(i: int) -> tuple[int, Any]:
        return infer(server, ("net", "scripted")[i % 2], [[1.0] * 5] if i % 5 == 0 else [[float(i), 2, 3, 4]])

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(60)))
    for i, (status, answer) in enumerate(found):
        if i % 5:
            assert status == 200, answer
            assert np.allclose(answer["outputs"][0]["data"], scores([[float(i), 2, 3, 4]]), atol=1e-4)
        elif i % 2 == 0:
            assert (status, answer) == (
                400,
                {"error": "input 'x': shape must be [-1, 4] (-1 is any size), found [1, 5]"},
            )
        else:
            assert status == 500, answer


def test_instances_in_threads_answer_as_one_does(serve: Callable[..., Any], model_files: Path) -> None:
    server = serve(
        None, "net.pt2", "--set=models.net.transport=thread", "--set=models.net.instances=3", cwd=model_files
    )
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: infer(server, "net", [[float(i), 2, 3, 4]] * (1 + i % 3)), range(60)))
    for i, (status, answer) in enumerate(found):
        assert status == 200, answer
        scored = np.reshape(answer["outputs"][0]["data"], (-1, 3))
        assert np.allclose(scored, scores([[float(i), 2, 3, 4]] * (1 + i % 3)), atol=1e-4)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("nowhere.onnx", "there is no file"),
        ("weights.pt", "holds a state dict, not a program: name its class too"),
        ("net.pt --set=models.net.precision=fp8", "precision: found 'fp8', expected one of fp32, fp16, bf16"),
    ],
)
def test_a_target_that_cannot_be_served_fails_at_startup(
    serve: Callable[..., Any], model_files: Path, target: str, error: str
) -> None:
    with pytest.raises(RuntimeError, match=f"exit 1\n(.*\n)*.*{error}"):
        serve(None, *target.split(), cwd=model_files)
