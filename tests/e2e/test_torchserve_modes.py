"""TorchServe's other ways to run a handler: continuous batching, asynchronous handlers and sequences."""

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from penstock.torchserve import grpc as services
from support.waiting import wait_for

CONTINUOUS = """
import json, os, time
from ts.handler_utils.utils import send_intermediate_predict_response


def stopping(cache, req_id, left, fails):
    def stop(result):
        nonlocal left
        if fails:
            raise ValueError("secret")
        left -= 1
        if left <= 0:
            del cache[req_id]
        return left <= 0

    return stop


class Handler:
    def initialize(self, context):
        self.context = context
        context.cache = {}

    def handle(self, data, context):
        time.sleep(0.005)
        results = []
        for i, req_id in context.request_ids.items():
            if req_id not in context.cache:
                asked = json.loads(data[i]["body"])
                if asked.get("die"):
                    os._exit(1)
                if asked.get("few"):
                    return []
                stop = stopping(context.cache, req_id, asked.get("parts", 1), asked.get("bad_stop"))
                context.cache[req_id] = {"name": asked["name"], "sent": 0, "stop": stop}
            else:
                assert data[i] == {}, data[i]
            state = context.cache[req_id]
            state["sent"] += 1
            if state["name"] == "cached":
                results.append(f"{len(context.cache)}")
            else:
                results.append(f"{state['name']}{state['sent']}/{len(context.request_ids)} ")
            if state["name"] == "early":
                send_intermediate_predict_response(["first "], {i: req_id}, "", 200, context)
        context.stopping_criteria = [context.cache[r]["stop"] for r in context.request_ids.values()]
        return results
"""

ASYNC = """
import asyncio
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException


class Handler:
    def initialize(self, context):
        self.inside = 0

    async def handle(self, data, context):
        order = (data[0].get("body") or bytearray()).decode()
        path = context.get_request_header(0, "url_path")
        if order == "meet":
            self.inside += 1
            while self.inside < 8:
                await asyncio.sleep(0.005)
        if order == "refuse":
            raise PredictionException("not found", 404)
        if order == "raise":
            raise ValueError("secret")
        if path == "v1/completions":
            context.set_response_content_type(0, "text/event-stream")
            for k in range(3):
                send_intermediate_predict_response([f"data: {k}\\n\\n"], context.request_ids, "", 200, context)
                await asyncio.sleep(0.01)
            return ["data: [DONE]\\n\\n"]
        return [f"{order} {path} {context.get_request_id(0)}"]
"""

SUMS = """
import json, time


class Handler:
    # Sums of sequences. An odd number is answered by a stream, -1 ends the streams of its sequence, 0 the sequence.
    def initialize(self, context):
        self.context, self.sums = context, {}
        context.cache = {}

    def stopping(self, id, req_id, number, starts):
        parts_left = 400

        def stop(result):
            nonlocal parts_left
            sequence, streams = self.context.cache[id], number > 0 and number % 2 and not starts
            parts_left -= 1
            if streams and parts_left and not sequence["stopped"]:
                return False
            del self.context.cache[req_id]
            sequence["open"] -= 1
            sequence["stopped"] = sequence["stopped"] and sequence["open"] > 0
            return True if streams else None

        return stop

    def handle(self, data, context):
        results, stops = [], []
        for i, row in enumerate(data):
            id, req_id = context.get_sequence_id(i), context.get_request_id(i)
            context.set_response_header(i, context.header_key_sequence_id, id)
            starts = bool(context.get_request_header(i, context.header_key_sequence_start))
            if starts:
                self.sums[id], context.cache[id] = 0, {"open": 0, "stopped": False}
            if req_id in context.cache:
                time.sleep(0.02)
            else:
                body = row["body"]
                number = body["input"] if isinstance(body, dict) else int(body)
                context.cache[id]["open"] += 1
                context.cache[req_id] = self.stopping(id, req_id, number, starts)
                if number == -1:
                    context.cache[id]["stopped"] = True
                else:
                    self.sums[id] += number
                if number == 0:
                    context.set_response_header(i, context.header_key_sequence_end, id)
            stops.append(context.cache[req_id])
            results.append(-1 if row.get("body") == b"-1" else self.sums[id])
        context.stopping_criteria = stops
        return results
"""
SUMS_CONFIG = """
minWorkers: 2
maxWorkers: 2
batchSize: 1
sequenceBatching: true
continuousBatching: true
maxNumSequence: 2
maxSequenceJobQueueSize: 10
sequenceMaxIdleMSec: {idle}
sequenceTimeoutMSec: {longest}
"""

