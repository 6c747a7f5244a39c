"""SageMaker's contract, on the container of deploy/sagemaker."""

import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.containers import Container, Probe, read_dockerfile
from support.pods import IS_ROOT, Load, Pod, survives_sigterm

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = """
    import json, time
    import numpy as np

    def model_fn(model_dir):
        return float(open(f"{model_dir}/factor").read())

    def input_fn(body, content_type):
        assert content_type == "application/json", content_type
        return np.array(json.loads(body))

    def predict_fn(data, model):
        time.sleep(0.02)
        return data * model

    def output_fn(prediction, accept, context):
        sent = context.get_request_header(0, "X-Amzn-SageMaker-Custom-Attributes")
        context.set_response_header(0, "X-Amzn-SageMaker-Custom-Attributes", f"seen={sent}")
        return json.dumps(prediction.tolist()), accept
"""


def write_model(folder: Path, factor: float, script: str = SCRIPT) -> None:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text(textwrap.dedent(script))
    (folder / "factor").write_text(str(factor))


@pytest.fixture(scope="module")
def sagemaker(image: Container) -> Container:
    return read_dockerfile(DEPLOY / "sagemaker" / "Dockerfile", DEPLOY / "sagemaker", {"penstock": image})


def invoke(pod: Pod, body: bytes, path: str = "/invocations", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    named = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    status, answer, found = pod.request("POST", path, body, named)
    return status, answer, dict(found)


def load_of(pod: Pod, path: str, expected: bytes) -> Load:
    return Load(pod, path, b"[3]", expected, content_type="application/json", accept="application/json")


def on_port(container: Container, port: int, **env: str) -> Container:
    """The container with the variables that SageMaker sets."""
    env = {"SAGEMAKER_BIND_TO_PORT": str(port), "SAGEMAKER_SAFE_PORT_RANGE": f"{port}-{port + 9}", **env}
    probes = {"readinessProbe": Probe(port, "/ping")}  # SageMaker calls it
    return replace(container, env={**container.env, **env}, ports=(port,), probes=probes)


def test_a_script_serves_invocations_and_sigterm_loses_none(
    sagemaker: Container, start_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    write_model(tmp_path / "model", 2.0)
    container = on_port(sagemaker, 8090, SAGEMAKER_MODEL_SERVER_WORKERS="1")
    pod = start_pod(container, {"/opt/ml/model": tmp_path / "model"})
    pod.wait_ready()
    assert not IS_ROOT or pod.uids() == {1000}

    attributes = {"X_Amzn_SageMaker_Custom_Attributes": "trace=7"}
    status, body, headers = invoke(pod, b"[1, 2.5]", accept="application/json", **attributes)
    assert (status, body, headers["content-type"]) == (200, b"[2.0, 5.0]", "application/json")
    assert headers["x-amzn-sagemaker-custom-attributes"] == "seen=trace=7"

    status, body, _ = invoke(pod, b"[1, ")
    assert (status, json.loads(body)["message"]) == (500, "Prediction failed")
    pod.wait_for("JSONDecodeError")  # CloudWatch has the traceback, the client has not

    survives_sigterm(load_of(pod, "/invocations", b"[6.0]"))


# ---- multi-model endpoints


def manage(pod: Pod, method: str, path: str, value: object = None) -> tuple[int, Any]:
    body = None if value is None else json.dumps(value).encode()
    status, answer, _ = pod.request(method, path, body, {"content-type": "application/json"})
    return status, json.loads(answer)


def test_a_multi_model_endpoint_loads_lists_invokes_and_unloads_and_sigterm_loses_none(
    sagemaker: Container, start_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    for name, factor in (("a", 2.0), ("b", 10.0), ("c", 1.0)):
        write_model(tmp_path / name / "model", factor)
    out_of_memory = "def model_fn(model_dir):\n    raise MemoryError('no room')\n"
    write_model(tmp_path / "big" / "model", 1.0, out_of_memory)
    pod = start_pod(on_port(sagemaker, 8080, SAGEMAKER_MULTI_MODEL="true"), {"/opt/ml/models": tmp_path})
    pod.wait_ready()

    def load(name: str, folder: str = "") -> int:
        return manage(pod, "POST", "/models", {"model_name": name, "url": f"/opt/ml/models/{folder or name}/model"})[0]

    assert [load(name) for name in ("a", "b", "c")] == [200] * 3
    assert load("a") == 409
    assert load("big") == 507
    assert load("none") == 404
    assert manage(pod, "POST", "/models", {"model_name": "etc", "url": "/etc"})[0] == 404  # only models are served
    assert invoke(pod, b"[1]", "/models/a/invoke")[:2] == (200, b"[2.0]")
    assert invoke(pod, b"[1]", "/models/b/invoke", X_Amzn_SageMaker_Target_Model="b")[:2] == (200, b"[10.0]")
    assert invoke(pod, b"[1]", "/models/none/invoke")[0] == 404
    listed: list[tuple[str, str]] = []
    token: str | None = "0"
    while token is not None:
        page = manage(pod, "GET", f"/models?limit=2&next_page_token={token}")[1]
        listed += [(each["modelName"], each["modelUrl"]) for each in page["models"]]
        token = page.get("nextPageToken")
    assert listed == [(name, f"/opt/ml/models/{name}/model") for name in ("a", "b", "c")]
    status, found = manage(pod, "GET", "/models/b")
    assert (status, found[0]["modelName"], found[0]["modelUrl"]) == (200, "b", "/opt/ml/models/b/model")
    assert manage(pod, "DELETE", "/models/a")[0] == 200
    assert manage(pod, "DELETE", "/models/a")[0] == 404
    assert invoke(pod, b"[1]", "/models/a/invoke")[0] == 404
    assert load("a") == 200
    survives_sigterm(load_of(pod, "/models/a/invoke", b"[6.0]"), load_of(pod, "/models/b/invoke", b"[30.0]"))


def test_a_model_of_the_image_answers_sagemaker_and_sigterm_loses_none(
    sagemaker: Container, start_pod: Callable[..., Pod], tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(
        "class Sum:\n    def predict(self, items):\n        return [sum(x) for x in items]\n"
    )
    command = ("tini", "--", "penstock", "serve", "--platform", "sagemaker", "/app/app.py")
    pod = start_pod(replace(on_port(sagemaker, 8090), entrypoint=command, cmd=()), {"/app": tmp_path})
    pod.wait_ready()
    assert invoke(pod, b"[1, 2]")[:2] == (200, b"3")
    survives_sigterm(load_of(pod, "/invocations", b"3"))
