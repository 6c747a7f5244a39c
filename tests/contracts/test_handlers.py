"""TorchServe's contract with handlers in a worker process: their inputs, results and errors."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.worker.spec import Wrapped
from penstock.errors import (
    BadOutput,
    BadRequest,
    ItemFailed,
    LoadFailed,
    LoadOutOfMemory,
    OutOfMemory,
    RunTimeout,
    WorkerDied,
)
from penstock.plugins import resolve
from penstock.types import BatchPart, Item, ItemResult
from support.transports import TransportHarness

HEADERS = [(b"X-Foo", b"bar"), (b"explain", b"False")]

SCRIPTED = """
import json, os, sys
from ts.utils.util import PredictionException

print("the handler is loaded")
calls = []


def handle(data, context):
    calls.append(data)
    if data is None:
        return None
    text = data[0].get("do", b"").decode()
    if text:
        namespace = {"data": data, "context": context, "raised": raised}
        exec("def run():\\n    " + text.replace("\\n", "\\n    "), globals() | namespace, namespace)
        return namespace["run"]()
    return [describe(row) for row in data]


def raised(error):
    raise error


def describe(row):
    return {name: [type(value).__name__, repr(value)] for name, value in row.items()}
"""


def handler_desk(folder: Path, source: str, *, run_timeout_s: float = 60.0, **setup: Any) -> TransportHarness:
    """A worker process with one handler."""
    (folder / "my_handler.py").write_text(source)
    said = {"model_name": "m", "model_dir": str(folder), "handler": "my_handler.py", "batch_size": 8, **setup}

    def make(spec: Any, pool: Any) -> Any:
        spec.wants_headers = spec.capture_output = True
        return resolve("transport", "process")(spec, slots=1, devices=("cpu",), pool=pool, reply_bytes=2**20)

    again = said.get("retry_split", False)
    target = Wrapped(None, "penstock.torchserve.handlers.handler:HandlerModel", {"setup": said})
    return TransportHarness(make, target, retry_split=again, idempotent=again, run_timeout_s=run_timeout_s)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[TransportHarness]:
    async with handler_desk(tmp_path, SCRIPTED) as found:
        await found.up()
        yield found


def request(body: Any = b"", content_type: str = "", codec: str = "torchserve", **more: Any) -> Item:
    return Item(
        body, codec, content_type, request_id=more.pop("id", "id-0"), headers=[*HEADERS, *more.pop("headers", [])]
    )


def does(text: str) -> Item:
    """A request that has the scripted handler run `text`."""
    return request(msgspec.msgpack.encode({"do": text.encode()}), codec="torchserve_inputs")


async def results(harness: TransportHarness, *items: Item) -> list[ItemResult | None]:
    part = await harness.final(harness.post(list(items)))
    assert part.error is None, part.error
    return part.results


async def seen(harness: TransportHarness, item: Item) -> Any:
    """Name to type and value of what the handler received."""
    (result,) = await results(harness, item)
    assert result is not None
    assert result.error is None, result.error
    return {name: tuple(found) for name, found in json.loads(bytes(result.body)).items()}


def multipart(*parts: str) -> bytes:
    return "".join(f"--B\r\nContent-Disposition: form-data; name={part}\r\n" for part in parts).encode() + b"--B--\r\n"


FORM = "multipart/form-data; boundary=B"
BYTES = "bytearray"

RECEIVED = {
    "any body": (request(b"\xff", "image/png"), {"body": (BYTES, r"bytearray(b'\xff')")}),
    "an empty GET": (request(), {"body": (BYTES, "bytearray(b'')")}),
    "JSON": (request(b'{"a": [1, NaN]}', "application/json; charset=x"), {"body": ("dict", "{'a': [1, nan]}")}),
    "no JSON": (request(b"{", "application/json"), {"body": (BYTES, "bytearray(b'{')")}),
    "text": (request("ü".encode(), "text/csv"), {"body": ("str", "'ü'")}),
    "JSON raw": (request(b"1", "application/json", "torchserve_raw"), {"body": (BYTES, "bytearray(b'1')")}),
    "curl -d": (request(b'{"a":1}', "application/x-www-form-urlencoded"), {'{"a":1}': (BYTES, "bytearray(b'')")}),
    "curl -F": (request(multipart("data; filename=x\r\n\r\nhi"), FORM), {"data": (BYTES, "bytearray(b'hi')")}),
    "the last wins": (request(multipart("a\r\n\r\n1", "a\r\n\r\n2"), FORM), {"a": (BYTES, "bytearray(b'2')")}),
    "gRPC": (
        request(msgspec.msgpack.encode({"data": b"[1]"}), codec="torchserve_inputs"),
        {"data": (BYTES, "bytearray(b'[1]')")},
    ),
    "a query": (
        request(b"x", headers=[(b":query", b"a=1")]),
        {"a": (BYTES, "bytearray(b'1')"), "body": (BYTES, "bytearray(b'x')")},
    ),
}


async def test_what_a_handler_receives(harness):
    for name, (item, expected) in RECEIVED.items():
        expected = {key: (kind, text.replace("\r\n", "")) for key, (kind, text) in expected.items()}
        assert await seen(harness, item) == expected, name
    large = await seen(harness, request(b"x" * 300_000))  # from shared memory, and the handler's own
    assert large["body"] == (BYTES, repr(bytearray(b"x" * 300_000)))


async def test_a_request_that_cannot_be_read_fails_alone(harness):
    bad, fine = await results(harness, request(b"x", "multipart/form-data"), request(b"1", "application/json"))
    assert type(bad.error) is BadRequest
    assert fine.error is None


RETURNED = {
    "[b'raw']": (200, b"raw"),
    "[bytearray(b'raw')]": (200, b"raw"),
    "['gr\\u00fcn']": (200, "grün".encode()),
    "[{'a': 1}]": (200, b'{\n  "a": 1\n}'),
    "['x' * 200_000]": (200, b"x" * 200_000),
    "[context.set_response_status(404, 'Gone') or 'no']": (404, b"no"),
    "'text'": (BadOutput, "Invalid model predict output"),
    "None": (BadOutput, "Invalid model predict output"),
    "('a tuple',)": (BadOutput, "Invalid model predict output"),
    "(x for x in 'a')": (BadOutput, "Invalid model predict output"),
    "[]": (BadOutput, "number of batch response mismatched"),
    "[1, 2]": (BadOutput, "number of batch response mismatched"),
    "[object()]": (BadOutput, "Unsupported model output data type."),
    "[{b'k': 1}]": (BadOutput, "Unsupported model output data type."),
    "[calls.append(calls) or calls]": (BadOutput, "Unsupported model output data type."),
    "['\\ud800']": (BadOutput, "Unsupported model output data type."),
    "raised(PredictionException('mine', 429))": (429, None),
    "raised(PredictionException('mine'))": (500, None),
    "raised(PredictionException('half: \\ud800', 418))": (418, None),
    "raised(MemoryError())": (OutOfMemory, "Out of resources"),
    "raised(RuntimeError('CUDA error: misaligned address'))": (OutOfMemory, "Out of resources"),
    "raised(KeyError('CUDA'))": (OutOfMemory, "Out of resources"),
    "raised(KeyError('secret'))": (ItemFailed, "Prediction failed"),
    "['x' * 7_000_000]": (500, None),
    "[None]": (200, b"null"),
    "[float('nan')]": (200, b"NaN"),
    "[2**80]": (200, b"%d" % 2**80),
    "[os.getcwd()]": (200, None),
    "[context.get_request_header(0, 'x-foo')]": (200, b"bar"),
    "[sorted(context.get_all_request_header(0))]": (200, json.dumps(["X-Foo", "do", "explain"], indent=2).encode()),
    "[context.get_request_id()]": (200, b"id-0"),
    "[os.environ['PYTHONPATH'].split(':')[0] == sys.path[0] == context.system_properties['model_dir']]": (200, b"true"),
}


async def test_what_a_handler_may_return(harness, tmp_path):
    pid = harness.ready.pid
    for text, (kind, said) in RETURNED.items():
        (result,) = await results(harness, does(f"return {text}"))
        if isinstance(kind, int):
            assert result.error is None, (text, result.error)
            assert result.status == kind, text
            assert said is None or bytes(result.body) == said, text
        else:
            assert (type(result.error), result.error.message) == (kind, said), text
    (result,) = await results(harness, does("return raised(PredictionException('mine', 429))"))
    expected = {"code": 429, "type": "InternalServerException", "message": "mine"}
    assert (json.loads(bytes(result.body)), result.content_type) == (expected, "application/json")
    (result,) = await results(harness, does("return [os.getcwd()]"))
    assert bytes(result.body).decode() == str(tmp_path.resolve())
    assert harness.ready.pid == pid, "no answer ends a worker"
    assert harness.downs == []


async def test_an_error_of_the_batch_reaches_all_its_requests(harness):
    found = await results(harness, does("return [1]"), request(), request())
    assert [r.error.message for r in found] == ["number of batch response mismatched"] * 3
    found = await results(harness, does("raise PredictionException('mine', 418)"), request())
    assert [r.status for r in found] == [418, 418]


async def test_after_a_handler_dies_the_next_one_answers(harness):
    number = harness.post([does("os._exit(3)"), request()])
    assert type((await harness.final(number)).error) is WorkerDied
    await harness.up()
    (result,) = await results(harness, does("return ['again']"))
    assert bytes(result.body) == b"again"


async def test_after_a_handler_hangs_the_next_one_answers(tmp_path):
    async with handler_desk(tmp_path, SCRIPTED, run_timeout_s=0.2) as harness:
        await harness.up()
        number = harness.post([does("import time\ntime.sleep(60)")])
        error = (await harness.final(number)).error
        assert type(error) is RunTimeout
        assert "run_timeout_s=0.2" in error.message
        await harness.up()
        assert (await results(harness, does("return ['again']")))[0].body == b"again"


async def test_with_retry_split_one_bad_request_fails_alone(tmp_path):
    source = """
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return
    if any(row["body"] == "bad" for row in data):
        raise ValueError
    if any(row["body"] == "dark" for row in data):
        raise PredictionException("too dark", 418)
    return [row["body"] for row in data if row["body"] != "lost"]
