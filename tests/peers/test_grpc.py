"""The same calls over gRPC to TorchServe 0.12.0 and to Penstock have the same status, text and answer."""

import json
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.torchserve import grpc as services

pytestmark = pytest.mark.peer

HANDLER = """
import json
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return None
    row = data[0]
    if isinstance(row.get("body"), dict):
        asked = row["body"]
        return [{"id": asked["id"], "model_name": "m", "model_version": "1.0", "outputs": asked["inputs"]}]
    order = bytes(row.get("data", b""))
    if order == b"raise":
        raise ValueError("secret")
    if order == b"refuse":
        raise PredictionException("no such thing", 404)
    if order == b"cuda":
        raise RuntimeError("CUDA")
    if order == b"status":
        context.set_response_status(code=404, idx=0)
    if order == b"wrong":
        return 7
    if order == b"length":
        return ["a", "b"]
    if order == b"parts":
        for part in ("one", "two"):
            send_intermediate_predict_response([part], context.request_ids, "", 200, context)
    inputs = {name: [type(value).__name__, len(value)] for name, value in row.items()}
    return [json.dumps([inputs, context.get_all_request_header(0)], sort_keys=True)]
"""
M = {"model_name": "m"}
ORDERS = (b"", b"raise", b"refuse", b"cuda", b"status", b"wrong", b"length")
CONTENTS: dict[str, tuple[str, list[Any]]] = {
    "FP32": ("fp32_contents", [1.5, 2.0]),
    "FP64": ("fp64_contents", [0.1]),
    "INT8": ("int_contents", [-3]),
    "INT64": ("int64_contents", [2**40]),
    "UINT8": ("uint_contents", [3]),
    "BOOL": ("bool_contents", [True, False]),
    "BYTES": ("bytes_contents", [b"ab", b"\xff"]),
}


def tensor(datatype: str) -> dict[str, Any]:
    field, values = CONTENTS[datatype]
    return {"name": datatype, "datatype": datatype, "shape": [len(values)], "contents": {field: values}}


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("Ping", {}),
    *[("Predictions", {**M, "input": {"data": order}}) for order in ORDERS],
    ("Predictions", {**M, "model_version": "1.0", "input": {"a": b"1", "b": b"\xff"}}),
    ("Predictions", M),
    ("Predictions", {}),
    ("Predictions", {"model_name": "no"}),
    ("Predictions", {**M, "model_version": "9"}),
    ("StreamPredictions", {**M, "input": {"data": b"parts"}}),
    ("StreamPredictions", {**M, "input": {"data": b"raise"}}),
    ("StreamPredictions", {"model_name": "no"}),
    ("ListModels", {"limit": 1}),
    ("DescribeModel", {"model_name": "no"}),
    ("DescribeModel", {**M, "model_version": "9"}),
    ("RegisterModel", {}),
    ("RegisterModel", {"url": "no.mar"}),
    ("RegisterModel", {"url": "../m.mar"}),
    ("RegisterModel", {"url": "m.mar", "model_name": "n", "runtime": "perl"}),
    ("RegisterModel", {"url": "m.mar", "model_name": "n", "initial_workers": 1, "synchronous": True}),
    ("ScaleWorker", {"model_name": "n", "min_worker": 1, "synchronous": True}),
    ("ScaleWorker", {"model_name": "n", "min_worker": 1}),
    ("ScaleWorker", {"model_name": "n", "min_worker": 3, "max_worker": 1}),
    ("ScaleWorker", {"model_name": "no"}),
    ("ScaleWorker", {"model_name": "n", "model_version": "9"}),
    ("SetDefault", {"model_name": "n", "model_version": "1.0"}),
    ("SetDefault", {"model_name": "n", "model_version": "9"}),
    ("SetDefault", {"model_name": "no", "model_version": "9"}),
    ("UnregisterModel", {}),
    ("UnregisterModel", {"model_name": "n"}),
    ("UnregisterModel", {"model_name": "n"}),
    ("UnregisterModel", {**M, "model_version": "9"}),
    ("ServerLive", {}),
    ("ServerReady", {}),
    ("ServerMetadata", {}),
    ("ModelReady", {"name": "m"}),
    ("ModelReady", {"name": "no"}),
    ("ModelReady", {}),
    ("ModelMetadata", {"name": "m"}),
    ("ModelMetadata", {"name": "m", "version": "9"}),
    ("ModelMetadata", {}),
    ("ModelInfer", {**M, "id": "one", "inputs": [tensor(datatype) for datatype in CONTENTS]}),
    ("ModelInfer", {**M, "inputs": [tensor("FP32")]}),
    ("ModelInfer", {"model_name": "no"}),
    ("ModelInfer", {}),
]


def outcomes(ports: tuple[int, int]) -> list[tuple[Any, ...]]:
    """What the server answers to each call: OK and its messages, or a status and a text."""
    inference, management = (grpc.insecure_channel(f"127.0.0.1:{port}") for port in ports)
    channels = {
        f"{services.INFERENCE}.InferenceAPIsService": inference,
        f"{services.OPEN_INFERENCE}.GRPCInferenceService": inference,
        f"{services.MANAGEMENT}.ManagementAPIsService": management,
    }
    found: list[tuple[Any, ...]] = []
    with inference, management:
        for name, fields in CALLS:
            service = next(each for each in channels if name in services.service_descriptor(each).methods_by_name)
            method = services.service_descriptor(service).methods_by_name[name]
            channel = channels[service]
            call = (channel.unary_stream if method.server_streaming else channel.unary_unary)(f"/{service}/{name}")
            request = services.message_class(method.input_type.full_name)(**fields).SerializeToString()
            read = services.message_class(method.output_type.full_name).FromString
            try:
                answer = call(request, timeout=30)
                found.append(("OK", [read(each) for each in (answer if method.server_streaming else [answer])]))
            except grpc.RpcError as error:
                found.append((error.code().name, error.details()))
    return found


def test_both_answer_the_same_calls_alike(peer_server: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with zipfile.ZipFile(store / "m.mar", "w") as mar:
        model = {"modelName": "m", "modelVersion": "1.0", "handler": "service.py"}
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        mar.writestr("service.py", HANDLER)
    settings = "ts_open_inference_protocol=true\nenable_model_api=true\n"
    theirs, ours = (
        outcomes(peer_server(owner, store, ["m=m.mar"], settings).grpc_ports) for owner in ("torchserve", "penstock")
    )
    for (name, fields), expected, found in zip(CALLS, theirs, ours, strict=True):
        assert found == expected, (name, fields)
