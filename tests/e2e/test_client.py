"""The public clients against `penstock serve` over HTTP and gRPC, against TorchServe's API, and across Unix sockets."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.client.endpoint import ConnectionLost, ResponseTimeout
from penstock.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ItemFailed,
    ModelNotFound,
    NotSupported,
    PenstockError,
    QueueFull,
    SequenceNotFound,
    Unauthorized,
)
from penstock.types import SequenceRequest
from support.pages import ROOT, blocks
from support.waiting import wait_for

SOURCE = """
    import asyncio
    import os
    import time

    import numpy as np
    import penstock

    def echo(items):
        return items

    def kind(items):
        return [type(item).__name__ for item in items]

    def fails(items):
        raise penstock.ItemFailed("broken on purpose")

    async def count(items):
        for n in range(4):
            yield [{"n": n} for _ in items]

    async def words(items):
        for word in ("1", " two", " dr\u00e9i"):
            yield [word for _ in items]

    async def blobs(items):
        for n in range(3):
            yield [bytes([n, 10, 13, 0]) * 3 for _ in items]

    async def breaks(items):
        yield [1 for _ in items]
        raise penstock.ItemFailed("broken in the middle")

    async def endless(items):
        while True:
            yield ["x" for _ in items]
            await asyncio.sleep(0.01)

    async def waits(items):
        await asyncio.sleep(60)
        return items

    async def once(items):
        with open("runs", "a") as log:
            log.write("x")
        await asyncio.sleep(0.3)
        return items

    @penstock.model(max_batch_size=1, max_queue=1)
    class Narrow:
        def predict(self, items):
            time.sleep(0.1)
            return items

    @penstock.model(max_sequences=4)
    class Totals:
        def predict(self, items, sequences):
            for item, sequence in zip(items, sequences):
                number = float(item["x"].sum()) if isinstance(item, dict) else item
                sequence.state = (sequence.state or 0) + number
            return [
                {"total": np.array([s.state])} if isinstance(item, dict) else s.state
                for item, s in zip(items, sequences)
            ]