"""
    async with handler_desk(tmp_path, source, retry_split=True) as harness:
        await harness.up()
        bodies = ["a", "bad", "b", "dark", "lost", "c"]
        found = await results(harness, *(request(body.encode(), "text/plain") for body in bodies))
        assert [type(r.error) for r in found if r.error] == [ItemFailed, BadOutput]
        assert [r.status if r.error is None else 0 for r in found] == [200, 0, 200, 418, 0, 200]


STREAMING = """
import os, time
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return
    for step in range(3):
        send_intermediate_predict_response(
            [f"{i}.{step} " for i in range(len(data))], context.request_ids, "Intermediate", 200, context
        )
        if data[0]["body"] == "wait":
            while not os.path.exists("go"):
                time.sleep(0.005)
        if data[0]["body"] == "fail":
            raise ValueError
    return ["end"] * len(data)
"""


def told(parts: list[BatchPart], place: int) -> list[Any]:
    found = [part.results[place] for part in parts]
    return [bytes(r.body).decode() if r.error is None else type(r.error) for r in found if r is not None]


async def test_parts_are_sent_while_the_handler_runs(tmp_path):
    async with handler_desk(tmp_path, STREAMING) as harness:
        await harness.up()
        number = harness.post([request(b"wait", "text/plain"), request(id="id-1")])
        await harness.until(lambda: harness.parts[number])
        assert not harness.parts[number][-1].final
        (tmp_path / "go").touch()
        await harness.final(number)
        parts = harness.parts[number]
        assert told(parts, 0) == ["0.0 ", "0.1 ", "0.2 ", "end"]
        assert told(parts, 1) == ["1.0 ", "1.1 ", "1.2 ", "end"]
        first, last = parts[0].results[0], parts[-1].results[0]
        assert (first.headers, first.final) == ([("ts_stream_next", "true")], False)
        assert (last.headers, last.final) == ([("ts_stream_next", "false")], True)


async def test_a_handler_that_fails_after_a_part_is_not_run_again(tmp_path):
    async with handler_desk(tmp_path, STREAMING, retry_split=True) as harness:
        await harness.up()
        number = harness.post([request(b"fail", "text/plain"), request()])
        await harness.final(number)
        assert told(harness.parts[number], 1) == ["1.0 ", ItemFailed]


async def test_a_handler_without_remaining_readers_runs_to_its_end(tmp_path):
    async with handler_desk(tmp_path, STREAMING) as harness:
        await harness.up()
        number = harness.post([request(b"wait", "text/plain")])
        await harness.until(lambda: harness.parts[number])
        harness.transport.abandon(0, number)
        (tmp_path / "go").touch()
        await harness.final(number)
        assert told(harness.parts[number], 0)[-1] == "end"
        assert (await results(harness, request()))[0].error is None


OVERLAPPED = """
import os, time
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        self.context = context

    def preprocess(self, data):
        bodies = [row["body"] for row in data]
        assert self.context.get_request_id() == bodies[0].split("-")[0]
        if bodies[0].endswith("-bad"):
            raise ValueError
        open("preprocessed-" + bodies[0], "w").close()
        return bodies

    def inference(self, data):
        if data[0].endswith("-waits"):
            while not os.path.exists("preprocessed-2"):
                time.sleep(0.005)
        return data

    def postprocess(self, data):
        self.context.set_response_header(0, "X-Id", self.context.get_request_id())
        return [row + str(self.context.request_ids) for row in data]

    def describe_handle(self):
        return "about"