SEQUENCES = """
import os, time


class Handler:
    def initialize(self, context):
        self.states = {}

    def handle(self, data, context):
        answers = []
        for i, row in enumerate(data):
            id = context.get_sequence_id(i)
            if context.get_request_header(i, context.header_key_sequence_start) == "true":
                self.states[id] = 0
            body = row.get("body") or row.get("data")
            if body == b"die":
                os._exit(1)
            if body == b"slow":
                time.sleep(0.3)
                body = b"1"
            self.states[id] = self.states.get(id, 0) + int(body)
            context.set_response_header(i, context.header_key_sequence_id, id)
            answers.append(f"{self.states[id]} {os.getpid()}")
        return answers
"""
SEQUENCE_CONFIG = """
minWorkers: 2
maxWorkers: 2
batchSize: 4
sequenceBatching: true
maxNumSequence: {most}
maxSequenceJobQueueSize: 2
sequenceMaxIdleMSec: 60000
"""


@pytest.fixture(scope="module")
def server(torchserve_all: Any) -> Any:
    torchserve_all.add_model(CONTINUOUS, file="steps.mar", config="continuousBatching: true\nbatchSize: 4\n")
    torchserve_all.add_model(ASYNC, file="later.mar", config="asyncCommunication: true\n")
    torchserve_all.add_model(SEQUENCES, file="seq.mar", config=SEQUENCE_CONFIG.format(most=100))
    torchserve_all.add_model(SEQUENCES, file="few.mar", config=SEQUENCE_CONFIG.format(most=4))
    for name, idle, longest in (("sums", 60_000, 0), ("idle", 300, 0), ("short", 60_000, 700)):
        torchserve_all.add_model(SUMS, file=f"{name}.mar", config=SUMS_CONFIG.format(idle=idle, longest=longest))
    torchserve_all.configure(default_response_timeout="5")
    torchserve_all.start("--models", "all", "--disable-token-auth", "--enable-model-api")
    return torchserve_all


def ask(server: Any, path: str, body: Any, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(urlsplit(server.url()).netloc, timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with closing(connection):
        connection.request("POST", f"/predictions/{path}", data, headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())


def steps(server: Any, **asked: Any) -> tuple[int, str, dict[str, str]]:
    return ask(server, "steps", asked)


def test_requests_join_the_running_batch_and_leave_when_they_are_done(server: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(steps, server, name="a", parts=40)
        time.sleep(0.05)
        short = [pool.submit(steps, server, name=name, parts=3) for name in "bc"]
        for each, name in zip(short, "bc", strict=True):
            status, body, headers = each.result()
            assert (status, re.findall(rf"{name}(\d)/", body)) == (200, ["1", "2", "3"])
            assert headers["ts_stream_next"] == "true"
            assert not long.done()
        status, body, _ = long.result()
    assert [int(k) for k in re.findall(r"a(\d+)/", body)] == list(range(1, 41))
    assert {"1"} < set(re.findall(r"/(\d)", body)) <= {"1", "2", "3"}, "alone, and with others"


def test_parts_that_a_step_sends_early_come_first(server: Any) -> None:
    assert steps(server, name="early", parts=2)[1] == "first early1/1 first early2/1 "


def test_a_client_that_leaves_frees_its_place_and_the_cache(server: Any) -> None:
    address = urlsplit(server.url())
    for _ in range(6):  # more than the batch has places
        with socket.create_connection((address.hostname, address.port), 10) as client:
            body = json.dumps({"name": "gone", "parts": 10_000}).encode()
            client.sendall(
                b"POST /predictions/steps HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            assert client.recv(1000)
    kept = "the handler still keeps requests whose clients have left"
    wait_for(lambda: steps(server, name="cached")[1] == "1", said=lambda: kept)


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"name": "a", "few": True}, 503, "number of batch response mismatched"),
        ({"name": "a", "bad_stop": True}, 503, "Prediction failed"),
        ({"other": 1}, 503, "Prediction failed"),
    ],
)
def test_a_step_that_fails_is_answered_as_by_torchserve(
    server: Any, asked: dict[str, Any], status: int, message: str
) -> None:
    found, body, _ = steps(server, **asked)
    assert (found, json.loads(body)["message"]) == (status, message)
    assert steps(server, name="a", parts=2)[1] == "a1/1 a2/1 "