"""
MODELS = (
    "echo", "kind", "fails", "count", "words", "blobs", "breaks", "endless", "waits", "once", "Narrow", "Totals",
)  # fmt: skip
X = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {
    "a": X,
    "b": np.array([[True], [False]]),
    "c": np.array([[b"\x00a"], [b""]], object),
    "d": np.array([[2**63], [1]], np.uint64),
    "e": np.array([[1.5], [np.inf]], np.float16),
}
PORTS = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]  # and one for gRPC


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(SOURCE, *MODELS, "--set", "server.management=true", ports=PORTS)


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[penstock.Client]:
    with penstock.Client(server.url, management_url=server.urls["management"]) as client:
        yield client


def in_flight(server: Any, model: str) -> float:
    found: float = server.metric("penstock_requests_in_flight", model=model)
    return found


# ---- requests


@pytest.mark.parametrize("value", [{"a": [1, None, "é"]}, "text", b"\x00\xff", 1.5, [], "", True])
def test_a_value_passes_there_and_back(client, value):
    assert client.predict("echo", value) == value


def test_values_arrive_as_their_own_types(client):
    given = {"str": "a", "bytes": b"a", "dict": {}, "list": np.ones(3), "int": 7}
    assert {name: client.predict("kind", value) for name, value in given.items()} == {name: name for name in given}
    assert client.predict("kind", b"hello", content_type="text/plain") == "str"


@pytest.mark.parametrize("protocol", ["penstock", "triton", "grpc"])
def test_arrays_of_every_kind_pass_unchanged(server, protocol):
    url = server.urls["grpc" if protocol == "grpc" else "inference"]
    with penstock.Client(url, protocol="triton" if protocol == "triton" else "penstock") as client:
        result = client.infer("echo", ARRAYS, request_id="r-1")
        assert (result.model_name, result.model_version, result.id) == ("echo", "1", "r-1")
        assert result.outputs.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert result.outputs[name].dtype == array.dtype
            np.testing.assert_array_equal(result.outputs[name], array)
        assert client.infer("echo", ARRAYS, outputs=["b"], version=1).outputs.keys() == {"b"}
        big = np.random.default_rng(0).random((1, 2**20), np.float32)
        np.testing.assert_array_equal(client.infer("echo", {"x": big}).outputs["x"], big)
        assert (client.live(), client.ready(), client.ready("echo")) == (True, True, True)
        assert client.metadata("echo")["platform"] == "python"
        with pytest.raises(ModelNotFound):
            client.infer("absent", {"x": X})
        with pytest.raises(ItemFailed, match="broken on purpose"):
            client.infer("fails", {"x": X})
        with pytest.raises(BadRequest, match="unknown output"):
            client.infer("echo", {"x": X}, outputs=["y"])


def test_tritons_repository_and_statistics_are_read(server):
    with penstock.Client(server.url, protocol="triton") as client:
        client.infer("echo", {"x": X})
        assert {"echo", "totals"} <= {model["name"] for model in client.models()}
        (found,) = client.statistics("echo", version=1)
        assert (found["name"], found["version"]) == ("echo", "1")
        assert found["inference_count"] >= 1


def test_tensors_of_torch_are_sent_in_binary(client):
    torch = pytest.importorskip("torch")
    half = torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16)
    found = client.infer("echo", {"a": half, "b": half.double().requires_grad_()}).outputs
    np.testing.assert_array_equal(found["a"], np.array([[1.0, -2.5]], np.float32))
    np.testing.assert_array_equal(found["b"], np.array([[1.0, -2.5]]))


@pytest.mark.parametrize(
    ("call", "error", "status"),
    [
        (lambda c: c.predict("fails", 1), ItemFailed, 500),
        (lambda c: c.predict("absent", 1), ModelNotFound, 404),
        (lambda c: c.predict("echo", b"{", content_type="application/json"), BadRequest, 400),
        (lambda c: c.infer("absent", {"x": X}), ModelNotFound, 404),
        (lambda c: c.predict("totals", 1, sequence="never-begun"), SequenceNotFound, 404),
        (lambda c: list(c.stream("fails", 1)), ItemFailed, 500),
        (lambda c: c.ready("absent"), ModelNotFound, 404),
        (lambda c: c.predict("waits", 1, deadline_s=0.05), DeadlineExceeded, 504),
    ],
)
def test_errors_are_those_of_the_server(client, call, error, status):
    with pytest.raises(PenstockError) as raised:
        call(client)
    assert (type(raised.value), raised.value.status) == (error, status)


def test_a_full_queue_is_waited_for(server):
    with penstock.Client(server.url, retries=50) as client:
        assert list(client.predict_many("narrow", range(8), concurrency=8)) == list(range(8))
    with penstock.Client(server.url, retries=0) as client:
        results = list(client.predict_many("narrow", range(8), concurrency=8, return_exceptions=True))
    refused = [result for result in results if isinstance(result, QueueFull)]
    assert refused
    assert {error.status for error in refused} == {429}


def test_a_request_that_its_client_leaves_is_cancelled(server, client):
    with pytest.raises(ResponseTimeout):
        client.predict("waits", 1, timeout_s=0.3)
    wait_for(lambda: in_flight(server, "waits") == 0)


def test_a_key_lets_two_requests_run_once(server, client, tmp_path):
    runs = Path(f"/proc/{server.process.pid}/cwd").resolve() / "runs"
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(client.predict("once", 5, idempotency_key="k-1")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (results, runs.read_text()) == ([5] * 4, "x")


def test_a_sequence_keeps_its_state(server, client):
    steps = [SequenceRequest("s-1", start=True), "s-1", SequenceRequest("s-1", end=True)]
    assert [client.predict("totals", 2, sequence=step) for step in steps] == [2, 4, 6]
    for url, protocol in ((server.url, "penstock"), (server.url, "triton"), (server.urls["grpc"], "penstock")):
        with penstock.Client(url, protocol=protocol) as other:  # type: ignore[arg-type]
            steps = [SequenceRequest("7", start=True), 7, SequenceRequest("7", end=True)]
            x = {"x": np.ones((1, 2), np.float32)}
            totals = [other.infer("totals", x, sequence=step).outputs["total"].tolist() for step in steps]
            assert totals == [[2], [4], [6]]


def test_a_batch_forms_from_many_arrays(client):
    arrays = [{"x": np.full((1, 2), n, np.float32)} for n in range(50)]
    results = client.infer_many("echo", iter(arrays), concurrency=8)
    assert [float(result.outputs["x"][0, 0]) for result in results] == list(range(50))


GEVENT = """
from gevent import monkey
monkey.patch_all()
import sys
import gevent
import penstock
ticks = []
def tick():
    while True:
        ticks.append(1)
        gevent.sleep(0.001)