"""


async def test_with_overlap_the_next_batch_is_preprocessed_during_inference(tmp_path):
    async with handler_desk(tmp_path, OVERLAPPED, overlap=True) as harness:
        await harness.up()
        first = harness.post([request(b"1-waits", "text/plain", id="1")])
        second = harness.post([request(b"2", "text/plain", id="2")])
        assert (await harness.final(first)).results[0].body == b"1-waits{0: '1'}"
        (answer,) = (await harness.final(second)).results
        assert (answer.body, answer.headers) == (b"2{0: '2'}", [("X-Id", "2")])
        bad, fine = (
            harness.post([request(b"3-bad", "text/plain", id="3")]),
            harness.post([request(b"4", "text/plain", id="4")]),
        )
        assert type((await harness.final(bad)).results[0].error) is ItemFailed
        assert (await harness.final(fine)).results[0].error is None
        (described,) = await results(harness, request(headers=[(b"describe", b"True")]))
        assert described.body == b"about"


async def test_a_handler_that_cannot_overlap_runs_as_usual(tmp_path, caplog):
    caplog.set_level(logging.INFO, "penstock.model")
    async with handler_desk(tmp_path, SCRIPTED, overlap=True) as harness:
        await harness.up()
        assert (await results(harness, does("return ['fine']")))[0].body == b"fine"
    assert any("handler_not_overlapped" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        ("def handle(:", LoadFailed, "SyntaxError"),
        ("raise SystemExit(3)", LoadFailed, "sys.exit"),
        ("import os\nos._exit(3)", LoadFailed, "exited with code 3"),
        ("def handle(data, context): raise MemoryError", LoadOutOfMemory, "out of memory"),
    ],
)
async def test_loading_a_failed_handler_is_retried_with_growing_delays(tmp_path, source, kind, says):
    async with handler_desk(tmp_path, source) as harness:
        await harness.until(lambda: len(harness.downs) == 2)
        assert [type(error) for error, _ in harness.downs] == [kind] * 2
        assert says in harness.downs[0][0].message
        waits = [retry_in_s for _, retry_in_s in harness.downs]
        assert waits[1] == 2 * waits[0]


async def test_a_handlers_output_log_and_tracebacks_are_log_lines(tmp_path, caplog):
    caplog.set_level(logging.INFO, "penstock.model")
    async with handler_desk(tmp_path, SCRIPTED + "\nimport logging\nlogging.getLogger('x').info('said')\n") as harness:
        await harness.up()
        await results(harness, does("raise ValueError('the cause')"))
    lines = [r.getMessage() for r in caplog.records if r.name == "penstock.model"]
    assert lines[:2] == ["the handler is loaded", "said"]
    assert lines.count("ValueError: the cause") == 1


async def test_a_worker_with_a_handler_has_loaded_no_front_end_no_engine_and_no_runtime(harness):
    (answer,) = await results(harness, does("return [' '.join(sys.modules)]"))
    loaded = set(answer.body.decode().split())
    ours = {name.split(".")[1] for name in loaded if name.startswith("penstock.")}
    assert "handler" in {name.rpartition(".")[2] for name in loaded}
    assert not ours & {"frontends", "engine", "batching", "archive", "observe", "cli", "broker", "streamer"}
    servers = {"asyncio", "click", "grpc", "httptools", "psutil", "redis", "starlette", "uvicorn"}
    assert not {name.split(".")[0] for name in loaded} & {*servers, "numpy", "onnxruntime", "torch", "yaml"}
