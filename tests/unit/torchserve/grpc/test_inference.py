"""The inference services over gRPC."""

import asyncio
import json
import re
import struct

import grpc
import msgspec
import pytest

from penstock.errors import BadOutput, ItemFailed, ModelNotReady, OutOfMemory, Quarantined, QueueFull, WorkerDied
from penstock.serving.grpc import messages as calls
from penstock.torchserve import grpc as services
from penstock.torchserve.grpc import INFERENCE, OPEN_INFERENCE, message_class
from penstock.torchserve.protocol.api import error_body
from support.backend import Call

CLASS = "org.pytorch.serve.http.InternalServerException"


async def test_ping_returns_the_text_of_http(grpc_site, administration):
    async with grpc_site() as ask:
        assert (await ask("Ping")).health == '{\n  "status": "Healthy"\n}'
        administration.is_healthy = False
        assert (await ask("Ping")).health == '{\n  "status": "Unhealthy"\n}'


async def test_inputs_reach_the_model_unchanged_and_metadata_does_not(grpc_site):
    async with grpc_site({"m": lambda call: call.reply(b"\xfe")}) as ask:
        fields = {"model_name": "m", "model_version": "2.0", "input": {"data": b"\xff", "b": b""}}
        answer = await ask("Predictions", metadata=[("x-own", "1")], **fields)
        assert answer.prediction == b"\xfe"
        assert not answer.HasField("status")
        item = ask.backend.calls[0].item
        assert (item.codec, item.headers, len(item.request_id)) == ("torchserve_inputs", None, 36)
        assert msgspec.msgpack.decode(item.payload) == {"data": b"\xff", "b": b""}


async def test_an_answer_in_parts_is_joined_for_predictions(grpc_site):
    async with grpc_site({"m": in_parts}) as ask:
        assert (await ask("Predictions", model_name="m")).prediction == b"onetwothree"


async def test_a_stream_has_one_message_per_part(grpc_site):
    async with grpc_site({"m": in_parts}) as ask:
        assert [part.prediction for part in await ask("StreamPredictions", model_name="m")] == [
            b"one",
            b"two",
            b"three",
        ]


async def test_parts_reach_the_client_before_the_answer_ends(grpc_site):
    async with grpc_site({"m": lambda call: call.reply(b"one", final=False)}) as ask:
        stream = ask.begin("StreamPredictions", model_name="m")
        assert (await stream.read()).prediction == b"one"
        ask.backend.calls[0].reply(b"two")
        assert (await stream.read()).prediction == b"two"
        assert await stream.read() == grpc.aio.EOF


@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "Parameter model_name is required.\nBadRequestException.()"),
        (
            {"model_name": "no"},
            "Model not found: no\norg.pytorch.serve.archive.model.ModelNotFoundException",
        ),
        (
            {"model_name": "m", "model_version": "9"},
            "Model version: 9 does not exist for model: m\n"
            "org.pytorch.serve.archive.model.ModelVersionNotFoundException",
        ),
    ],
)
async def test_an_unknown_model_is_an_internal_error(grpc_site, call, fields, text):
    async with grpc_site({"m": Call.reply}) as ask:
        assert await ask.refusal(call, **fields) == ("INTERNAL", text)


@pytest.mark.parametrize("error", [QueueFull("full"), ModelNotReady("loading")])
async def test_a_model_without_a_free_worker_is_an_internal_error(grpc_site, error):
    async with grpc_site({"m": Call.reply}) as ask:
        ask.backend.refuse = error
        code, text = await ask.refusal("Predictions", model_name="m", model_version="1.0")
        assert code == "INTERNAL"
        assert text.startswith('Model "m" Version 1.0 has no worker to serve inference request. Please use scale')
        assert text.endswith("\nInternalServerException.()")


