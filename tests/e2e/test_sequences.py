"""Sequences over HTTP: order, states, refusals, and the death of an instance under load."""

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.errors import LoadFailed
from penstock.types import SequenceRequest
from support.waiting import wait_for

SOURCE = """
    import os
    import time

    import numpy as np
    import penstock

    def totals(items, sequences):
        for item, sequence in zip(items, sequences):
            if item == "bad":
                raise ValueError("bad")
            if item == "slow":
                time.sleep(0.3)
            sequence.state = (sequence.state or []) + [item]
        return [{"seen": s.state, "pid": os.getpid()} for s in sequences]

    @penstock.model(max_sequences=8, sequence_backlog=100)
    class Totals:
        def predict(self, items, sequences):
            return totals(items, sequences)

    @penstock.model(max_sequences=100, max_batch_size=1, sequence_idle_s=0.1)
    class Brief:
        def predict(self, items, sequences):
            time.sleep(items[0])
            return totals(items, sequences)

    @penstock.model(max_sequences=1, max_queue=6)
    class Few:
        def predict(self, items, sequences):
            return totals(items, sequences)

    @penstock.model(max_sequences=2)
    class Tensors:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 1))]

        async def predict(self, items, sequences):
            for item, sequence in zip(items, sequences):
                sequence.state = (sequence.state or 0.0) + float(item["x"].sum())
            return [{"y": np.full((1, 1), s.state, np.float32)} for s in sequences]

    @penstock.model(max_sequences=2)
    class Parts:
        def predict(self, items, sequences):
            for _ in range(2):
                for sequence in sequences:
                    sequence.state = (sequence.state or 0) + 1
                yield [f"{s.state} " for s in sequences]
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, "Totals", "Brief", "Few", "Tensors", "Parts", "--instances", "2")


def ask(server: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        text = answer.read()
    return answer.status, json.loads(text) if text.startswith(b"{") else text


def send(server: Any, item: Any, id: str, *flags: str, model: str = "totals") -> tuple[int, Any]:
    """One request of a sequence."""
    headers = {f"x-sequence-{flag}": "true" for flag in flags} | ({"x-sequence-id": id} if id else {})
    return ask(server, f"/predictions/{model}", item, headers)


def test_a_sequence_keeps_its_state_and_its_worker(server: Any) -> None:
    found = [send(server, k, "a", *("start",) * (k == 0), *("end",) * (k == 3)) for k in range(4)]
    assert [status for status, _ in found] == [200] * 4
    assert [body["seen"] for _, body in found] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert len({body["pid"] for _, body in found}) == 1
    status, body = send(server, 4, "a")
    assert (status, body["error"]["code"]) == (404, "sequence_not_found")


def test_requests_of_a_sequence_run_in_the_order_of_their_arrival(server: Any) -> None:
    send(server, 0, "order", "start")
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(send, server, "slow", "order")]
        time.sleep(0.1)
        waiting += [pool.submit(send, server, k, "order") for k in range(10)]
        other = [pool.submit(send, server, k, f"other{k}", "start", "end") for k in range(5)]
        assert all(f.result() == (200, {"seen": [k], "pid": f.result()[1]["pid"]}) for k, f in enumerate(other))
        seen = [f.result()[1]["seen"] for f in waiting]
    assert sorted(map(len, seen)) == list(range(2, 13)), "one after the other"
    longest = max(seen, key=len)
    assert all(s == longest[: len(s)] for s in seen), "each saw all before it"
    send(server, 0, "order", "end")


def test_a_request_that_waits_longer_than_the_idle_limit_finds_the_state(server: Any) -> None:
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(send, server, 1.5, "w", "start", model="brief")
        time.sleep(0.4)
        others = [pool.submit(send, server, 0.15, f"o{i}", "start", model="brief") for i in range(18)]
        time.sleep(0.2)
        second = send(server, 0, "w", "end", model="brief")
    assert first.result()[0] == 200
    assert (second[0], second[1].get("seen")) == (200, [1.5, 0]), second
    assert {other.result()[0] for other in others} == {200}


def test_a_sequence_whose_start_fails_has_not_begun(server: Any) -> None:
    assert send(server, "bad", "f", "start")[0] == 500
    status, found = send(server, 1, "f")
    assert (status, found["error"]["code"]) == (404, "sequence_not_found")
    assert send(server, 2, "f", "start", "end")[1]["seen"] == [2]


def test_a_failed_request_leaves_the_state_and_the_sequence(server: Any) -> None:
    send(server, 1, "failing", "start")
    status, body = send(server, "bad", "failing")
    assert (status, body["error"]["code"]) == (500, "item_failed")
    assert send(server, 2, "failing", "end")[1]["seen"] == [1, 2]


@pytest.mark.parametrize(
    ("id", "flags", "status", "code"),
    [
        ("", (), 400, "bad_request"),
        ("x" * 201, ("start",), 400, "bad_request"),
        ("never", (), 404, "sequence_not_found"),
        ("never", ("end",), 404, "sequence_not_found"),
    ],
)
def test_a_request_that_fits_no_sequence_is_refused(
    server: Any, id: str, flags: tuple[str, ...], status: int, code: str
) -> None:
    found, body = send(server, 1, id, *flags)
    assert (found, body["error"]["code"]) == (status, code)


def test_a_start_begins_a_sequence_anew_whatever_runs(server: Any) -> None:
    found = [
        send(server, k, "again", *flags) for k, flags in enumerate([["start"], [], ["start"], [], ["start", "end"]])
    ]
    assert [(status, body["seen"]) for status, body in found] == [
        (200, [0]), (200, [0, 1]), (200, [2]), (200, [2, 3]), (200, [4]),
    ]  # fmt: skip
    assert send(server, 5, "again")[0] == 404


def test_a_flag_other_than_true_or_false_is_refused(server: Any) -> None:
    status, body = ask(server, "/predictions/totals", 1, {"x-sequence-id": "a", "x-sequence-start": "maybe"})
    assert (status, "found b'maybe'" in body["error"]["message"]) == (400, True)


def test_sequences_are_bounded_and_starts_wait_for_a_place(server: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert [send(server, 1, id, "start", model="few")[0] for id in ("1", "2")] == [200, 200]
        starts = [pool.submit(send, server, 1, f"later{k}", "start", "end", model="few") for k in range(3)]
        while server.metric("penstock_queue_rows", model="few") < 3:
            time.sleep(0.01)
        status, body = send(server, 1, "too many", "start", model="few")
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert not any(start.done() for start in starts), "one place on each of two instances"
        assert send(server, 1, "2", "end", model="few")[1]["seen"] == [1, 1], "no start keeps it from its end"
        assert [(status, body["seen"]) for status, body in (start.result(30) for start in starts)] == [(200, [1])] * 3
    send(server, 1, "1", "end", model="few")


def test_a_start_that_waits_for_a_place_ends_with_its_time(server: Any) -> None:
    assert [infer(server, sequence_id=f"s{k}", sequence_start=True)[0] for k in range(4)] == [200] * 4
    status, body = infer(server, sequence_id="late", sequence_start=True, timeout=50_000)
    assert (status, body["error"].startswith("the request expired in the queue after 50000 us")) == (503, True)
    status, body = infer(server, sequence_id="late", sequence_start=True, deadline_ms=50)
    assert (status, "deadline" in body["error"]) == (504, True)
    assert [infer(server, sequence_id=f"s{k}", sequence_end=True)[0] for k in range(4)] == [200] * 4


def infer(server: Any, rows: int = 1, deadline_ms: int = 0, **parameters: Any) -> tuple[int, Any]:
    """One Open Inference request to the model that adds up."""
    tensor = {"name": "x", "shape": [rows, 1], "datatype": "FP32", "data": [2] * rows}
    headers = {"x-deadline-ms": str(deadline_ms)} if deadline_ms else {}
    return ask(server, "/v2/models/tensors/infer", {"inputs": [tensor], "parameters": parameters}, headers)


def test_open_inference_names_the_sequence_in_its_parameters(server: Any) -> None:
    totals = [
        infer(server, sequence_id=7, sequence_start=True),
        infer(server, sequence_id=7),
        infer(server, sequence_id="7", sequence_end=True),
    ]
    assert [(status, body["outputs"][0]["data"]) for status, body in totals] == [(200, [2]), (200, [4]), (200, [6])]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"sequence_id": 0},
        {"sequence_id": ""},
        {"sequence_id": 0, "sequence_start": True},
        {"sequence_id": 8},
        {"sequence_id": "8"},
        {"sequence_id": 8, "sequence_end": True},
        {"sequence_id": 8, "sequence_start": "yes"},
        {"sequence_id": 8, "sequence_start": True, "rows": 2},
    ],
    ids=str,
)
def test_triton_refuses_it_with_the_same_status(server: Any, parameters: dict[str, Any]) -> None:
    assert infer(server, **parameters)[0] == 400


def test_the_metadata_have_the_limit_of_sequences(server: Any) -> None:
    assert json.loads(server.get("/v2/models/tensors")[1])["parameters"]["max_sequences"] == 2


def test_streams_keep_a_state_too(server: Any) -> None:
    assert send(server, 0, "s", "start", model="parts") == (200, b"1 2 ")
    assert send(server, 0, "s", "end", model="parts") == (200, b"3 4 ")


def test_killed_instances_end_their_sequences_and_each_caller_is_answered_once(server: Any) -> None:
    """A caller that gets 200 sees exactly the requests that were answered with 200 since its last start."""
    wrong: list[Any] = []
    counts = {"ok": 0, "lost": 0}
    going = threading.Event()

    def client(n: int) -> None:
        rng, life = random.Random(n), 0
        while not going.is_set():
            life += 1
            mine: list[int] = []
            for k in range(rng.randint(1, 20)):
                status, body = send(server, k, f"{n}.{life}", *("start",) * (k == 0))
                if status == 200 and body["seen"] == [*mine, k]:
                    mine.append(k)
                    counts["ok"] += 1
                elif status in (410, 429, 503) and body["error"]["code"] in (
                    "queue_full",  # one instance has not come back yet
                    "sequence_lost",
                    "worker_died",
                    "model_not_ready",
                ):
                    counts["lost"] += 1
                    break
                else:
                    wrong.append((status, body))
                    break
            else:
                send(server, -1, f"{n}.{life}", "end")

    clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in clients:
        thread.start()
    for _ in range(4):
        time.sleep(0.4)
        status, body = send(server, 0, f"victim{time.monotonic()}", "start", "end")
        if status == 200:
            os.kill(body["pid"], signal.SIGKILL)
    time.sleep(0.5)
    going.set()
    for thread in clients:
        thread.join()
    model = "/v2/models/totals"
    wait_for(lambda: json.loads(server.get(model)[1])["parameters"]["instances"] == 2)  # for the tests that follow
    assert not wrong, wrong[:3]
    assert counts["ok"] > 50
    assert counts["lost"] > 0


async def test_sequences_in_a_program() -> None:
    def predict(items: list[int], sequences: list[SequenceRequest]) -> list[Any]:
        for item, sequence in zip(items, sequences, strict=True):
            sequence.state = (sequence.state or 0) + item
        return [s.state for s in sequences]

    config = ModelConfig(target="predict", transport="inline", batching=BatchingConfig(max_sequences=1))
    async with Engine() as engine:
        await engine.load("sum", config, target=predict)
        assert await engine.infer("sum", 2, sequence=SequenceRequest("a", start=True)) == 2
        assert await engine.infer("sum", 3, sequence=SequenceRequest("a", end=True)) == 5


async def test_a_model_without_sequences_refuses_to_have_them() -> None:
    config = ModelConfig(target="len", transport="inline", batching=BatchingConfig(max_sequences=1))
    async with Engine() as engine:
        with pytest.raises(LoadFailed, match=r"predict\(items, sequences\)"):
            await engine.load("plain", config, target=lambda items: items)
