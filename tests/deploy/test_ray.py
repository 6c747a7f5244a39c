"""The RayService: its objects, its image, and its applications on a Ray cluster of this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from support.kubernetes import errors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "ray"
MODELS, SERVICE = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
CONFIG = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])


def test_the_objects_and_their_pods_have_the_schemas_of_their_api_versions() -> None:
    pytest.importorskip("kubernetes_validate")
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": group["template"]["spec"]}
        for group in GROUPS
    ]
    assert [errors(each) for each in (MODELS, SERVICE, *pods)] == [[], [], [], []]
    assert errors({**SERVICE, "spec": {**SERVICE["spec"], "serveConfig": ""}})
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert errors({**pod, "spec": {**pod["spec"], "containers": [{**container, "evn": []}]}})
        assert pod["spec"]["volumes"][0]["configMap"]["name"] == MODELS["metadata"]["name"]
        assert container["volumeMounts"][0]["mountPath"] == container["env"][0]["value"]


def test_the_image_and_the_cluster_have_the_version_of_ray_that_is_tested() -> None:
    (pinned,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert CLUSTER["rayVersion"] == pinned
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"ARG RAY={pinned}\n" in dockerfile
    copied = [name for line in re.findall(r"^COPY --chown=ray (.+) \S+$", dockerfile, re.M) for name in line.split()]
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)


@pytest.mark.slow
def test_the_applications_answer_on_a_ray_cluster(ray_cluster: Any, tmp_path: Path) -> None:
    for name, text in MODELS["data"].items():
        (tmp_path / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {**CONFIG, "http_options": {"host": "127.0.0.1", "port": port}}
    places = os.pathsep.join([str(tmp_path), str(Path(penstock.__file__).parents[1])])  # instead of the pods' /models
    for application in config["applications"]:
        application["runtime_env"] = {"env_vars": {"PYTHONPATH": places}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).parent / "serve"), "run", "--address", ray_cluster.address, "config.yaml"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            answer = ask(f"http://127.0.0.1:{port}/predictions/uppercase", process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # Ray's way of ending is not ours to prove
                process.kill()
                process.wait()
            log.seek(0)
            said = log.read()
    assert answer == b"HELLO", said


def ask(url: str, process: subprocess.Popen[bytes]) -> bytes:
    """The answer of the application, once it is there."""
    request = urllib.request.Request(url, b"hello", {"content-type": "text/plain"})
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                found: bytes = response.read()
                return found
        except OSError:
            time.sleep(0.2)
    return b""