@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ItemFailed("ValueError: secret"), "UNAVAILABLE", "Prediction failed"),
        (BadOutput("number of batch response mismatched"), "UNAVAILABLE", "number of batch response mismatched"),
        (OutOfMemory("CUDA"), "INTERNAL", "Out of resources"),
        (WorkerDied("exit 1"), "INTERNAL", "Worker died."),
        (Quarantined("poison"), "INVALID_ARGUMENT", "poison"),
    ],
)
async def test_a_failure_in_a_worker_has_the_code_of_its_status(grpc_site, call, error, code, text):
    async with grpc_site({"m": lambda asked: asked.reply(b"", error=error)}) as ask:
        assert await ask.refusal(call, model_name="m") == (code, f"{text}\n{CLASS}")


async def test_every_5xx_leaves_one_line_with_model_request_id_and_cause(grpc_site, caplog):
    detail = "Traceback\nZeroDivisionError: by zero"
    causes = {
        "ZeroDivisionError: by zero": {"error": ItemFailed("Prediction failed", detail=detail)},
        "bad thing": {"status": 513, "body": error_body(513, "InternalServerException", "bad thing")},
        "is not an Open Inference response": {"body": b"[]"},
    }
    async with grpc_site({"m": lambda asked: asked.reply(**{"body": b"", **next(replies)})}) as ask:
        for call in ("Predictions", "StreamPredictions", "ModelInfer"):
            for cause, reply in causes.items():
                if "body" in reply and call != "ModelInfer" and "status" not in reply:
                    continue
                replies = iter([reply])
                caplog.clear()
                await ask.refusal(call, model_name="m")
                (line,) = [r for r in caplog.records if r.name == "penstock.serving"]
                assert "event=request_failed model=m version=default status=5" in line.getMessage()
                assert re.search(cause, line.getMessage())
                assert line.request_id == ask.backend.calls[-1].item.request_id
        caplog.clear()
        replies = iter([{"error": Quarantined("poison")}])
        await ask.refusal("Predictions", model_name="m")
        ask.backend.refuse = WorkerDied("gone")
        await ask.refusal("Predictions", model_name="m")
        assert [r.getMessage().count("status=5") for r in caplog.records] == [1]


@pytest.mark.parametrize(("status", "code"), [(404, "NOT_FOUND"), (513, "INTERNAL"), (429, "RESOURCE_EXHAUSTED")])
async def test_an_error_raised_with_a_status_fails_the_call(grpc_site, status, code):
    body = error_body(status, "InternalServerException", "bad thing")
    async with grpc_site({"m": lambda call: call.reply(body, status=status)}) as ask:
        assert await ask.refusal("Predictions", model_name="m") == (code, f"bad thing\n{CLASS}")


@pytest.mark.parametrize("body", [b"a body", b"[]", b'{"code": 200, "type": "t", "message": "m"}', b"\xff"])
async def test_a_status_set_by_the_handler_is_ignored(grpc_site, body):
    async with grpc_site({"m": lambda call: call.reply(body, status=404)}) as ask:
        assert (await ask("Predictions", model_name="m")).prediction == body


@pytest.mark.parametrize("call", ["Predictions", "StreamPredictions"])
async def test_a_request_whose_client_left_is_cancelled(grpc_site, wait_until, call):
    async with grpc_site({"m": lambda asked: None}) as ask:
        begun = ask.begin(call, model_name="m")
        reading = asyncio.ensure_future(begun.read() if call == "StreamPredictions" else begun)
        await wait_until(lambda: ask.backend.calls)
        begun.cancel()
        await wait_until(lambda: ask.backend.calls[0].cancelled)
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading


async def test_unread_parts_are_bounded(grpc_site, monkeypatch):
    monkeypatch.setattr(calls, "UNREAD_BYTES", 2)
    async with grpc_site({"m": in_parts}) as ask:
        code, text = await ask.refusal("StreamPredictions", model_name="m")
        assert code == "RESOURCE_EXHAUSTED"
        assert text.startswith("the client left more than 2 bytes of its answer unread")
        assert ask.backend.calls[0].cancelled


async def test_one_large_part_does_not_count_as_a_slow_client(grpc_site, monkeypatch):
    monkeypatch.setattr(calls, "UNREAD_BYTES", 4)

    def answer(call):
        call.reply(b"larger than that", final=False)
        call.reply(b"end")

    async with grpc_site({"m": answer}) as ask:
        assert (await ask("Predictions", model_name="m")).prediction == b"larger than thatend"