def test_a_death_ends_each_active_request_once(server: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(lambda: steps(server, name="cut", parts=2000)) for _ in range(3)]
        time.sleep(0.2)
        assert steps(server, name="a", die=True)[0] == 500
        for each in streams:
            with pytest.raises((http.client.HTTPException, OSError)):
                each.result()
    wait_for(lambda: steps(server, name="a")[0] == 200)


def test_asynchronous_calls_overlap(server: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [each.result() for each in [pool.submit(ask, server, "later", b"meet") for _ in range(8)]]
    assert {status for status, _, _ in found} == {200}
    assert len({body.rpartition(" ")[2] for _, body, _ in found}) == 8, "each call has a context of its own"


def test_a_sub_path_reaches_the_handler_and_its_parts_stream(server: Any) -> None:
    assert ask(server, "later/1.0/v1/models", b"x")[1].startswith("x v1/models ")
    status, body, headers = ask(server, "later/1.0/v1/completions", b"x")
    assert (status, body) == (200, "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n")
    assert headers["content-type"] == "text/event-stream"


def test_errors_of_asynchronous_handlers_are_those_of_others(server: Any) -> None:
    assert (ask(server, "later", b"refuse")[0], ask(server, "later", b"raise")[0]) == (404, 503)


def seq(
    server: Any, body: bytes, id: str = "", end: bool = False, model: str = "seq"
) -> tuple[int, str, dict[str, str]]:
    headers = {"ts_request_sequence_id": id} if id else {}
    return ask(server, model, body, **headers, **({"ts_request_sequence_end": "true"} if end else {}))


def test_a_sequence_sticks_to_its_worker(server: Any) -> None:
    status, body, headers = seq(server, b"1")
    id = headers["ts_request_sequence_id"]
    assert (status, body.split()[0], id.startswith("ts-seq-")) == (200, "1", True)
    found = [seq(server, b"2", id)[1], seq(server, b"3", id, end=True)[1]]
    assert [each.split()[0] for each in found] == ["3", "6"]
    assert {each.split()[1] for each in found} == {body.split()[1]}


def test_sequences_are_bounded_in_number_and_in_backlog(server: Any) -> None:
    for k in range(4):
        assert seq(server, b"1", f"s{k}", model="few")[0] == 200
    status, body, _ = seq(server, b"1", "s4", model="few")
    assert (status, "exceeds maxSequenceJobQueueSize" in body) == (503, True)
    with ThreadPoolExecutor(6) as pool:
        slow = pool.submit(seq, server, b"slow", "s0", model="few")
        time.sleep(0.1)
        others = [pool.submit(seq, server, b"1", "s0", model="few") for _ in range(5)]
        statuses = sorted(each.result()[0] for each in others)
        assert slow.result()[0] == 200
    assert statuses == [200, 200, 503, 503, 503]
    for k in range(4):
        assert seq(server, b"1", f"s{k}", end=True, model="few")[0] == 200


def test_a_worker_that_dies_ends_the_sequences_that_it_had(server: Any) -> None:
    worker = seq(server, b"5", "victim")[1].split()[1]
    os.kill(int(worker), signal.SIGKILL)
    end = time.monotonic() + 20
    while (found := seq(server, b"1", "victim"))[0] != 200:
        assert found[0] in (500, 503)
        assert time.monotonic() < end
    assert found[1].split()[0] == "1", "a new worker has no state"
    seq(server, b"1", "victim", end=True)


def test_a_bidirectional_stream_is_a_sequence(server: Any) -> None:
    method = services.service_descriptor("org.pytorch.serve.grpc.inference.InferenceAPIsService").methods_by_name[
        "StreamPredictions2"
    ]
    request, response = (services.message_class(t.full_name) for t in (method.input_type, method.output_type))

    def asked() -> Iterator[Any]:
        for value in (b"1", b"2", b"x", b"4"):
            yield request(model_name="seq", input={"data": value})

    with grpc.insecure_channel(server.url("Inference gRPC").removeprefix("grpc://")) as channel:
        call = channel.stream_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        found = list(call(asked(), timeout=30))
    assert [each.prediction.split()[:1] for each in found] == [[b"1"], [b"3"], [], [b"7"]]
    assert (found[2].status.code, found[2].status.message) == (
        grpc.StatusCode.UNAVAILABLE.value[0],
        "Prediction failed",
    )
    assert len({each.sequence_id for each in found}) == 1


def test_describe_shows_the_modes(server: Any) -> None:
    def described(model: str) -> dict[str, Any]:
        return json.loads(server.fetch(f"{server.url('Management')}/models/{model}")[1])[0]

    assert described("steps")["continuousBatching"] is True
    assert (described("seq")["stateful"], described("seq")["maxNumSequence"]) == (True, 100)
    assert described("later")["continuousBatching"] is False


def test_modes_that_exclude_each_other_are_refused(server: Any) -> None:
    server.add_model(ASYNC, file="excluded.mar", config="asyncCommunication: true\nsequenceBatching: true\n")
    status, body = server.fetch(f"{server.url('Management')}/models?url=excluded.mar", b"", "POST")
    assert (status, "asyncCommunication and sequenceBatching" in body.decode()) == (400, True)


def test_both_batchings_together(server: Any) -> None:
    """A sequence of streamed answers: each request begins once the one before streams, in order, on one worker."""
    modes = "continuousBatching: true\nsequenceBatching: true\nbatchSize: 4\nminWorkers: 1\n"
    config = f"{modes}maxNumSequence: 4\nmaxSequenceJobQueueSize: 4\n"
    server.add_model(CONTINUOUS, file="both.mar", config=config)
    url = f"{server.url('Management')}/models?url=both.mar&initial_workers=1&synchronous=true"
    assert server.fetch(url, b"", "POST")[0] == 200
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(ask, server, "both", {"name": name, "parts": 3}, ts_request_sequence_id="one") for name in "xyz"
        ]
        bodies = [each.result()[1] for each in asked]
    assert [re.sub(r"/\d", "", body) for body in bodies] == [f"{name}1 {name}2 {name}3 " for name in "xyz"]


