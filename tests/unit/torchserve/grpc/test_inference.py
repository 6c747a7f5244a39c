from __future__ import annotations

import asyncio

import grpc
import msgspec
import pytest

from penstock.errors import BadOutput, ItemFailed, ModelNotReady, OutOfMemory, QueueFull, WorkerDied
from penstock.testing.backend import Call
from penstock.torchserve.grpc import calling
from penstock.torchserve.protocol.api import error_body

CLASS = "org.pytorch.serve.http.InternalServerException"


async def test_ping_tells_what_http_tells(grpc_site, administration):
    async with grpc_site() as ask:
        assert (await ask("Ping")).health == '{\n  "status": "Healthy"\n}'
        administration.is_healthy = False
        assert (await ask("Ping")).health == '{\n  "status": "Unhealthy"\n}'


async def test_inputs_reach_the_model_as_they_are_and_nothing_else_does(grpc_site):
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


async def test_every_part_is_a_message_of_a_stream(grpc_site):
    async with grpc_site({"m": in_parts}) as ask:
        assert [part.prediction for part in await ask("StreamPredictions", model_name="m")] == [
            b"one",
            b"two",
            b"three",
        ]


async def test_a_stream_of_one_answer_has_one_message(grpc_site):
    async with grpc_site({"m": lambda call: call.reply(b"all")}) as ask:
        assert [part.prediction for part in await ask("StreamPredictions", model_name="m")] == [b"all"]


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
async def test_a_model_that_is_not_there_is_an_internal_error(grpc_site, call, fields, text):
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
    ],
)
async def test_what_fails_in_a_worker_has_the_code_of_its_status(grpc_site, call, error, code, text):
    async with grpc_site({"m": lambda asked: asked.reply(b"", error=error)}) as ask:
        assert await ask.refusal(call, model_name="m") == (code, f"{text}\n{CLASS}")


@pytest.mark.parametrize(("status", "code"), [(404, "NOT_FOUND"), (513, "INTERNAL"), (429, "RESOURCE_EXHAUSTED")])
async def test_an_error_that_the_handler_raised_with_a_status_is_one(grpc_site, status, code):
    body = error_body(status, "InternalServerException", "bad thing")
    async with grpc_site({"m": lambda call: call.reply(body, status=status)}) as ask:
        assert await ask.refusal("Predictions", model_name="m") == (code, f"bad thing\n{CLASS}")


@pytest.mark.parametrize("body", [b"a body", b"[]", b'{"code": 200, "type": "t", "message": "m"}', b"\xff"])
async def test_a_status_that_the_handler_set_means_nothing_here(grpc_site, body):
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


async def test_a_request_that_was_answered_is_not_cancelled(grpc_site):
    async with grpc_site({"m": in_parts}) as ask:
        await ask("Predictions", model_name="m")
        await ask("StreamPredictions", model_name="m")
        assert [call.cancelled for call in ask.backend.calls] == [False, False]


async def test_parts_that_are_not_taken_are_bounded(grpc_site, monkeypatch):
    monkeypatch.setattr(calling, "BACKLOG_BYTES", 2)
    async with grpc_site({"m": in_parts}) as ask:
        code, text = await ask.refusal("StreamPredictions", model_name="m")
        assert code == "RESOURCE_EXHAUSTED"
        assert text.startswith("the client left more than 2 bytes of its answer unread")
        assert ask.backend.calls[0].cancelled


async def test_a_large_part_that_is_not_alone_is_no_client_that_lags(grpc_site, monkeypatch):
    monkeypatch.setattr(calling, "BACKLOG_BYTES", 4)

    def answer(call):
        call.reply(b"larger than that", final=False)
        call.reply(b"end")

    async with grpc_site({"m": answer}) as ask:
        assert (await ask("Predictions", model_name="m")).prediction == b"larger than thatend"


async def test_parts_are_copied_when_they_come(grpc_site):
    memory = bytearray(b"one")

    def answer(call):
        call.reply(memoryview(memory), final=False)
        memory[:] = b"two"
        call.reply(memoryview(memory))

    async with grpc_site({"m": answer}) as ask:
        assert (await ask("Predictions", model_name="m")).prediction == b"onetwo"


async def test_sequences_are_not_served(grpc_site):
    async with grpc_site() as ask:
        told = ("UNIMPLEMENTED", "sequences are not served: use Predictions or StreamPredictions")
        assert await ask.refusal("StreamPredictions2", model_name="m") == told


def in_parts(call):
    call.reply(b"one", final=False)
    call.reply(b"two", final=False)
    call.reply(b"three")