async def test_parts_are_copied_on_arrival(grpc_site):
    memory = bytearray(b"one")

    def answer(call):
        call.reply(memoryview(memory), final=False)
        memory[:] = b"two"
        call.reply(memoryview(memory))

    async with grpc_site({"m": answer}) as ask:
        assert (await ask("Predictions", model_name="m")).prediction == b"onetwo"


async def test_a_stream_of_requests_is_one_sequence_and_a_failure_does_not_end_it(grpc_site):
    def answer(call):
        if len(asked) == 1:
            call.reply(error=ItemFailed("bad"))
        else:
            call.reply(b"part", final=False)
            call.reply(b"end")
        asked.append(dict(call.item.headers))

    asked = []
    async with grpc_site({"m": answer}) as ask:
        request = message_class(f"{INFERENCE}.PredictionsRequest")
        requests = [request(model_name="m"), request(model_name="m"), request(model_name="m", sequence_id="own")]
        found = [each async for each in ask.begin("StreamPredictions2", requests=requests)]
    id = asked[0][b"ts_request_sequence_id"]
    assert asked == [
        {b"ts_request_sequence_id": id, b"ts_request_sequence_start": b"true"},
        {b"ts_request_sequence_id": id},
        {b"ts_request_sequence_id": b"own"},
    ]
    assert [each.prediction for each in found] == [b"part", b"end", b"", b"part", b"end"]
    assert [each.sequence_id for each in found] == [id.decode()] * 3 + ["own"] * 2
    assert (found[2].status.code, found[2].status.message) == (14, "Prediction failed")


def in_parts(call):
    call.reply(b"one", final=False)
    call.reply(b"two", final=False)
    call.reply(b"three")


# ---- the Open Inference service

NO_MODEL = "org.pytorch.serve.archive.model.ModelNotFoundException"
TENSORS = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-3, 127]),
    "INT16": ("int_contents", [-300, 1]),
    "INT32": ("int_contents", [-(2**31), 1]),
    "INT64": ("int64_contents", [2**40, -1]),
    "UINT8": ("uint_contents", [255, 0]),
    "UINT16": ("uint_contents", [65535, 0]),
    "UINT32": ("uint_contents", [2**32 - 1, 0]),
    "UINT64": ("uint64_contents", [2**64 - 1, 0]),
    "FP32": ("fp32_contents", [1.5, -0.25]),
    "FP64": ("fp64_contents", [0.1, 1e300]),
}


def tensor(datatype, field, values):
    cls = message_class(f"{OPEN_INFERENCE}.ModelInferRequest").InferInputTensor
    contents = message_class(f"{OPEN_INFERENCE}.InferTensorContents")(**{field: values})
    return cls(name="x", datatype=datatype, shape=[len(values)], contents=contents)


def echo(call):
    asked = json.loads(call.body())
    answer = {"id": asked["id"], "model_name": "m", "model_version": "1.0", "outputs": asked["inputs"]}
    call.reply(json.dumps(answer).encode())


def answering(**changes):
    answer = {"id": "i", "model_name": "m", "model_version": "1.0", "outputs": []} | changes
    return lambda call: call.reply(json.dumps(answer).encode())


async def test_a_parameter_that_would_have_no_effect_is_refused(grpc_site):
    request, parameter = (message_class(f"{OPEN_INFERENCE}.{n}") for n in ("ModelInferRequest", "InferParameter"))
    inputs = [tensor("FP32", "fp32_contents", [1.5])]
    async with grpc_site({"m": echo}) as ask:
        own = {"content_type": parameter(string_param="np")}  # the handler's business
        assert (await ask("ModelInfer", model_name="m", inputs=inputs, parameters=own)).model_name == "m"
        best = request.InferRequestedOutputTensor(name="y", parameters={"classification": parameter(int64_param=3)})
        for fields in ({"outputs": [best]}, {"parameters": {"timeout": parameter(int64_param=5)}}):
            code, text = await ask.refusal("ModelInfer", model_name="m", inputs=inputs, **fields)
            assert code == "INVALID_ARGUMENT"
            assert re.match("parameter '(classification|timeout)' is not supported; ", text)