gevent.spawn(tick)
with penstock.Client(sys.argv[1]) as client:
    jobs = [gevent.spawn(client.predict, "narrow", n) for n in range(3)]
    gevent.joinall(jobs)
    print([job.value for job in jobs], len(ticks) > 50, list(client.predict_many("echo", range(3))))
"""


def test_greenlets_wait_without_blocking_each_other(server):
    pytest.importorskip("gevent")
    command = [sys.executable, "-c", GEVENT, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[0, 1, 2] True [0, 1, 2]\n", "")


# ---- streams


def test_parts_keep_their_types(client):
    assert list(client.stream("count", 1)) == [{"n": n} for n in range(4)]
    assert list(client.stream("count", 1, events=False)) == [{"n": n} for n in range(4)]
    assert list(client.stream("words", 1)) == ["1", " two", " dréi"]
    assert "".join(client.stream("words", 1, events=False)) == "1 two dréi"
    for events in (True, False):
        assert list(client.stream("blobs", 1, events=events)) == [bytes([n, 10, 13, 0]) * 3 for n in range(3)]
    assert list(client.stream("echo", {"a": 1})) == [{"a": 1}]


def test_an_error_in_the_middle_has_its_class_as_an_event_and_as_a_line(client):
    for events in (True, False):
        stream = client.stream("breaks", 1, events=events)
        assert next(stream) == 1
        with pytest.raises(ItemFailed):
            next(stream)


def test_leaving_a_stream_cancels_it_at_the_server(server, client):
    for part in client.stream("endless", 1):
        assert part == "x"
        break
    wait_for(lambda: in_flight(server, "endless") == 0)

    async def leave() -> None:
        async with penstock.AsyncClient(server.url) as other:
            async for _ in other.stream("endless", 1):
                break
            await asyncio.to_thread(wait_for, lambda: in_flight(server, "endless") == 0)

    asyncio.run(leave())


def test_a_deadline_ends_a_stream(server, client):
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        list(client.stream("endless", 1, deadline_s=0.3))
    assert time.monotonic() - start < 5
    wait_for(lambda: in_flight(server, "endless") == 0)


def test_streams_over_grpc(server):
    with penstock.Client(server.urls["grpc"]) as client:
        parts = list(client.stream("echo", {"x": X}))
        assert len(parts) == 1
        np.testing.assert_array_equal(parts[0].outputs["x"], X)
        with pytest.raises(ModelNotFound, match="absent"):
            list(client.stream("absent", {"x": X}))
        with pytest.raises(ResponseTimeout):
            list(client.stream("waits", {"x": X}, timeout_s=0.3))
        wait_for(lambda: in_flight(server, "waits") == 0)
        with pytest.raises(DeadlineExceeded):
            client.infer("waits", {"x": X}, deadline_s=0.2)
        for call in (lambda: client.predict("echo", 1), lambda: client.models()):
            with pytest.raises(NotSupported, match="http"):
                call()
        with pytest.raises(NotSupported, match="idempotency"):
            client.infer("echo", {"x": X}, idempotency_key="k")


# ---- management, tokens, sockets


def test_models_are_loaded_scaled_and_unloaded(client):
    client.load("shout", version="1", target="app.py:kind", timeout_s=60)
    client.load("shout", version="2", target="app.py:echo")
    assert client.predict("shout", "a") == "a"
    assert client.predict("shout", "a", version=1) == "str"
    client.set_default("shout", "1")
    assert client.predict("shout", "a") == "str"
    client.set_traffic("shout", {"1": 0.5, "2": 0.5})
    assert {client.predict("shout", "a") for _ in range(10)} == {"a", "str"}
    assert client.scale("shout", 2, version="1")["versions"][0]["instances"] == 2
    assert client.statistics("shout", version="1")["batching"]
    assert {("shout", "1"), ("shout", "2")} <= {(m["name"], m["version"]) for m in client.models()}
    with pytest.raises(BadRequest):
        client.load("shout", version="3", target="app.py:echo", instances=0)
    client.unload("shout")
    with pytest.raises(ModelNotFound):
        client.predict("shout", "a")


def test_a_token_is_needed_and_management_may_be_off(serve, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")
    server = serve("def echo(items):\n    return items\n", "echo", "--token-file", "tokens", ports=PORTS)
    urls = (server.url, server.urls["grpc"])
    for url in urls:
        with penstock.Client(url) as client, pytest.raises(Unauthorized):
            client.infer("echo", {"x": X})
        with penstock.Client(url, token="secret") as client:
            assert client.infer("echo", {"x": X}).outputs
    options = {"token": "wrong", "management_token": "secret", "management_url": server.urls["management"]}
    with penstock.Client(server.url, **options) as client, pytest.raises(Forbidden):
        client.unload("echo")


def test_a_killed_server_is_reported_and_a_restarted_one_used(serve):
    server = serve("import time\ndef slow(items):\n    time.sleep(5)\n    return items\n", "slow")
    with penstock.Client(server.url) as client:
        killer = threading.Timer(0.3, server.process.send_signal, [signal.SIGKILL])
        killer.start()
        with pytest.raises(ConnectionLost):
            client.predict("slow", 1)
        killer.join()
        server.process.wait()
        port = server.url.rpartition(":")[2]
        serve("def slow(items):\n    return items\n", "slow", ports=["--port", port, *PORTS[2:]])
        assert client.predict("slow", 1) == 1


HANDLER = """
def handle(data, context):
    if data is None:
        return
    body = data[0].get("body") or data[0].get("data")
    if body == {"fail": True}:
        raise ValueError("no")
    return [{"got": body} if isinstance(body, dict) else body]