def add(server: Any, number: int, id: str = "", model: str = "sums") -> tuple[int, str, str]:
    """Status, answer and sequence id."""
    status, body, headers = seq(server, str(number).encode(), id, model=model)
    assert "ts_stream_next" not in headers, "a plain answer"
    return status, body, headers.get("ts_request_sequence_id", "")


def test_sequences_of_steps_have_plain_answers_where_the_criteria_say_none(server: Any) -> None:
    def total(step: int) -> list[str]:
        _, first, id = add(server, step)
        return [first, *(add(server, k * step, id)[1] for k in range(2, 6)), add(server, 0, id)[1]]

    with ThreadPoolExecutor(2) as pool:
        two, four = pool.map(total, (2, 4))
    assert (two, four) == (["2", "6", "12", "20", "30", "30"], ["4", "12", "24", "40", "60", "60"])


def test_a_request_of_a_sequence_cancels_its_stream_and_the_handler_ends_the_sequence(server: Any) -> None:
    for _ in range(5):  # more sequences than may be in progress
        status, _, id = add(server, 2)
        assert status == 200
        connection = http.client.HTTPConnection(urlsplit(server.url()).netloc, timeout=30)
        with closing(connection):
            headers = {"ts_request_sequence_id": id, "content-type": "application/json"}
            connection.request("POST", "/predictions/sums", b'{"input": 3}', headers)
            response = connection.getresponse()
            assert response.headers["transfer-encoding"] == "chunked"
            assert response.read(1) == b"5"
            assert add(server, -1, id)[1] == "-1"
            assert len(response.read()) < 399, "it ended before its last part"
        assert add(server, 0, id)[:2] == (200, "5")


def test_a_sequence_that_the_server_named_ends_with_its_time(server: Any) -> None:
    status, _, id = add(server, 2, model="idle")
    assert status == 200
    time.sleep(0.6)
    assert add(server, 2, id, model="idle")[0] == 503
    began, (status, _, id) = time.monotonic(), add(server, 2, model="short")
    while status == 200 and time.monotonic() < began + 20:
        status, _, _ = add(server, 2, id, model="short")
    assert (status, time.monotonic() > began + 0.7) == (503, True)


def test_the_names_of_the_headers_can_be_changed(torchserve: Any) -> None:
    torchserve.add_model(SEQUENCES, file="seq.mar", config=SEQUENCE_CONFIG.format(most=4))
    names = {f"ts_header_key_sequence_{key}": f"my-{key}" for key in ("id", "start", "end")}
    torchserve.configure(**names)
    torchserve.start("--models", "seq.mar", "--disable-token-auth")
    found = [ask(torchserve, "seq", b"2", **{"my-id": "a"})[1].split() for _ in range(3)]
    assert [each[0] for each in found] == ["2", "4", "6"]
    assert ask(torchserve, "seq", b"2")[2]["my-id"].startswith("ts-seq-")
