"""TorchServe's gRPC APIs, called on a running server like clients generated from its protos."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.torchserve import grpc as services

CERTIFICATE, KEY = (str(Path(__file__).parents[1] / "tls" / name) for name in ("cert.pem", "key.pem"))
HANDLER = """
import json, os
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
    if order == b"die":
        os._exit(1)
    if order == b"raise":
        raise ValueError("secret")
    if order == b"refuse":
        raise PredictionException("no such thing", 404)
    if order == b"status":
        context.set_response_status(code=404, idx=0)
    if order == b"parts":
        for part in ("one", "two"):
            send_intermediate_predict_response([part], context.request_ids, "", 200, context)
    names = {name: [type(value).__name__, len(value)] for name, value in row.items()}
    return [json.dumps([names, context.get_all_request_header(0)])]
"""
WORKER_ERROR = "org.pytorch.serve.http.InternalServerException"


class Client:
    """The calls of a group's services by their names: `client(call, **fields)` is the answer, a list for a stream."""

    def __init__(self, channel: Any, key: str) -> None:
        self.channel = channel
        self.metadata = [("authorization", f"Bearer {key}")] if key else []

    def __call__(self, service: str, name: str, /, **fields: Any) -> Any:
        method = services.service_descriptor(f"org.pytorch.serve.grpc.{service}").methods_by_name[name]
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        call = make(
            f"/{method.containing_service.full_name}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=services.message_class(method.output_type.full_name).FromString,
        )
        request = services.message_class(method.input_type.full_name)(**fields)
        found = call(request, metadata=self.metadata, timeout=60)
        return list(found) if method.server_streaming else found

    def refusal(self, service: str, name: str, /, **fields: Any) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as raised:
            self(service, name, **fields)
        return raised.value.code().name, raised.value.details()

    def predict(self, order: bytes = b"", **fields: Any) -> bytes:
        return self(INFERENCE, "Predictions", **{"model_name": "m", "input": {"data": order}} | fields).prediction

    def predict_refused(self, order: bytes = b"", **fields: Any) -> tuple[str, str]:
        return self.refusal(INFERENCE, "Predictions", **{"model_name": "m", "input": {"data": order}} | fields)


INFERENCE = "inference.InferenceAPIsService"
MANAGEMENT = "management.ManagementAPIsService"
OPEN = "openinference.GRPCInferenceService"


@pytest.fixture
def serve(torchserve: Any) -> Any:
    """`with serve(*flags, **keys) as connect`; `connect(group, key)` is a client."""
    for version in ("1.0", "2.0"):
        torchserve.add_model(HANDLER, version, f"m-{version}.mar")

    @contextmanager
    def run(*flags: str, credentials: Any = None, **keys: str) -> Iterator[Any]:
        torchserve.configure(max_request_size="1000000", ts_open_inference_protocol="true", **keys)
        torchserve.start("--models", "m-1.0.mar", *flags)
        channels = []

        def connect(group: str, key: str = "") -> Client:
            address = torchserve.url(f"{group} gRPC").removeprefix("grpc://")
            if credentials is None:
                channels.append(grpc.insecure_channel(address))
            else:
                options = [("grpc.ssl_target_name_override", "localhost")]
                channels.append(grpc.secure_channel(address, credentials, options))
            return Client(channels[-1], key)

        try:
            yield connect
        finally:
            for channel in channels:
                channel.close()
            assert torchserve.run("torchserve", "--stop")[0] == 0

    return run


def test_models_are_called_and_managed_over_grpc(serve: Any) -> None:
    with serve("--disable-token-auth", "--enable-model-api") as connect:
        inference, management = connect("Inference"), connect("Management")
        assert json.loads(inference(INFERENCE, "Ping").health) == {"status": "Healthy"}
        predictions(inference)
        errors(inference)
        open_inference(inference)
        administration(management, inference)


def predictions(client: Client) -> None:
    inputs = {"data": b"x" * 900_000, "more": b"\xff"}
    found = [
        {"data": ["bytearray", 900_000], "more": ["bytearray", 1]},
        {name: {"content-type": ""} for name in inputs},
    ]
    names, headers = json.loads(client.predict(input=inputs))
    assert [dict(sorted(names.items())), dict(sorted(headers.items()))] == found
    assert json.loads(client.predict(input={}, model_version="1.0")) == [{}, {}]
    parts = client(INFERENCE, "StreamPredictions", model_name="m", input={"data": b"parts"})
    assert [part.prediction for part in parts][:2] == [b"one", b"two"]
    assert len(parts) == 3
    assert client.predict(b"parts").startswith(b"onetwo[")
    assert json.loads(client.predict(b"status"))[0] == {"data": ["bytearray", 6]}