"""


def test_torchserve_is_managed_and_answers(torchserve):
    torchserve.add_model(HANDLER)
    torchserve.add_model(HANDLER, version="2.0", file="m-2.mar")
    torchserve.configure()
    torchserve.start("--ts-config", "config.properties", "--disable-token-auth", "--enable-model-api")
    options: Any = {"protocol": "torchserve", "management_url": torchserve.url("Management"), "timeout_s": 120}
    with penstock.Client(torchserve.url(), **options) as client:
        assert (client.live(), client.ready(), client.models()) == (True, True, [])
        client.load("m", url="m.mar")
        client.load("m", url="m-2.mar")
        assert client.predict("m", {"a": 1}) == {"got": {"a": 1}}
        assert client.predict("m", "text") == "text"
        assert [m["modelName"] for m in client.models()] == ["m"]
        client.scale("m", 2)
        (described,) = client.metadata("m")
        assert len(described["workers"]) == 2
        client.set_default("m", "2.0")
        assert client.metadata("m")[0]["modelVersion"] == "2.0"
        with pytest.raises(ModelNotFound, match="absent"):
            client.predict("absent", 1)
        with pytest.raises(ItemFailed):
            client.predict("m", {"fail": True})
        with pytest.raises(Conflict):
            client.load("m", url="m.mar")
        client.unload("m", version="1.0")
        client.unload("m")
        with pytest.raises(ModelNotFound):
            client.predict("m", 1)
        with pytest.raises(BadRequest, match="url"):
            client.load("m")


def test_a_unix_socket_works_like_a_port(torchserve):
    torchserve.add_model(HANDLER)
    path = torchserve.folder / "s.sock"
    torchserve.configure(inference_address=f"unix:{path}", load_models="all")
    torchserve.start("--ts-config", "config.properties", "--disable-token-auth")
    with penstock.Client(f"unix:{path}", protocol="torchserve") as client:
        assert client.predict("m", "text") == "text"


# ---- the page


def test_the_programs_of_the_clients_page_print_what_stands_there(serve, tmp_path):
    model, *programs = [block for language, block in blocks((ROOT / "docs/client.md").read_text()) if language]
    server = serve(model, "Means", "words", "--set", "server.management=true", ports=PORTS)
    ports = {":8080": server.url, ":8081": server.urls["management"], ":8001": server.urls["grpc"]}
    for program in programs:
        for port, url in ports.items():
            program = program.replace(f"127.0.0.1{port}", url.partition("//")[2])
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        shown = re.findall(r"print\(.*\)  # (.*)", program)
        assert (done.stdout.splitlines(), done.stderr) == (shown, ""), program
