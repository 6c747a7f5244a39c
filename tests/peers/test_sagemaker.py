"""SageMaker's own toolkit starts Penstock's `torchserve`, finds its process, serves a script with it, and stops it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.containers import Probe, read_dockerfile
from support.pods import Load, Pod, survives_sigterm

pytestmark = pytest.mark.peer

ROOT = Path(__file__).parents[2]
TOOLKIT = Path(os.environ.get("PEERS_VENV", ROOT / ".venv-peers")).absolute() / "sagemaker"
SERVE = ("python", "-c", "from sagemaker_pytorch_serving_container.serving import main; main()")
SCRIPT = """
import json

def model_fn(model_dir):
    return 3

def input_fn(body, content_type):
    return json.loads(body)

def predict_fn(data, model):
    return data * model

def output_fn(prediction, accept):
    return json.dumps(prediction)
"""


def endpoint(folder: Path, models: dict[str, Path], **env: str) -> Pod:
    """The toolkit's `serve` in an image with Penstock, as root, as AWS's images run."""
    if not TOOLKIT.is_dir():
        pytest.skip(f"there is no {TOOLKIT}: run this by `make test-peers`")
    image = read_dockerfile(ROOT / "deploy" / "docker" / "Dockerfile", ROOT)
    container = replace(
        image,
        entrypoint=(),
        cmd=SERVE,
        env={**image.env, "PYTHONPATH": "/opt/toolkit", **env},
        user="0",
        ports=(8080,),
        probes={"readinessProbe": Probe(8080, "/ping")},
    )
    return Pod(container, folder, {"/opt/toolkit": TOOLKIT, **models})


def write_model(folder: Path) -> Path:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text(SCRIPT)
    return folder


def test_the_toolkit_serves_a_script_and_stops_the_server(tmp_path: Path) -> None:
    pod = endpoint(tmp_path, {"/opt/ml/model": write_model(tmp_path / "model")})
    try:
        pod.wait_ready()
        load = Load(pod, "/invocations", b"14", b"42", content_type="application/json", accept="application/json")
        survives_sigterm(load)
    finally:
        pod.close()


def test_the_toolkit_serves_a_multi_model_endpoint(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "m" / "model")
    # the file of toolkit 2.0.25 ends without a newline after enable_model_api=true, and the toolkit appends to it
    env = {"SAGEMAKER_MULTI_MODEL": "true", "TS_ENABLE_MODEL_API": "true"}
    pod = endpoint(tmp_path, {"/opt/ml/models": tmp_path / "models"}, **env)
    try:
        pod.wait_ready()
        sent: dict[str, Any] = {"content-type": "application/json"}
        body = b'{"model_name": "m", "url": "/opt/ml/models/m/model"}'
        assert pod.request("POST", "/models", body, sent)[0] == 200, pod.said()
        assert pod.request("POST", "/models/m/invoke", b"14", sent)[:2] == (200, b"42")
    finally:
        pod.close()
