"""Triton's extensions over gRPC give what they give over HTTP, with tritonclient's clients as they are."""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.service_pb2 as messages
import tritonclient.grpc.service_pb2_grpc as service
import tritonclient.http
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

SOURCE = """
    import penstock

    def echo(items):
        return items

    class Typed:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2))]
        outputs = [penstock.TensorSpec("y", "FP32", (-1, 2))]

        def predict(self, items):
            return [{"y": item["x"] * 2} for item in items]

    @penstock.model(max_sequences=4)
    class Totals:
        def predict(self, items, sequences):
            return items
"""
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
THREADS = [w for name in ("echo", "typed", "totals") for w in ("--set", f"models.{name}.transport=thread")]


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    managed = ["--set", "server.management=true"]
    return serve_all(SOURCE, "echo", "Typed", "Totals", *managed, *THREADS, ports=PORTS)


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(server.urls["grpc"].removeprefix("grpc://")) as found:
        yield found


@pytest.fixture
def http(server: Any) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(server.url.removeprefix("http://")) as found:
        yield found


def numbers(found: Any) -> Any:
    """protobuf's JSON has 64-bit numbers as text."""
    if isinstance(found, dict):
        return {key: numbers(value) for key, value in found.items()}
    if isinstance(found, list):
        return [numbers(each) for each in found]
    return int(found) if isinstance(found, str) and re.fullmatch("-?[0-9]+", found) else found


def plain(found: Any) -> Any:
    """Without what protobuf leaves out: zeros, the first value of an enum, empty lists and objects."""
    if isinstance(found, dict):
        inner = {key: plain(value) for key, value in found.items()}
        return {key: value for key, value in inner.items() if value not in (0, "", "REJECT", False, None, [], {})}
    return [plain(each) for each in found] if isinstance(found, list) else found


@pytest.mark.parametrize("model", ["echo", "typed", "totals"])
def test_the_configuration_is_that_of_http(client, http, model):
    found = client.get_model_config(model, as_json=True)["config"]
    assert plain(numbers(found)) == plain(numbers(http.get_model_config(model)))
    assert found["name"] == model


