"""Continuous batching, asynchronous handlers and sequences: the same requests to TorchServe 0.12.0 and to Penstock."""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.archives import write_mar

pytestmark = pytest.mark.peer

CONTINUOUS = """
import json


def stopping(cache, req_id, left):
    def stop(result):
        nonlocal left
        left -= 1
        if left <= 0:
            del cache[req_id]
        return left <= 0

    return stop


class Handler:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        results = []
        for i, req_id in context.request_ids.items():
            if req_id not in context.cache:
                body = bytes(data[i]["body"])
                asked = {"name": "r", "parts": 2} if body == b"ready?" else json.loads(body)
                context.cache[req_id] = {
                    "name": asked["name"], "sent": 0, "stop": stopping(context.cache, req_id, asked["parts"]),
                    "first": sorted(data[i]),
                }
            state = context.cache[req_id]
            state["sent"] += 1
            seen = sorted(data[i]), sorted(context.get_all_request_header(i))[:0]
            results.append(f"{state['name']}{state['sent']} {seen} ")
        context.stopping_criteria = [context.cache[r]["stop"] for r in context.request_ids.values()]
        return results
"""
ASYNC = """
import asyncio
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException


class Handler:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        order = bytes(data[0].get("body") or b"")
        await asyncio.sleep(0.01)
        if order == b"raise":
            raise ValueError("secret")
        if order == b"refuse":
            raise PredictionException("no such thing", 513)
        if order == b"wrong":
            return 7
        if order == b"length":
            return ["a", "b"]
        if order == b"parts":
            for k in range(3):
                send_intermediate_predict_response([f"{k} "], context.request_ids, "", 200, context)
        return [f"{order.decode()} {context.get_request_header(0, 'url_path')}"]
"""
SEQUENCES = """
class Handler:
    def initialize(self, context):
        self.states = {}

    def handle(self, data, context):
        answers = []
        for i, row in enumerate(data):
            id = context.get_sequence_id(i)
            body = bytes(row["body"])
            if body == b"ready?":
                answers.append("ready")
                continue
            start = context.get_request_header(i, context.header_key_sequence_start)
            self.states[id] = self.states.get(id, 0) + int(body)
            context.set_response_header(i, context.header_key_sequence_id, id)
            answers.append(f"{self.states[id]} {start} {id[:6]}")
        return answers
"""
SEQUENCE_CONFIG = """
minWorkers: 2
maxWorkers: 2
batchSize: 8
maxBatchDelay: 10
sequenceBatching: true
maxNumSequence: 8
maxSequenceJobQueueSize: 4
sequenceMaxIdleMSec: 5000
"""
CONTINUOUS_CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 1\ncontinuousBatching: true\n"
ASYNC_CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 1\nmaxBatchDelay: 1\nasyncCommunication: true\n"


def ask(server: Any, path: str, body: bytes, **headers: str) -> tuple[Any, ...]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    with closing(connection):
        connection.request("POST", f"/predictions/{path}", body, headers)
        response = connection.getresponse()
        shown = {name: response.getheader(name) for name in ("ts_stream_next", "ts_request_sequence_id")}
        return response.status, response.read().decode(), shown


def steps(server: Any, name: str, parts: int) -> tuple[Any, ...]:
    return ask(server, "steps", json.dumps({"name": name, "parts": parts}).encode())


def of_steps(server: Any) -> list[Any]:
    found = [steps(server, "three", 3)]  # after a single step TorchServe does not end its answer
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(steps, server, f"{n}-", 5 + 3 * n) for n in range(4)]
        found += [each.result() for each in together]
    return found


def of_async(server: Any) -> list[Any]:
    orders = (b"x", b"parts", b"refuse", b"raise", b"wrong", b"length")
    return [*(ask(server, "later", order) for order in orders), ask(server, "later/1.0/v1/completions", b"x")]


def of_sequences(server: Any) -> list[Any]:
    found = []
    for value in (b"1", b"2", b"3"):
        for id in ("a", "b", "c"):
            found.append(ask(server, "seq", value, ts_request_sequence_id=id))
    status, body, shown = ask(server, "seq", b"5")
    own = shown["ts_request_sequence_id"]
    found += [(status, body, own.startswith("ts-seq-")), ask(server, "seq", b"6", ts_request_sequence_id=own)[:2]]
    return found


@pytest.mark.parametrize(
    ("model", "handler", "config", "outcomes"),
    [
        ("steps", CONTINUOUS, CONTINUOUS_CONFIG, of_steps),
        ("later", ASYNC, ASYNC_CONFIG, of_async),
        ("seq", SEQUENCES, SEQUENCE_CONFIG, of_sequences),
    ],
)
def test_the_same_requests_have_the_same_answers(
    peer_server: Any, tmp_path: Path, model: str, handler: str, config: str, outcomes: Any
) -> None:
    write_mar(tmp_path / "store", model, handler, config)
    found = {}
    for owner in ("torchserve", "penstock"):
        server = peer_server(owner, tmp_path / "store", [f"{model}={model}.mar"])
        found[owner] = outcomes(server)
        server.close()
    assert found["penstock"] == found["torchserve"]