def errors(client: Client) -> None:
    assert client.predict_refused(b"raise") == ("UNAVAILABLE", f"Prediction failed\n{WORKER_ERROR}")
    assert client.predict_refused(b"refuse") == ("NOT_FOUND", f"no such thing\n{WORKER_ERROR}")
    assert client.predict_refused(b"die") == ("INTERNAL", f"Worker died.\n{WORKER_ERROR}")
    assert client.predict_refused(b"x" * 1_000_001)[0] == "RESOURCE_EXHAUSTED"
    unknown = "Model not found: no\norg.pytorch.serve.archive.model.ModelNotFoundException"
    assert client.predict_refused(model_name="no") == ("INTERNAL", unknown)
    assert client.predict_refused(model_version="9")[1].startswith("Model version: 9 does not exist for model: m\n")
    assert client.predict()


def open_inference(client: Client) -> None:
    assert client(OPEN, "ServerReady").ready
    assert client(OPEN, "ModelReady", name="m").ready
    assert list(client(OPEN, "ModelMetadata", name="m").versions) == ["1.0"]
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1.5, 2.0]}}
    answer = client(OPEN, "ModelInfer", model_name="m", id="one", inputs=[tensor])
    assert (answer.id, answer.model_version) == ("one", "1.0")
    assert list(answer.outputs[0].contents.fp32_contents) == [1.5, 2.0]


def administration(client: Client, inference: Client) -> None:
    def ask(name: str, **fields: Any) -> str:
        return client(MANAGEMENT, name, **fields).msg

    two = {"model_name": "m", "model_version": "2.0"}
    registration = {"url": "m-2.0.mar", "initial_workers": 1}
    registered = 'Model "m" Version: 2.0 registered with 1 initial workers'
    assert ask("RegisterModel", synchronous=True, **registration) == registered
    code, text = client.refusal(MANAGEMENT, "RegisterModel", **registration)
    assert (code, text.split("\n")[0]) == ("ABORTED", "Model version 2.0 is already registered for model m")
    assert ask("ScaleWorker", min_worker=2, synchronous=True, **two) == "Workers scaled to 2 for model: m, version: 2.0"
    assert ask("ScaleWorker", min_worker=1, **two) == "Processing worker updates..."
    (described,) = json.loads(ask("DescribeModel", **two))
    assert (described["modelVersion"], described["minWorkers"]) == ("2.0", 1)
    assert [each["modelName"] for each in json.loads(ask("ListModels"))["models"]] == ["m"]
    assert ask("SetDefault", **two) == 'Default version successfully updated for model "m" to "2.0"'
    assert ask("UnregisterModel", model_name="m", model_version="1.0") == 'Model "m" unregistered'
    assert inference.predict_refused(model_version="1.0")[0] == "INTERNAL"
    assert inference.predict(model_version="2.0")


def test_keys_and_tls_guard_both_ports(serve: Any, torchserve: Any) -> None:
    credentials = grpc.ssl_channel_credentials(Path(CERTIFICATE).read_bytes())
    tls = {"enable_grpc_ssl": "true", "certificate_file": CERTIFICATE, "private_key_file": KEY}
    with serve(credentials=credentials, **tls) as connect:
        keys = torchserve.keys()
        assert connect("Inference", keys["inference"]).predict()
        assert connect("Inference", keys["management"]).predict_refused()[0] == "PERMISSION_DENIED"
        assert connect("Inference").refusal(INFERENCE, "Ping")[0] == "PERMISSION_DENIED"
        management = connect("Management", keys["management"])
        assert json.loads(management(MANAGEMENT, "ListModels").msg)["models"]
        disabled = ("PERMISSION_DENIED", "Model API disabled\norg.pytorch.serve.archive.model.ModelException")
        assert management.refusal(MANAGEMENT, "UnregisterModel", model_name="m") == disabled
        assert connect("Management", keys["inference"]).refusal(MANAGEMENT, "ListModels")[0] == "PERMISSION_DENIED"


def test_a_port_in_use_keeps_the_server_from_starting(serve: Any, torchserve: Any) -> None:
    with serve("--disable-token-auth") as connect:
        taken = torchserve.url("Inference gRPC").rpartition(":")[2]
        before = len(torchserve.said())
        torchserve.configure("other.properties", grpc_inference_port=taken)
        (torchserve.folder / "tmp2").mkdir()
        environment, torchserve.env = torchserve.env, torchserve.env | {"TMPDIR": str(torchserve.folder / "tmp2")}
        status, _ = torchserve.run(
            "torchserve", "--start", "--foreground", "--ncs", "--disable-token-auth", "--ts-config", "other.properties"
        )
        torchserve.env = environment
        assert status == 1
        assert "choose another with grpc_inference_port" in torchserve.said()[before:]
        assert connect("Inference").predict()