async def test_the_server_is_live_and_ready_and_does_not_serve_metadata(grpc_site):
    async with grpc_site() as ask:
        assert (await ask("ServerLive")).live
        assert (await ask("ServerReady")).ready
        code, text = await ask.refusal("ServerMetadata")
        assert (code, text) == (
            "UNIMPLEMENTED",
            f"Method {OPEN_INFERENCE}.GRPCInferenceService/ServerMetadata is unimplemented",
        )


async def test_a_model_is_ready_when_its_workers_are(grpc_site):
    async with grpc_site({"m": Call.reply}) as ask:
        assert (await ask("ModelReady", name="m", version="1.0")).ready
        ask.backend.is_ready = False
        assert not (await ask("ModelReady", name="m")).ready


@pytest.mark.parametrize("call", ["ModelReady", "ModelMetadata"])
async def test_an_unknown_model_is_not_found(grpc_site, call):
    async with grpc_site({"m": Call.reply}) as ask:
        assert await ask.refusal(call, name="no") == ("NOT_FOUND", f"Model not found: no\n{NO_MODEL}")
        code, text = await ask.refusal(call, name="m", version="9")
        assert (code, text.split("\n")[0]) == ("NOT_FOUND", "Model version: 9 does not exist for model: m")


@pytest.mark.parametrize(
    ("call", "name"), [("ModelReady", "name"), ("ModelMetadata", "model_name"), ("ModelInfer", "model_name")]
)
async def test_a_call_must_name_a_model(grpc_site, call, name):
    async with grpc_site() as ask:
        assert await ask.refusal(call) == ("INTERNAL", f"Parameter {name} is required.\nBadRequestException.()")


async def test_metadata_has_name_and_versions(grpc_site):
    async with grpc_site({"m": Call.reply}) as ask:
        found = await ask("ModelMetadata", name="m")
        assert (found.name, list(found.versions), found.platform, list(found.inputs)) == ("m", ["1.0", "2.0"], "", [])


@pytest.mark.parametrize(("decode", "codec"), [(True, "torchserve"), (False, "torchserve_raw")])
async def test_the_handler_receives_kserve_v2_json(grpc_site, decode, codec):
    async with grpc_site({"m": echo}, decode_input_request=decode) as ask:
        await ask(
            "ModelInfer", model_name="m", model_version="1.0", id="r", inputs=[tensor("FP32", "fp32_contents", [1.5])]
        )
        item = ask.backend.calls[0].item
        assert (item.codec, item.content_type, item.headers) == (codec, "application/json", None)
        inputs = [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.5]}]
        assert json.loads(item.payload) == {"id": "r", "model_name": "m", "inputs": inputs}


@pytest.mark.parametrize("datatype", TENSORS)
async def test_numbers_round_trip(grpc_site, datatype):
    field, values = TENSORS[datatype]
    async with grpc_site({"m": echo}) as ask:
        answer = await ask("ModelInfer", model_name="m", id="r", inputs=[tensor(datatype, field, values)])
        assert (answer.id, answer.model_name, answer.model_version) == ("r", "m", "1.0")
        (output,) = answer.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("x", datatype, [2])
        assert list(getattr(output.contents, field)) == values


async def test_bytes_are_base64_to_the_handler_and_json_to_the_client(grpc_site):
    async with grpc_site({"m": echo}) as ask:
        answer = await ask("ModelInfer", model_name="m", inputs=[tensor("BYTES", "bytes_contents", [b"ab", b"\xff"])])
        assert json.loads(ask.backend.calls[0].item.payload)["inputs"][0]["data"] == ["YWI=", "/w=="]
        assert list(answer.outputs[0].contents.bytes_contents) == [b'"YWI="', b'"/w=="']


async def test_half_floats_have_no_data(grpc_site):
    async with grpc_site({"m": answering()}) as ask:
        await ask("ModelInfer", model_name="m", inputs=[tensor("FP16", "fp32_contents", [1.0])])
        assert "data" not in json.loads(ask.backend.calls[0].item.payload)["inputs"][0]


