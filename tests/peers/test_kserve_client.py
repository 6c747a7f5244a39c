"""KServe's own clients, unmodified, on `penstock serve`: every call of its public surface.

Its packages (450 MB, and other versions than ours) have a virtual environment of their own, made by `make test-peers`.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.peer

PYTHON = Path(os.environ.get("KSERVE_VENV", Path(__file__).parents[2] / ".venv-kserve")).absolute() / "bin" / "python"

PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
MODELS = """
    import penstock

    class Sums:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2))]

        def predict(self, items):
            return [{"sum": item["x"].sum(axis=1)} for item in items]

    class Words:
        def predict(self, items):
            return [item.upper() for item in items]

        def explain(self, items):
            return [list(item) for item in items]
"""

CALLS = """
import asyncio, json, sys
import httpx, numpy as np
import grpc
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

def public(kind):
    return sorted(name for name in dir(kind) if not name.startswith("_"))

async def main(url, grpc_url):
    found = {"public": public(InferenceRESTClient), "public_grpc": public(InferenceGRPCClient)}

    async def call(key, coroutine):
        try:
            found[key] = await coroutine
        except httpx.HTTPStatusError as e:
            found[key] = [e.response.status_code, str(e).partition(", '")[0]]
        except grpc.RpcError as e:
            found[key] = [e.code().name, e.details()]
        except Exception as e:
            found[key] = type(e).__name__

    async with InferenceRESTClient(RESTConfig(protocol="v1")) as v1:
        await call("live1", v1.is_server_live(url))
        await call("ready1", v1.is_server_ready(url))
        await call("model1", v1.is_model_ready(url, "sums"))
        await call("no1", v1.is_model_ready(url, "sum"))
        await call("rows", v1.infer(url, {"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}, "sums"))
        await call("words", v1.infer(url, {"instances": ["a", "b"]}, "words"))
        await call("explain", v1.explain(url, "words", {"instances": ["ab"]}))
        await call("cannot", v1.explain(url, "sums", {"instances": [[1, 2]]}))
        await call("wrong", v1.infer(url, {"instances": [{"y": 1}]}, "sums"))
        await call("unknown", v1.infer(url, {"instances": [1]}, "sum"))
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as v2:
        await call("live2", v2.is_server_live(url))
        await call("ready2", v2.is_server_ready(url))
        await call("model2", v2.is_model_ready(url, "sums"))
        await call("no2", v2.is_model_ready(url, "sum"))
        await call("explain2", v2.explain(url, "words", {}))
        for binary in (False, True):
            tensor = InferInput("x", [2, 2], "FP32")
            tensor.set_data_from_numpy(np.array([[1, 2], [3, 4]], np.float32), binary_data=binary)
            request = InferRequest("sums", [tensor], request_id="7", parameters={"binary_data_output": binary})
            answer = await v2.infer(url, request, "sums")
            found[f"tensors{binary:d}"] = [answer.id, answer.outputs[0].as_numpy().tolist()]
    async with InferenceGRPCClient(grpc_url) as client:
        await call("live_grpc", client.is_server_live())
        await call("ready_grpc", client.is_server_ready())
        await call("model_grpc", client.is_model_ready("sums"))
        await call("no_grpc", client.is_model_ready("sum"))
        for binary in (False, True):
            tensor = InferInput("x", [2, 2], "FP32")
            tensor.set_data_from_numpy(np.array([[1, 2], [3, 4]], np.float32), binary_data=binary)
            answer = await client.infer(InferRequest("sums", [tensor], request_id="7"))
            found[f"grpc{binary:d}"] = [answer.id, answer.outputs[0].as_numpy().tolist()]
    print(json.dumps(found))

asyncio.run(main(*sys.argv[1:]))
"""


def test_every_call_of_the_client_works_or_raises_what_it_raises_on_kserve(serve: Callable[..., Any]) -> None:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: run this by `make test-peers`")
    server = serve(MODELS, "Sums", "Words", ports=PORTS)
    command = [PYTHON, "-c", CALLS, server.url, server.urls["grpc"].removeprefix("grpc://")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    unknown = {"type": "invalid_request_error", "param": None, "code": "model_not_found"}  # the form of OpenAI's routes
    missing = "model 'sum' is not found; did you mean 'sums'?"
    assert json.loads(done.stdout) == {
        "public": ["close", "explain", "infer", "is_model_ready", "is_server_live", "is_server_ready"],
        "live1": True,
        "ready1": "UnsupportedProtocol",  # the client itself refuses it
        "model1": True,
        "no1": [404, str({"message": missing, **unknown}).partition(", '")[0]],
        "rows": {"predictions": [3.0, 7.0]},
        "words": {"predictions": ["A", "B"]},
        "explain": {"explanations": [["a", "b"]]},
        "cannot": [501, "model 'sums' has no method explain(items)"],
        "wrong": [400, "unknown input 'y'; the model has x"],
        "unknown": [404, missing],
        "live2": True,
        "ready2": True,
        "model2": True,
        "no2": False,
        "explain2": "UnsupportedProtocol",  # the client itself refuses it
        "tensors0": ["7", [3.0, 7.0]],
        "tensors1": ["7", [3.0, 7.0]],
        "public_grpc": ["close", "infer", "is_model_ready", "is_server_live", "is_server_ready"],
        "live_grpc": True,
        "ready_grpc": True,
        "model_grpc": True,
        "no_grpc": False,
        "grpc0": ["7", [3.0, 7.0]],
        "grpc1": ["7", [3.0, 7.0]],
    }
