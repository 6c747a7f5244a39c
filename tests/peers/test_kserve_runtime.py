"""KServe's own clients, unmodified, on the container of deploy/kserve, in place of TorchServe and its wrapper."""

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.containers import read_dockerfile
from support.kserve import rendered, write_tree
from support.pods import Pod

pytestmark = pytest.mark.peer

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("KSERVE_VENV", ROOT / ".venv-kserve")).absolute() / "bin" / "python"
CALLS = """
import asyncio, json, sys
import httpx, numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

def request(binary):
    tensor = InferInput("x", [2, 2], "INT64")
    tensor.set_data_from_numpy(np.array([[1, 2], [3, 4]]), binary_data=binary)
    return InferRequest("double", [tensor], request_id="7")

async def main(v1_host, v2_host, grpc_host):
    found = {}
    async with InferenceRESTClient(RESTConfig(protocol="v1")) as client:
        url = f"http://{v1_host}"
        found["v1"] = [await client.is_server_live(url), await client.is_model_ready(url, "double")]
        found["v1"].append(await client.infer(url, {"instances": [1, 2]}, "double"))
        found["v1"].append(await client.explain(url, "double", {"instances": [1, 2]}))
        try:
            await client.infer(url, {"instances": [1]}, "single")
        except httpx.HTTPStatusError as e:
            found["v1"].append(str(e).partition(", '")[0])
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        url = f"http://{v2_host}"
        found["v2"] = [await client.is_server_live(url), await client.is_server_ready(url)]
        found["v2"] += [await client.is_model_ready(url, name) for name in ("double", "single")]
        answer = await client.infer(url, request(False), "double")
        found["v2"] += [answer.id, answer.outputs[0].as_numpy().tolist()]
    async with InferenceGRPCClient(grpc_host) as client:
        found["grpc"] = [await client.is_server_live(), await client.is_server_ready()]
        found["grpc"].append(await client.is_model_ready("double"))
        for binary in (False, True):
            answer = await client.infer(request(binary))
            found["grpc"] += [answer.id, answer.outputs[0].as_numpy().tolist()]
    print(json.dumps(found))

asyncio.run(main(*sys.argv[1:]))
"""


def test_every_client_gets_what_it_got_from_the_wrapper(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: run this by `make test-peers`")
    image = read_dockerfile(ROOT / "deploy" / "docker" / "Dockerfile", ROOT)
    tree = write_tree(tmp_path / "models")
    with ExitStack() as stack:
        hosts = []
        for protocol, port in (("v1", 8080), ("v2", 8080), ("grpc-v2", 8081)):
            pod = Pod(rendered(image, protocol), tmp_path / protocol, {"/mnt/models": tree})
            stack.callback(pod.close)
            pod.wait_ready()
            hosts.append(stack.enter_context(pod.forward(port)))
        done = subprocess.run([PYTHON, "-c", CALLS, *hosts], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "v1": [True, True, {"predictions": [2, 4]}, {"explanations": [2, 4]}, "Model not found: single"],
        "v2": [True, True, True, False, "7", [2, 4, 6, 8]],
        "grpc": [True, True, True, "7", [2, 4, 6, 8], "7", [2, 4, 6, 8]],
    }
