"""Vertex AI's contract, on the container of deploy/vertex, natively and as a TorchServe server with model.mar."""

import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.containers import Container, Probe, read_dockerfile
from support.kserve import write_archive
from support.pods import Load, Pod, survives_sigterm

DEPLOY = Path(__file__).parents[2] / "deploy"
JSON = {"content-type": "application/json"}
PREDICT = "/v1/endpoints/7/deployedModels/8:predict"
MODEL = """
    import time

    class Double:
        def predict(self, items, parameters):
            time.sleep(0.01)
            plus = [asked.get("plus", 0) for asked in parameters]
            return [p + (2 * x if isinstance(x, int) else len(x)) for x, p in zip(items, plus)]
"""
HANDLER = """
    def handle(data, context):
        return data and [2 * row for row in data]
"""


@pytest.fixture(scope="module")
def vertex(image: Container) -> Container:
    return read_dockerfile(DEPLOY / "vertex" / "Dockerfile", DEPLOY / "vertex", {"penstock": image})


def endpoint(container: Container, health: str, predict: str) -> Container:
    """The container as Vertex AI starts it, with a local folder for the artifacts."""
    env = {"AIP_HTTP_PORT": "8095", "AIP_HEALTH_ROUTE": health, "AIP_PREDICT_ROUTE": predict, "AIP_MODE": "PREDICTION"}
    env["AIP_STORAGE_URI"] = "/mnt/artifacts"
    probes = {"readinessProbe": Probe(8095, health)}
    return replace(container, env={**container.env, **env}, ports=(8095,), probes=probes)


def predict(pod: Pod, path: str, value: Any) -> tuple[int, Any]:
    status, body, _ = pod.request("POST", path, json.dumps(value).encode(), JSON)
    return status, json.loads(body)


def test_a_model_of_the_artifacts_answers_vertex_and_sigterm_loses_none(
    vertex: Container, start_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    (tmp_path / "double.py").write_text(textwrap.dedent(MODEL))
    pod = start_pod(endpoint(vertex, "/healthy", PREDICT), {"/mnt/artifacts": tmp_path})
    pod.wait_ready()
    body = {"instances": [1, 2], "parameters": {"plus": 100}}
    assert predict(pod, PREDICT, body) == (200, {"predictions": [102, 104]})
    assert predict(pod, PREDICT, {"instances": ["x" * 1_500_000]}) == (200, {"predictions": [1_500_000]})
    status, answer = predict(pod, PREDICT, {"instances": []})
    assert (status, list(answer)) == (400, ["error"])
    assert pod.request("GET", PREDICT)[0] == 405
    load = Load(pod, PREDICT, b'{"instances": [5]}', b'{"predictions":[10]}', content_type="application/json")
    survives_sigterm(load)


def test_model_mar_is_served_as_in_vertexs_own_containers_and_sigterm_loses_none(
    vertex: Container, start_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    write_archive(tmp_path / "model.mar", HANDLER)
    configuration = "/home/model-server/vertex.properties"
    container = replace(
        endpoint(vertex, "/ping", "/predictions/model"),
        cmd=("torchserve", "--start", "--ts-config", configuration),
        copies={**vertex.copies, configuration: DEPLOY / "vertex" / "torchserve.properties"},
    )
    pod = start_pod(container, {"/mnt/artifacts": tmp_path})
    pod.wait_ready()
    assert predict(pod, "/predictions/model", {"instances": [1, 2]}) == (200, {"predictions": [2, 4]})
    expected = pod.request("POST", "/predictions/model", b'{"instances": [5]}', JSON)[1]
    survives_sigterm(Load(pod, "/predictions/model", b'{"instances": [5]}', expected, content_type="application/json"))
