"""`inference.GRPCInferenceService` of `penstock serve`, used by tritonclient as it is."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import aio, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from support.waiting import wait_for

TLS = Path(__file__).parents[1] / "tls"
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
SOURCE = """
    import asyncio

    import numpy as np
    import penstock

    def echo(items):
        return items

    def typed_echo(items):
        return items

    class Typed:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2))]
        outputs = [penstock.TensorSpec("y", "FP32", (-1, 2))]

        def predict(self, items):
            return [{"y": item["x"] * 2} for item in items]

    class Parts:
        def predict(self, items):
            for n in range(3):
                yield [{"n": np.array([n])} for _ in items]

    class Rows:
        max_rows = 0

        def predict(self, items):
            return [{"rows": np.full(len(item["x"]), len(items))} for item in items]

    async def waits(items):
        await asyncio.sleep(60)

    @penstock.model(max_sequences=4)
    class Totals:
        def predict(self, items, sequences):
            for item, sequence in zip(items, sequences):
                sequence.state = (sequence.state or 0.0) + float(item["x"].sum())
            return [{"total": np.full((1, 1), s.state, np.float32)} for s in sequences]

    def fails(items):
        raise ValueError("no")

    def fails_late(items):
        yield items
        raise ValueError("no")
"""
MODELS = ("echo", "typed_echo", "Typed", "Parts", "Rows", "waits", "Totals", "fails", "fails_late")


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, *MODELS, "--set", "models.typed_echo.typed_contents=true", ports=PORTS)


def address(server: Any) -> str:
    url: str = server.urls["grpc"]
    return url.removeprefix("grpc://")


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(address(server)) as found:
        yield found


def tensor(name: str, array: Any, datatype: str) -> Any:
    found = triton.InferInput(name, array.shape, datatype)
    found.set_data_from_numpy(array)
    return found


ONE = np.array([[1, 2]], np.float32)


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as raised:
        call()
    return raised.value.status().removeprefix("StatusCode."), raised.value.message()


# ---- every datatype, raw and typed

ARRAYS = {
    "BOOL": np.array([[True, False]]),
    **{f"{kind.upper()}{n}": np.array([[0, 7]], f"{kind}{n}") for kind in ("uint", "int") for n in (8, 16, 32, 64)},
    "FP16": np.array([[0.5, -1]], np.float16),
    "BF16": np.array([[0.5, -1]], ml_dtypes.bfloat16),
    "FP32": np.array([[0.5, np.inf]], np.float32),
    "FP64": np.array([[0.1, -1e300]]),
    "BYTES": np.array([[b"", b"\xff\x00"]], object),
}  # fmt: skip
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_returns_as_it_was_sent(client, datatype):
    array = ARRAYS[datatype]
    answer = client.infer("echo", [tensor("x", array, datatype)], request_id="7")
    assert (answer.get_response().id, answer.get_response().model_version) == ("7", "1")
    expected = "FP32" if datatype == "BF16" else datatype  # NumPy has no BF16: the model receives float32
    assert answer.get_output("x").datatype == expected
    np.testing.assert_array_equal(answer.as_numpy("x"), array.astype(np.float32) if datatype == "BF16" else array)


def typed_request(datatype: str, values: list[Any], shape: list[int] | None = None, model: str = "echo") -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    found = request.inputs.add(name="x", datatype=datatype, shape=shape or [1, len(values)])
    getattr(found.contents, CONTENTS[datatype]).extend(values)
    return request


@pytest.fixture
def call(server: Any) -> Iterator[Callable[[Any], Any]]:
    with grpc.insecure_channel(address(server)) as channel:
        yield channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda found: found if isinstance(found, bytes) else found.SerializeToString(),
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )


@pytest.mark.parametrize("datatype", CONTENTS)
def test_outputs_are_raw_and_typed_contents_only_for_a_model_that_says_so(call, datatype):
    values = ARRAYS[datatype].ravel().tolist()
    answer = call(typed_request(datatype, values))
    assert triton.InferResult(answer).as_numpy("x").ravel().tolist() == values
    assert (len(answer.raw_output_contents), answer.outputs[0].HasField("contents")) == (1, False)
    typed = call(typed_request(datatype, values, model="typed_echo"))
    assert not typed.raw_output_contents
    assert list(getattr(typed.outputs[0].contents, CONTENTS[datatype])) == values
    for each in (answer, typed):
        assert (each.outputs[0].datatype, list(each.outputs[0].shape)) == (datatype, [1, 2])


# ---- what the calls tell


def test_the_server_and_its_models_describe_themselves(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("typed")
    assert client.is_model_ready("typed", "1")
    assert not client.is_model_ready("typed", "2")
    assert not client.is_model_ready("absent")
    server = client.get_server_metadata()
    assert (server.name, server.version != "") == ("penstock", True)
    found = client.get_model_metadata("typed")
    assert [(t.name, t.datatype, list(t.shape)) for t in found.inputs] == [("x", "FP32", [-1, 2])]
    assert [(t.name, t.datatype, list(t.shape)) for t in found.outputs] == [("y", "FP32", [-1, 2])]
    assert (found.name, list(found.versions), found.platform) == ("typed", ["1"], "python")


def test_requested_outputs_are_selected(client):
    answer = client.infer("typed", [tensor("x", ONE, "FP32")], outputs=[triton.InferRequestedOutput("y")])
    np.testing.assert_array_equal(answer.as_numpy("y"), ONE * 2)
    status, text = refused(
        lambda: client.infer("typed", [tensor("x", ONE, "FP32")], outputs=[triton.InferRequestedOutput("z")])
    )
    assert (status, "unknown output 'z'" in text) == ("INVALID_ARGUMENT", True)


def test_calls_share_batches_and_a_large_request_is_split(client):
    results: queue.Queue[Any] = queue.Queue()
    for _ in range(64):
        client.async_infer("rows", [tensor("x", ONE, "FP32")], lambda result, error: results.put((result, error)))
    answers = [results.get(timeout=30) for _ in range(64)]
    assert [error for _, error in answers if error] == []
    assert max(answer.as_numpy("rows")[0] for answer, _ in answers) > 1
    rows = np.arange(400, dtype=np.float32).reshape(200, 2)
    answer = client.infer("typed", [tensor("x", rows, "FP32")])
    np.testing.assert_array_equal(answer.as_numpy("y"), rows * 2)


def test_a_large_tensor_passes_through_shared_memory(client):
    array = np.random.default_rng(1).random((1, 2**20), np.float32)
    np.testing.assert_array_equal(client.infer("echo", [tensor("x", array, "FP32")]).as_numpy("x"), array)


async def test_the_client_for_asyncio_works(server):
    async with aio.InferenceServerClient(address(server)) as client:
        assert await client.is_model_ready("echo")
        answer = await client.infer("typed", [tensor("x", ONE, "FP32")])
        np.testing.assert_array_equal(answer.as_numpy("y"), ONE * 2)


# ---- streams


@pytest.fixture
def stream(client: Any) -> Iterator[Callable[..., list[Any]]]:
    """`stream(n)` waits for n answers of the client's stream: (id, outputs, final), or the text of an error."""
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))

    def take(n: int) -> list[Any]:
        found = []
        for _ in range(n):
            result, error = results.get(timeout=30)
            if error is not None:
                found.append(error.message())
                continue
            answer = result.get_response()
            outputs = {output.name: result.as_numpy(output.name).tolist() for output in answer.outputs}
            found.append((answer.id, outputs, answer.parameters["triton_final_response"].bool_param))
        return found

    yield take
    client.stop_stream()