STANDARD = f"/{services.STANDARD}/ModelInfer"


async def standard(ask, **fields):
    """The answer of the service of this name in the standard, which has the same messages."""
    request, response = (message_class(f"inference.ModelInfer{n}") for n in ("Request", "Response"))
    call = ask.channel.unary_unary(STANDARD, request.SerializeToString, response.FromString)
    return await call(request(**fields), timeout=10)


def raw(*tensors):
    """The fields of a request with raw contents."""
    inputs = [dict(name=f"x{i}", datatype=datatype, shape=shape) for i, (datatype, shape, _) in enumerate(tensors)]
    return {"model_name": "m", "inputs": inputs, "raw_input_contents": [data for *_, data in tensors]}


async def test_the_standard_service_takes_typed_and_raw_contents(grpc_site):
    async with grpc_site({"m": echo}) as ask:
        numbers = struct.pack("<4h", 1, -2, 3, 4)
        found = await standard(ask, **raw(("INT16", [2, 2], numbers), ("BYTES", [1], b"\2\0\0\0hi")))
        asked = json.loads(ask.backend.calls[0].body())
        assert asked["inputs"] == [
            {"name": "x0", "shape": [2, 2], "datatype": "INT16", "data": [1, -2, 3, 4]},
            {"name": "x1", "shape": [1], "datatype": "BYTES", "data": ["aGk="]},
        ]
        assert list(found.outputs[0].contents.int_contents) == [1, -2, 3, 4]
        assert list(found.outputs[1].contents.bytes_contents) == [b"aGk="]  # TorchServe's own service has quotes
        assert (await ask("ModelInfer", **raw(("UINT8", [1], b"\7")))).outputs[0].contents.uint_contents == [7]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (raw(("FP32", [2], b"\0")), "input 'x0': shape [2] of FP32 needs 8 bytes, found 1"),
        (raw(("FP31", [1], b"\0")), "input 'x0': unknown datatype 'FP31'"),
        (raw(("FP32", [-1], b"\0")), "input 'x0': shape [-1] has a negative axis"),
        (raw(("BYTES", [1], b"\xff\xff\xff\xff")), "input 'x0'"),
        ({**raw(), "raw_input_contents": [b""]}, "found 1 raw_input_contents, expected one for each of 0 inputs"),
    ],
)
async def test_invalid_raw_contents_are_refused(grpc_site, fields, text):
    async with grpc_site({"m": echo}) as ask:
        code, found = await ask.refusal("ModelInfer", **fields)
        assert code == "INVALID_ARGUMENT"
        assert found.startswith(text)
        assert not ask.backend.calls


async def test_both_raw_and_typed_contents_are_refused(grpc_site):
    fields = raw(("FP32", [1], bytes(4)))
    fields["inputs"][0]["contents"] = {"fp32_contents": [1]}
    async with grpc_site({"m": echo}) as ask:
        code, text = await ask.refusal("ModelInfer", **fields)
        assert code == "INVALID_ARGUMENT"
        assert text.startswith("input 'x0' has contents, and the request raw_input_contents; send one of them")


def output(**changes):
    return {"outputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]} | changes]}


@pytest.mark.parametrize(
    "changes",
    [
        output(data=[[1]]), output(data=1), output(data=["a"]), output(shape=["a"]), output(datatype="FP16"),
        output(datatype="UINT8", data=[-1]), output(datatype="INT64", data=[2**70]), {"outputs": None},
        {"model_name": 1},
    ],
    ids=str,
)  # fmt: skip
async def test_an_invalid_answer_is_an_internal_error(grpc_site, changes):
    async with grpc_site({"m": answering(**changes)}) as ask:
        code, text = await ask.refusal("ModelInfer", model_name="m")
        assert (code, text.split(":")[0]) == ("INTERNAL", "the handler's response is not an Open Inference response")


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b"\xff", b"[" * 100_000])
async def test_an_answer_that_is_not_an_object_is_an_internal_error(grpc_site, body):
    async with grpc_site({"m": lambda call: call.reply(body)}) as ask:
        assert (await ask.refusal("ModelInfer", model_name="m"))[0] == "INTERNAL"
