from __future__ import annotations

import json

import pytest

from penstock.testing.backend import Call
from penstock.torchserve.grpc.messages import OPEN_INFERENCE, message

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
    cls = message(f"{OPEN_INFERENCE}.ModelInferRequest").InferInputTensor
    contents = message(f"{OPEN_INFERENCE}.InferTensorContents")(**{field: values})
    return cls(name="x", datatype=datatype, shape=[len(values)], contents=contents)


def echo(call):
    asked = json.loads(call.body())
    answer = {"id": asked["id"], "model_name": "m", "model_version": "1.0", "outputs": asked["inputs"]}
    call.reply(json.dumps(answer).encode())


def answering(**changes):
    answer = {"id": "i", "model_name": "m", "model_version": "1.0", "outputs": []} | changes
    return lambda call: call.reply(json.dumps(answer).encode())


async def test_the_server_lives_and_is_ready_and_its_metadata_is_not_served(grpc_site):
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
async def test_a_model_that_is_not_there_is_not_found(grpc_site, call):
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


async def test_metadata_are_name_and_versions(grpc_site):
    async with grpc_site({"m": Call.reply}) as ask:
        found = await ask("ModelMetadata", name="m")
        assert (found.name, list(found.versions), found.platform, list(found.inputs)) == ("m", ["1.0", "2.0"], "", [])


@pytest.mark.parametrize("codec", ["torchserve", "torchserve_raw"])
async def test_the_handler_gets_the_json_of_the_second_protocol(grpc_site, codec):
    async with grpc_site({"m": echo}, codec=codec) as ask:
        await ask(
            "ModelInfer", model_name="m", model_version="1.0", id="r", inputs=[tensor("FP32", "fp32_contents", [1.5])]
        )
        item = ask.backend.calls[0].item
        assert (item.codec, item.content_type, item.headers) == (codec, "application/json", None)
        inputs = [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.5]}]
        assert json.loads(item.payload) == {"id": "r", "model_name": "m", "inputs": inputs}


@pytest.mark.parametrize("datatype", TENSORS)
async def test_numbers_go_there_and_back(grpc_site, datatype):
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


async def test_raw_contents_are_refused(grpc_site):
    async with grpc_site({"m": echo}) as ask:
        code, text = await ask.refusal("ModelInfer", model_name="m", raw_input_contents=[b"\0"])
        assert (code, text) == ("INVALID_ARGUMENT", "found raw_input_contents, expected the contents of each input")
        assert not ask.backend.calls


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
async def test_an_answer_that_is_no_response_is_an_internal_error(grpc_site, changes):
    async with grpc_site({"m": answering(**changes)}) as ask:
        code, text = await ask.refusal("ModelInfer", model_name="m")
        assert (code, text.split(":")[0]) == ("INTERNAL", "the handler's answer is no Open Inference response")


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b"\xff", b"[" * 100_000])
async def test_an_answer_that_is_no_object_is_an_internal_error(grpc_site, body):
    async with grpc_site({"m": lambda call: call.reply(body)}) as ask:
        assert (await ask.refusal("ModelInfer", model_name="m"))[0] == "INTERNAL"


async def test_the_service_is_there_only_when_it_is_switched_on(grpc_site):
    async with grpc_site(open_inference=False) as ask:
        assert (await ask.refusal("ServerLive"))[0] == "UNIMPLEMENTED"