def test_a_stream_has_every_part_of_every_request(client, stream):
    client.async_stream_infer("parts", [tensor("x", ONE, "FP32")], request_id="a", enable_empty_final_response=True)
    assert stream(4) == [("a", {"n": [n]}, False) for n in range(3)] + [("a", {}, True)]
    client.async_stream_infer("typed", [tensor("x", ONE, "FP32")], request_id="b")
    assert stream(1) == [("b", {"y": [[2, 4]]}, True)]


def test_an_error_is_the_last_response_of_its_request(server):
    def request(model: str, **more: Any) -> Any:
        found = service_pb2.ModelInferRequest(model_name=model, id=model, raw_input_contents=[ONE.tobytes()], **more)
        found.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        return found

    with grpc.insecure_channel(address(server)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests = [request("fails", model_version="1"), request("fails_late"), request("absent")]
        requests[1].parameters["triton_enable_empty_final_response"].bool_param = True
        found = sorted(stub.ModelStreamInfer(iter(requests), timeout=30), key=lambda each: each.infer_response.id)
    told = [
        (r.model_name, r.model_version, r.id, each.error_message, r.parameters["triton_final_response"].bool_param)
        for each in found
        for r in [each.infer_response]
    ]
    assert told == [
        ("absent", "", "absent", "model 'absent' is not found", True),
        ("fails", "1", "fails", "the model raised ValueError", True),
        ("fails_late", "1", "fails_late", "", False),
        ("fails_late", "", "fails_late", "the model raised ValueError", True),
    ]


def test_a_request_that_fails_leaves_its_stream_alone(client, stream):
    client.async_stream_infer("absent", [tensor("x", ONE, "FP32")])
    client.async_stream_infer("fails", [tensor("x", ONE, "FP32")])
    assert sorted(stream(2)) == ["model 'absent' is not found", "the model raised ValueError"]
    client.async_stream_infer("typed", [tensor("x", ONE, "FP32")], request_id="b")
    assert stream(1) == [("b", {"y": [[2, 4]]}, True)]


def test_a_sequence_keeps_its_state(client, stream):
    for n, (start, end) in enumerate([(True, False), (False, False), (False, True)]):
        client.async_stream_infer(
            "totals",
            [tensor("x", ONE, "FP32")],
            sequence_id=5,
            sequence_start=start,
            sequence_end=end,
            request_id=str(n),
        )
    assert stream(3) == [(str(n), {"total": [[3 * (n + 1)]]}, True) for n in range(3)]


def test_a_streaming_model_needs_a_stream(client):
    status, text = refused(lambda: client.infer("parts", [tensor("x", ONE, "FP32")]))
    assert (status, text) == ("UNIMPLEMENTED", "model 'parts' streams its response: call ModelStreamInfer")


# ---- deadlines and cancellation


def in_flight(server: Any) -> float:
    found: float = server.metric("penstock_requests_in_flight", model="waits")
    return found


def test_a_deadline_ends_the_call_and_the_request(server, client):
    status, _ = refused(lambda: client.infer("waits", [tensor("x", ONE, "FP32")], client_timeout=0.2))
    assert status == "DEADLINE_EXCEEDED"
    wait_for(lambda: in_flight(server) == 0)


def test_a_cancelled_call_is_cancelled_at_the_server(server, client):
    call = client.async_infer("waits", [tensor("x", ONE, "FP32")], lambda result, error: None)
    wait_for(lambda: in_flight(server) == 1)
    call.cancel()
    wait_for(lambda: in_flight(server) == 0)


def test_a_client_that_leaves_its_stream_cancels_its_requests(server):
    with triton.InferenceServerClient(address(server)) as client:
        client.start_stream(callback=lambda result, error: None)
        for _ in range(5):
            client.async_stream_infer("waits", [tensor("x", ONE, "FP32")])
        wait_for(lambda: in_flight(server) == 5)
        client.stop_stream(cancel_requests=True)
    wait_for(lambda: in_flight(server) == 0)


# ---- bad input


def bad(**fields: Any) -> Any:
    request = service_pb2.ModelInferRequest(**{"model_name": "echo", **fields})
    return request


def raw_request(shape: list[int], *raw: bytes, datatype: str = "FP32", **fields: Any) -> Any:
    request = bad(**fields)
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    request.raw_input_contents.extend(raw)
    return request


def both() -> Any:
    request = typed_request("FP32", [1.0])
    request.raw_input_contents.append(bytes(4))
    return request


def with_parameter(name: str, **value: Any) -> Any:
    request = raw_request([1], bytes(4))
    request.parameters[name].CopyFrom(service_pb2.InferParameter(**value))
    return request


BAD = {
    "no model": (bad(model_name=""), "NOT_FOUND", "model '' is not found"),
    "unknown model": (raw_request([1], bytes(4), model_name="nope"), "NOT_FOUND", "model 'nope' is not found"),
    "unknown version": (raw_request([1], bytes(4), model_version="9"), "NOT_FOUND", "version '9' of model"),
    "no inputs": (bad(), "INVALID_ARGUMENT", "inputs is empty"),
    "raw too short": (raw_request([2], bytes(7)), "INVALID_ARGUMENT", "shape [2] of FP32 needs 8 bytes, found 7"),
    "raw too long": (raw_request([2], bytes(9)), "INVALID_ARGUMENT", "shape [2] of FP32 needs 8 bytes, found 9"),
    "raw missing": (raw_request([2]), "INVALID_ARGUMENT", "needs 2 elements, found 0"),
    "too many raw": (raw_request([1], bytes(4), bytes(4)), "INVALID_ARGUMENT", "found 2 raw_input_contents for 1"),
    "raw and typed": (both(), "INVALID_ARGUMENT", "found contents of an input and raw_input_contents"),
    "datatype": (raw_request([1], bytes(4), datatype="FP8"), "INVALID_ARGUMENT", "unknown datatype 'FP8'"),
    "negative": (raw_request([-1, 4], bytes(4)), "INVALID_ARGUMENT", "has a negative axis"),
    "overflow": (raw_request([2**62, 2**62], bytes(4)), "INVALID_ARGUMENT", "needs 85070591730234615865843651"),
    "no axes": (raw_request([], bytes(4)), "INVALID_ARGUMENT", "has 0 axes"),
    "many axes": (raw_request([1] * 40, bytes(4)), "INVALID_ARGUMENT", "has 40 axes"),
    "int range": (typed_request("INT8", [128]), "INVALID_ARGUMENT", "a value is not in the range of INT8"),
    "elements": (typed_request("FP32", [1.0], [3]), "INVALID_ARGUMENT", "needs 3 elements, found 1"),
    "flag": (with_parameter("timeout", bool_param=True), "INVALID_ARGUMENT", "parameter 'timeout' is True"),
    "no value": (with_parameter("colour"), "INVALID_ARGUMENT", "parameter 'colour' has no value"),
    "priority": (with_parameter("priority", string_param="x"), "INVALID_ARGUMENT", "parameter 'priority' is 'x'"),
    "timeout": (with_parameter("timeout", int64_param=-1), "INVALID_ARGUMENT", "parameter 'timeout' is -1"),
    "garbage": (b"\xff\xff\xff\xff", "INVALID_ARGUMENT", "the message is not a valid inference.ModelInferRequest"),
    "cut off": (raw_request([2], bytes(8)).SerializeToString()[:-3], "INVALID_ARGUMENT", "the message is not valid"),
    "large garbage": (b"\x3a\xff\xff\xff\x7f" + bytes(100_000), "INVALID_ARGUMENT", "the message is not a valid"),
    "too large": (bytes(65 * 2**20), "RESOURCE_EXHAUSTED", "larger than max"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_clear_error(call, name):
    request, status, text = BAD[name]
    with pytest.raises(grpc.RpcError) as raised:
        call(request)
    assert raised.value.code().name == status
    assert text in raised.value.details() or name == "cut off"
    assert call(typed_request("FP32", [1.0])).outputs


def test_a_typed_value_in_the_wrong_field_is_named(call):
    request = service_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.int_contents.append(1)
    with pytest.raises(grpc.RpcError) as raised:
        call(request)
    assert raised.value.details() == "tensor 'x': FP32 belongs in fp32_contents, found int_contents"
    request.inputs[0].datatype = "FP16"
    with pytest.raises(grpc.RpcError) as raised:
        call(request)
    assert raised.value.details() == "tensor 'x': FP16 has no typed contents; send raw_input_contents"


def test_compressed_messages_are_read(client):
    for algorithm in ("gzip", "deflate"):
        answer = client.infer("typed", [tensor("x", ONE, "FP32")], compression_algorithm=algorithm)
        np.testing.assert_array_equal(answer.as_numpy("y"), ONE * 2)


# ---- tokens, TLS, ports


def test_a_token_opens_everything_but_health(serve, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")
    server = serve(SOURCE, "echo", "--token-file", "tokens", ports=PORTS)
    with grpc.insecure_channel(address(server)) as channel:
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"") == b"\x08\x01"
        assert health(b"\x0a\x1e" + b"inference.GRPCInferenceService") == b"\x08\x01"
        reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            for begin in (lambda m: live(b"", metadata=m), lambda m: next(reflect(iter([b"\x3a\x00"]), metadata=m))):
                with pytest.raises(grpc.RpcError) as raised:
                    begin(metadata)
                assert raised.value.code().name == "UNAUTHENTICATED"
        known = (("authorization", "Bearer secret"),)
        assert live(b"", metadata=known) == b"\x08\x01"
        services = next(reflect(iter([b"\x3a\x00"]), metadata=known))
        assert b"inference.GRPCInferenceService" in services


def test_tls_and_client_certificates_guard_the_listener(serve):
    files = [f"--tls-cert={TLS / 'cert.pem'}", f"--tls-key={TLS / 'key.pem'}"]
    server = serve(SOURCE, "Typed", *files, "--set", f"server.tls_client_ca={TLS / 'cert.pem'}", ports=PORTS)
    where = server.urls["grpc"].removeprefix("grpcs://")
    chain, key = (TLS / "cert.pem").read_bytes(), (TLS / "key.pem").read_bytes()
    options = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(where, grpc.ssl_channel_credentials(chain, key, chain), options) as channel:
        assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"") == b"\x08\x01"
    with (
        grpc.secure_channel(where, grpc.ssl_channel_credentials(chain), options) as channel,
        pytest.raises(grpc.RpcError),
    ):
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=10)


def test_a_second_server_takes_a_free_port_and_zero_means_none(serve, server):
    assert "grpc" not in serve(SOURCE, "echo").urls
    second = serve(SOURCE, "echo", ports=PORTS)
    with triton.InferenceServerClient(address(second)) as client:
        assert client.is_server_live()
    port = address(server).rpartition(":")[2]
    with pytest.raises(RuntimeError, match=r"server\.grpc_port"):
        serve(SOURCE, "echo", ports=[*PORTS, "--set", f"server.grpc_port={port}"])


def test_an_open_stream_does_not_hold_up_the_shutdown(serve):
    server = serve(SOURCE, "Typed", ports=PORTS)
    results: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address(server)) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("typed", [tensor("x", ONE, "FP32")])
        assert results.get(timeout=30)[1] is None
        began = time.monotonic()
        assert server.stop()[0] == 0
        assert time.monotonic() - began < 10  # drain_s is 30
        assert results.get(timeout=30)[1].status() == "StatusCode.UNAVAILABLE"


def test_accepted_calls_are_answered_at_shutdown(serve):
    source = "import time\ndef slow(items):\n    time.sleep(1)\n    return items\n"
    server = serve(source, "slow", ports=PORTS)
    results: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(address(server)) as client:
        client.async_infer("slow", [tensor("x", ONE, "FP32")], lambda result, error: results.put((result, error)))
        wait_for(lambda: server.metric("penstock_requests_in_flight", model="slow") == 1)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        result, error = results.get(timeout=30)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("x"), ONE)
        stopping.join()
