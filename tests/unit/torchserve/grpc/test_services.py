"""Token checks on every gRPC call, the status and text of errors, and the wire format of TorchServe's services."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from penstock.config.schema import LimitsConfig
from penstock.serving.grpc.listener import GrpcLimits
from penstock.serving.grpc.messages import code_of
from penstock.torchserve import grpc as services
from penstock.torchserve.admin.files import Tokens
from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.grpc import make_grpc_listener
from penstock.torchserve.protocol.api import STATUS_OF, ApiError
from support.backend import Call, FakeBackend

GUARDS = {
    "Ping": "inference", "Predictions": "inference", "StreamPredictions": "inference",
    "StreamPredictions2": "inference", "ServerLive": "inference", "ServerReady": "inference",
    "ServerMetadata": "inference", "ModelReady": "inference", "ModelMetadata": "inference", "ModelInfer": "inference",
    "DescribeModel": "management", "ListModels": "management", "RegisterModel": "management",
    "ScaleWorker": "management", "SetDefault": "management", "UnregisterModel": "management",
}  # fmt: skip
REFUSED = (
    "PERMISSION_DENIED",
    "Token Authorization failed. Token either incorrect, expired, or not provided correctly",
)
PASSED = ("OK", "")
HOUR_S = 3600.0


@pytest.fixture
def guarded(grpc_site, administration, tmp_path, monkeypatch):
    """The listener, the keys of its groups, and a settable clock."""
    clock = [datetime(2026, 1, 1, tzinfo=UTC)]
    tokens = Tokens(tmp_path, HOUR_S, lambda: clock[0])
    tokens.publish()
    monkeypatch.setattr(administration, "check_token", tokens.check)
    keys = {group: each["key"] for group, each in json.loads(tokens.file.read_text()).items()}
    return grpc_site, keys, clock


async def outcome(ask, call, *authorization, requests=None):
    """(status, text) of a call with these authorization headers."""
    try:
        await ask(call, metadata=[("authorization", each) for each in authorization], requests=requests)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details()
    return PASSED


def test_the_table_names_every_call_that_needs_a_key(grpc_calls):
    assert set(GUARDS) == set(grpc_calls) - {"Check", "Watch"}


@pytest.mark.parametrize("model_api", [True, False])
@pytest.mark.parametrize("call", GUARDS)
async def test_every_call_needs_the_key_of_its_group(guarded, call, model_api):
    site, keys, clock = guarded
    key = keys[GUARDS[call]]
    other = keys["management" if GUARDS[call] == "inference" else "inference"]
    async with site({"m": Call.reply}, enable_model_api=model_api) as ask:
        wrong = ["", key, f"Bearer {key}x", f"Bearer {key[:-1]}", f"Basic {key}", f"bearer {key}", f"Bearer  {key}"]
        wrong += ["Bearer", f"Bearer {other}", f"Bearer {keys['API']}"]
        for authorization in wrong:
            assert await outcome(ask, call, authorization) == REFUSED, authorization
        assert await outcome(ask, call) == REFUSED
        assert await outcome(ask, call, "Bearer wrong", f"Bearer {key}") == REFUSED
        assert (ask.administration.asked, ask.backend.calls) == ([], [])
        assert await outcome(ask, call, f"Bearer {key}", requests=()) != REFUSED
        clock[0] += timedelta(seconds=HOUR_S)
        assert await outcome(ask, call, f"Bearer {key}") == REFUSED


async def test_a_probe_needs_no_key(guarded):
    site, _, _ = guarded
    async with site() as ask:
        assert await outcome(ask, "Check") == PASSED


async def test_a_call_without_the_key_is_refused_before_its_request_is_read(guarded):
    site, _, _ = guarded
    async with site(max_request_bytes=1000) as ask:
        assert await ask.refusal("Predictions", raw=b"x" * 10_000) == REFUSED


async def test_an_undecodable_request_is_refused(guarded):
    site, keys, _ = guarded
    metadata = [("authorization", f"Bearer {keys['inference']}")]
    async with site(max_request_bytes=1000) as ask:
        for call in ("Predictions", "StreamPredictions"):
            message = (
                "INVALID_ARGUMENT",
                "the request is not a valid org.pytorch.serve.grpc.inference.PredictionsRequest",
            )
            assert await ask.refusal(call, metadata, raw=b"\xff\xff") == message
        code, _text = await ask.refusal("Predictions", metadata, raw=b"x" * 10_000)
        assert code == "RESOURCE_EXHAUSTED"


async def test_a_listener_serves_only_its_groups(grpc_site):
    async with grpc_site(groups=frozenset({"management"})) as ask:
        assert (await ask.refusal("Ping"))[0] == "UNIMPLEMENTED"
        assert (await ask.refusal("ServerLive"))[0] == "UNIMPLEMENTED"
    async with grpc_site(groups=frozenset({"inference"})) as ask:
        assert (await ask.refusal("ListModels"))[0] == "UNIMPLEMENTED"


async def test_health_reports_the_state_of_the_models(grpc_site, administration):
    async with grpc_site() as ask:
        name = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
        assert ((await ask("Check")).status, (await ask("Check", service=name)).status) == (1, 1)
        administration.is_healthy = False
        assert ((await ask("Check")).status, (await ask("Check", service=name)).status) == (2, 2)
        assert await ask.refusal("Check", service="no") == ("NOT_FOUND", "there is no service 'no'")
        assert (await ask.refusal("Watch"))[0] == "UNIMPLEMENTED"


# ---- errors


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"), (401, "UNAUTHENTICATED"), (403, "PERMISSION_DENIED"), (404, "NOT_FOUND"),
        (405, "FAILED_PRECONDITION"), (408, "FAILED_PRECONDITION"), (409, "ABORTED"), (413, "RESOURCE_EXHAUSTED"),
        (416, "OUT_OF_RANGE"), (429, "RESOURCE_EXHAUSTED"), (499, "CANCELLED"), (500, "INTERNAL"),
        (501, "UNIMPLEMENTED"), (503, "UNAVAILABLE"), (504, "DEADLINE_EXCEEDED"), (507, "INTERNAL"), (599, "INTERNAL"),
    ],
)  # fmt: skip
def test_each_status_has_its_code(status, code):
    assert code_of(status).name == code


@pytest.mark.parametrize(
    ("kind", "code", "name"),
    [
        ("BadRequestException", "INVALID_ARGUMENT", "org.pytorch.serve.http.BadRequestException"),
        ("ConflictStatusException", "ABORTED", "org.pytorch.serve.http.ConflictStatusException"),
        ("ModelNotFoundException", "NOT_FOUND", "org.pytorch.serve.archive.model.ModelNotFoundException"),
        ("DownloadArchiveException", "INVALID_ARGUMENT", "org.pytorch.serve.archive.DownloadArchiveException"),
        ("IllegalArgumentException", "PERMISSION_DENIED", "java.lang.IllegalArgumentException"),
    ],
)
def test_a_management_error_names_its_java_class(kind, code, name):
    found = services.management_error(ApiError(kind, "what happened"))
    assert (found.code.name, found.details) == (code, f"what happened\n{name}")


@pytest.mark.parametrize("kind", STATUS_OF)
def test_a_prediction_without_a_worker_is_internal(kind):
    found = services.submit_error(ApiError(kind, "why"))
    named = {
        "ModelNotFoundException": "org.pytorch.serve.archive.model.ModelNotFoundException",
        "ModelVersionNotFoundException": "org.pytorch.serve.archive.model.ModelVersionNotFoundException",
    }.get(kind, "InternalServerException.()")
    assert (found.code.name, found.details) == ("INTERNAL", f"why\n{named}")


# ---- messages and services

# What clients that were made from TorchServe's own protos send and expect.
FIELDS = {
    "inference.PredictionsRequest": "1 model_name string, 2 model_version string, 3 input map, 4 sequence_id string",
    "inference.PredictionResponse": "1 prediction bytes, 2 sequence_id string, 3 status google.rpc.Status",
    "inference.TorchServeHealthResponse": "1 health string",
    "management.ManagementResponse": "1 msg string",
    "management.DescribeModelRequest": "1 model_name string, 2 model_version string, 3 customized bool",
    "management.ListModelsRequest": "1 limit int32, 2 next_page_token int32",
    "management.RegisterModelRequest": "1 batch_size int32, 2 handler string, 3 initial_workers int32, "
    "4 max_batch_delay int32, 5 model_name string, 6 response_timeout int32, 7 runtime string, 8 synchronous bool, "
    "9 url string, 10 s3_sse_kms bool, 11 startup_timeout int32",
    "management.ScaleWorkerRequest": "1 model_name string, 2 model_version string, 3 max_worker int32, "
    "4 min_worker int32, 5 number_gpu int32, 6 synchronous bool, 7 timeout int32",
    "management.SetDefaultRequest": "1 model_name string, 2 model_version string",
    "management.UnregisterModelRequest": "1 model_name string, 2 model_version string",
    "openinference.ServerLiveResponse": "1 live bool",
    "openinference.ServerReadyResponse": "1 ready bool",
    "openinference.ModelReadyRequest": "1 name string, 2 version string",
    "openinference.ModelReadyResponse": "1 ready bool",
    "openinference.ServerMetadataResponse": "1 name string, 2 version string, 3* extensions string",
    "openinference.ModelMetadataRequest": "1 name string, 2 version string",
    "openinference.ModelMetadataResponse": "1 name string, 2* versions string, 3 platform string, "
    "4* inputs ModelMetadataResponse.TensorMetadata, 5* outputs ModelMetadataResponse.TensorMetadata",
    "openinference.ModelMetadataResponse.TensorMetadata": "1 name string, 2 datatype string, 3* shape int64",
    "openinference.ModelInferRequest": "1 model_name string, 2 model_version string, 3 id string, 4 parameters map, "
    "5* inputs ModelInferRequest.InferInputTensor, 6* outputs ModelInferRequest.InferRequestedOutputTensor, "
    "7* raw_input_contents bytes",
    "openinference.ModelInferRequest.InferInputTensor": "1 name string, 2 datatype string, 3* shape int64, "
    "4 parameters map, 5 contents InferTensorContents",
    "openinference.ModelInferRequest.InferRequestedOutputTensor": "1 name string, 2 parameters map",
    "openinference.ModelInferResponse": "1 model_name string, 2 model_version string, 3 id string, 4 parameters map, "
    "5* outputs ModelInferResponse.InferOutputTensor, 6* raw_output_contents bytes",
    "openinference.ModelInferResponse.InferOutputTensor": "1 name string, 2 datatype string, 3* shape int64, "
    "4 parameters map, 5 contents InferTensorContents",
    "openinference.InferParameter": "1 bool_param bool, 2 int64_param int64, 3 string_param string",
    "openinference.InferTensorContents": "1* bool_contents bool, 2* int_contents int32, 3* int64_contents int64, "
    "4* uint_contents uint32, 5* uint64_contents uint64, 6* fp32_contents float, 7* fp64_contents double, "
    "8* bytes_contents bytes",
}
CALLS = {
    "inference.InferenceAPIsService": "Ping Predictions StreamPredictions> >StreamPredictions2>",
    "management.ManagementAPIsService": "DescribeModel ListModels RegisterModel ScaleWorker SetDefault UnregisterModel",
    "openinference.GRPCInferenceService": "ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer",
}  # > before a name: requests in a stream, > behind it: answers in a stream
TYPES = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32",
}  # fmt: skip


def kind(field):
    inner = field.message_type
    if inner is None:
        return TYPES[field.type]
    if inner.GetOptions().map_entry:
        return "map"
    return inner.full_name.removeprefix(f"{services.OPEN_INFERENCE}.")


def repeated(field):
    return "*" if field.is_repeated and kind(field) != "map" else ""


@pytest.mark.parametrize("name", FIELDS)
def test_messages_have_torchserves_names_and_numbers(name):
    found = services.message_class(f"org.pytorch.serve.grpc.{name}").DESCRIPTOR
    message = [f"{field.number}{repeated(field)} {field.name} {kind(field)}" for field in found.fields]
    assert ", ".join(message) == FIELDS[name]


def test_maps_hold_bytes_and_parameters():
    assert (
        services.message_class(f"{services.INFERENCE}.PredictionsRequest")(input={"a": b"\xff"}).input["a"] == b"\xff"
    )
    request = services.message_class(f"{services.OPEN_INFERENCE}.ModelInferRequest")()
    request.parameters["k"].int64_param = 2**40
    assert request.parameters["k"].WhichOneof("parameter_choice") == "int64_param"


@pytest.mark.parametrize("name", CALLS)
def test_services_have_torchserves_calls(name):
    found = services.service_descriptor(f"org.pytorch.serve.grpc.{name}").methods
    message = [">" * each.client_streaming + each.name + ">" * each.server_streaming for each in found]
    assert " ".join(message) == CALLS[name]


def test_a_prediction_has_torchserves_wire_format():
    request = services.message_class(f"{services.INFERENCE}.PredictionsRequest")
    wire = b"\x0a\x01m\x12\x011\x1a\x09\x0a\x04data\x12\x01x"
    assert request(model_name="m", model_version="1", input={"data": b"x"}).SerializeToString() == wire
    assert dict(request.FromString(wire).input) == {"data": b"x"}


LIMITS = GrpcLimits(LimitsConfig(max_body_bytes=1000, max_connections=10))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
INFERENCE = ListenerConfig(frozenset({"inference"}), Properties())


async def ping(channel, timeout_s=10.0):
    try:
        call = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping")
        return await call(b"", timeout=timeout_s, wait_for_ready=True)
    finally:
        await channel.close()


async def test_a_unix_socket_is_removed_at_the_end(administration, tmp_path):
    path = tmp_path / "s"
    server = make_grpc_listener(FakeBackend(), administration, INFERENCE, LIMITS)
    await server.start(f"unix:{path}", 0, "grpc_inference_address")
    try:
        assert b"Healthy" in await ping(grpc.aio.insecure_channel(f"unix:{path}"))
    finally:
        await server.close(1.0)
    assert not path.exists()


async def test_old_connections_are_closed(administration):
    limits = GrpcLimits(LIMITS.limits, max_age_ms=100, max_age_grace_ms=100)
    server = make_grpc_listener(FakeBackend({"m": lambda call: None}), administration, INFERENCE, limits)
    port = await server.start("127.0.0.1", 0, "a_key")
    try:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        call = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"\x0a\x01m", timeout=10.0)
        assert raised.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED
        await channel.close()
    finally:
        await server.close(1.0)


@pytest.mark.parametrize(
    ("limit", "sent", "word"),
    [("header_timeout_s", b"", b"timeout"), ("idle_timeout_s", PREFACE, b"connection idle")],
)
async def test_a_silent_connection_is_closed(administration, limit, sent, word):
    limits = GrpcLimits(LimitsConfig(**{limit: 0.1}))
    server = make_grpc_listener(FakeBackend(), administration, INFERENCE, limits)
    port = await server.start("127.0.0.1", 0, "a_key")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert word in await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        await writer.wait_closed()
    finally:
        await server.close(1.0)


async def test_reflection_lists_the_services(grpc_site):
    async with grpc_site(ts_open_inference_protocol=False) as ask:

        def names():
            with grpc.insecure_channel(f"127.0.0.1:{ask.port}") as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                found = database.FindFileContainingSymbol("org.pytorch.serve.grpc.inference.PredictionsRequest")
                return set(database.get_services()), found.name

        services, file = await asyncio.to_thread(names)
        assert file == "inference.proto"
        assert services == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "org.pytorch.serve.grpc.inference.InferenceAPIsService",
            "org.pytorch.serve.grpc.management.ManagementAPIsService",
        }