def test_statistics_are_those_of_http(client, http):
    tensor = triton.InferInput("x", [3, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((3, 2), np.float32))
    for _ in range(4):
        client.infer("typed", [tensor])
    found = client.get_inference_statistics("typed", as_json=True)
    assert plain(numbers(found)) == plain(numbers(http.get_inference_statistics("typed")))
    (stats,) = found["model_stats"]
    assert int(stats["inference_count"]) % 3 == 0
    assert int(stats["inference_stats"]["success"]["ns"]) > 0
    names = {each.name for each in client.get_inference_statistics().model_stats}
    assert {"typed", "totals"} <= names


def test_models_are_loaded_and_unloaded(client, http):
    index = client.get_model_repository_index(as_json=True)["models"]
    assert plain(index) == plain(http.get_model_repository_index())
    client.unload_model("echo")
    client.unload_model("echo")
    client.unload_model("absent")
    states = {each.name: each.state for each in client.get_model_repository_index().models}
    assert states["echo"] == "UNAVAILABLE"
    assert not client.is_model_ready("echo")
    client.load_model("echo", config='{"instances": 2}')
    assert client.get_model_config("echo").config.instance_group[0].count == 2
    config = client.get_model_config("echo", as_json=True)["config"]
    client.load_model("echo", config=json.dumps({**config, "instance_group": [{"count": 3}]}))
    assert client.get_model_config("echo").config.instance_group[0].count == 3
    client.load_model("echo")
    assert client.get_model_config("echo").config.instance_group[0].count == 1
    with pytest.raises(InferenceServerException, match=r"parameter 'file:1/model\.onnx' is not supported"):
        client.load_model("echo", config="{}", files={"file:1/model.onnx": b"x"})


def test_settings_are_read_and_changed(client, http):
    assert client.get_log_settings(as_json=True)["settings"]["log_info"] == {"bool_param": True}
    client.update_log_settings({"log_verbose_level": 1})
    try:
        assert http.get_log_settings()["log_verbose_level"] == 1
    finally:
        client.update_log_settings({"log_verbose_level": 0})
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    assert list(client.update_trace_settings(settings={"trace_level": ["OFF"]}).settings["trace_rate"].value) == [
        "1000"
    ]
    with pytest.raises(InferenceServerException, match="this server has no traces"):
        client.update_trace_settings("typed", {"trace_level": ["TIMESTAMPS"]})
    with pytest.raises(InferenceServerException, match="log setting 'log_file' cannot be changed"):
        client.update_log_settings({"log_file": "/tmp/x"})


@pytest.mark.parametrize(
    ("call", "message", "code"),
    [
        ("ModelStatistics", messages.ModelStatisticsRequest(name="absent"), "INVALID_ARGUMENT"),
        ("ModelStatistics", messages.ModelStatisticsRequest(name="echo", version="7"), "INVALID_ARGUMENT"),
        ("TraceSetting", messages.TraceSettingRequest(model_name="absent"), "INVALID_ARGUMENT"),
        ("ModelConfig", messages.ModelConfigRequest(name="absent"), "NOT_FOUND"),
        ("ModelMetadata", messages.ModelMetadataRequest(name="echo", version="7"), "NOT_FOUND"),
        ("RepositoryIndex", messages.RepositoryIndexRequest(repository_name="other"), "UNIMPLEMENTED"),
        ("RepositoryModelLoad", messages.RepositoryModelLoadRequest(repository_name="other"), "UNIMPLEMENTED"),
        ("SystemSharedMemoryStatus", messages.SystemSharedMemoryStatusRequest(name="absent"), "NOT_FOUND"),
        ("CudaSharedMemoryStatus", messages.CudaSharedMemoryStatusRequest(name="absent"), "NOT_FOUND"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_has_tritons_code(server, call, message, code):
    address = server.urls["grpc"].removeprefix("grpc://")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as raised:
        getattr(service.GRPCInferenceServiceStub(channel), call)(message)
    assert raised.value.code().name == code


def test_cuda_shared_memory_is_refused_by_name(client):
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported"):
        client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64)


def test_changes_need_the_management_token(serve, tmp_path):
    (tmp_path / "manage").write_text("m\n")
    (tmp_path / "infer").write_text("i\n")
    keys = ["server.management=true", "models.echo.transport=thread"]
    keys += ["auth.management_token_file=manage", "auth.inference_token_file=infer"]
    server = serve(SOURCE, "echo", *(w for key in keys for w in ("--set", key)), ports=PORTS)
    with triton.InferenceServerClient(server.urls["grpc"].removeprefix("grpc://")) as client:
        for token, changed, read in ((None, 16, 16), ("i", 16, 0), ("m", 0, 16)):
            headers = None if token is None else {"authorization": f"Bearer {token}"}
            assert code(lambda h=headers: client.load_model("echo", headers=h)) == changed
            assert code(lambda h=headers: client.get_log_settings(headers=h)) == changed
            assert code(lambda h=headers: client.get_model_repository_index(headers=h)) == read


def code(call: Callable[[], Any]) -> int:
    try:
        call()
    except InferenceServerException as error:
        name = error.status().removeprefix("StatusCode.")
        number: int = getattr(grpc.StatusCode, name).value[0]
        return number
    return 0


def test_the_page_lists_every_call_of_the_clients():
    page = (Path(__file__).parents[2] / "docs" / "open-inference.md").read_text().partition("\n## gRPC\n")[2]
    listed = set(re.findall(r"`(\w+)`", page))
    for kind in (triton.InferenceServerClient, aio.InferenceServerClient):
        calls = {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}
        assert calls - {"register_plugin", "unregister_plugin", "plugin"} <= listed
