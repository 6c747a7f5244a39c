"""Triton's own clients with Penstock: tritonclient, sync and asyncio, over HTTP and gRPC, and `perf_analyzer`."""

import csv
import json
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from support.triton_servers import BENCHMARKS, Addresses

pytestmark = pytest.mark.peer
ROW = np.array([[1, 2, 3, 4]], np.float32)
ANSWER = np.array([[40, 50]], np.float32)
BOTH = pytest.mark.parametrize("kind", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])


@pytest.fixture(scope="module")
def server(serve_triton_models: Callable[..., Addresses]) -> Addresses:
    return serve_triton_models()


@pytest.fixture
def connect(server: Addresses) -> Iterator[Callable[[Any], Any]]:
    """Makes the client of a module of tritonclient."""
    clients = []

    def make(kind: Any) -> Any:
        clients.append(kind.InferenceServerClient(server.http if kind is tritonclient.http else server.grpc))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


def given(kind: Any, array: Any, name: str = "x", datatype: str = "FP32") -> Any:
    found = kind.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


# ---- tritonclient


@BOTH
def test_the_client_infers_and_manages(connect, kind) -> None:
    client = connect(kind)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert not client.is_model_ready("nothing")
    assert (client.infer("mlp", [given(kind, ROW)]).as_numpy("y") == ANSWER).all()
    pending = client.async_infer("mlp", [given(kind, ROW)]) if kind is tritonclient.http else None
    assert pending is None or (pending.get_result().as_numpy("y") == ANSWER).all()
    client.unload_model("told")
    assert not client.is_model_ready("told")
    client.load_model("told")
    assert client.is_model_ready("told")
    with pytest.raises(InferenceServerException, match="not found"):
        client.infer("mlp", [given(kind, ROW)], model_version="9")


@BOTH
def test_the_client_passes_parameters_ids_and_classes(connect, kind) -> None:
    client = connect(kind)
    result = client.infer("told", [given(kind, ROW[:, :1])], request_id="7", parameters={"scale": 2})
    assert json.loads(result.as_numpy("parameters").item()) == {"scale": 2}
    scores = np.array([[0.5, 0.25, 2]], np.float32)
    wanted = [kind.InferRequestedOutput("scores", class_count=2)]
    found = client.infer("classes", [given(kind, scores)], outputs=wanted, priority=1, timeout=10_000_000)
    assert found.as_numpy("scores").ravel().tolist() == [b"2.000000:2:a: bird", b"0.500000:0:cat"]


@BOTH
def test_the_client_sends_sequences(connect, kind) -> None:
    client = connect(kind)
    totals = []
    for value in (1, 2, 3):
        x = given(kind, np.array([[value]], np.int32), datatype="INT32")
        result = client.infer("totals", [x], sequence_id=77, sequence_start=value == 1, sequence_end=value == 3)
        totals.append(int(result.as_numpy("total").item()))
    assert totals == [1, 3, 6]


@BOTH
def test_the_client_shares_memory(connect, kind) -> None:
    client, place = connect(kind), shm.create_shared_memory_region("penstock", "/penstock-peer-client", 64)
    try:
        shm.set_shared_memory_region(place, [ROW])
        client.register_system_shared_memory("penstock", "/penstock-peer-client", 64)
        x, y = kind.InferInput("x", [1, 4], "FP32"), kind.InferRequestedOutput("y")
        x.set_shared_memory("penstock", 16)
        y.set_shared_memory("penstock", 8, 32)
        result = client.infer("mlp", [x], outputs=[y])
        assert result.get_output("y") is not None
        assert (shm.get_contents_as_numpy(place, np.float32, [1, 2], 32) == ANSWER).all()
        client.unregister_system_shared_memory("penstock")
        assert not getattr(client.get_system_shared_memory_status(), "regions", [])
    finally:
        shm.destroy_shared_memory_region(place)


def test_the_client_streams_decoupled_answers_and_sequences(connect) -> None:
    client, found = connect(tritonclient.grpc), queue.Queue[tuple[Any, Any]]()
    client.start_stream(lambda result, error: found.put((result, error)))
    n = given(tritonclient.grpc, np.array([[3]], np.int32), "n", "INT32")
    client.async_stream_infer("count", [n], request_id="a", enable_empty_final_response=True)
    parts = []
    while True:
        result, error = found.get(timeout=30)
        assert error is None
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            break
        parts.append(int(result.as_numpy("i").item()))
    assert parts == [0, 1, 2]
    for value in (1, 2, 3):
        x = given(tritonclient.grpc, np.array([[value]], np.int32), datatype="INT32")
        client.async_stream_infer("totals", [x], sequence_id=5, sequence_start=value == 1, sequence_end=value == 3)
    totals = [int(found.get(timeout=30)[0].as_numpy("total").item()) for _ in range(3)]
    assert totals == [1, 3, 6]
    client.async_stream_infer("nothing", [n], request_id="b")
    result, error = found.get(timeout=30)
    assert result is None
    assert "nothing" in error.message()
    client.stop_stream()


async def test_the_asyncio_clients_infer(server: Addresses) -> None:
    for kind, address in ((tritonclient.http.aio, server.http), (tritonclient.grpc.aio, server.grpc)):
        async with kind.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            assert not await client.is_model_ready("nothing")
            result = await client.infer("mlp", [given(kind, ROW)])
            assert (result.as_numpy("y") == ANSWER).all()
            with pytest.raises(InferenceServerException):
                await client.infer("mlp", [given(kind, ROW[:, :2])])


async def test_the_asyncio_client_streams(server: Addresses) -> None:
    kind = tritonclient.grpc.aio
    n = given(kind, np.array([[3]], np.int32), "n", "INT32")

    async def requests() -> Any:
        yield {"model_name": "count", "inputs": [n]}

    async with kind.InferenceServerClient(server.grpc) as client:
        found = [(result, error) async for result, error in client.stream_infer(requests())]
    assert [int(result.as_numpy("i").item()) for result, _ in found if result.as_numpy("i") is not None] == [0, 1, 2]
    assert all(error is None for _, error in found)


# ---- perf_analyzer


@pytest.fixture(scope="module")
def perf_analyzer() -> str:
    """The program, in the virtual environment of the benchmarks."""
    script = "import servers; print(servers.python_of('triton'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=BENCHMARKS, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"perf_analyzer could not be made: {done.stderr[-500:]}")
    return str(Path(done.stdout.split()[-1]).parent / "perf_analyzer")


SHORT = ["--concurrency-range", "2", "-p", "300", "-r", "3", "-s", "100000"]  # three windows, whatever their spread
VALUES = {"x": [1.0, 2.0, 3.0, 4.0]}
GRPC = ["-i", "grpc"]
RUNS = {
    "HTTP": ["-m", "mlp"],
    "gRPC": ["-m", "mlp", *GRPC],
    "batches": ["-m", "mlp", "-b", "4"],
    "a stream": ["-m", "mlp", *GRPC, "--streaming"],
    "JSON": ["-m", "mlp", "--input-tensor-format", "json", "--output-tensor-format", "json"],
    "compression": ["-m", "mlp", *GRPC, "--grpc-compression-algorithm", "gzip"],
    "texts": ["-m", "text", *GRPC, "--streaming", "--input-data", "texts.json"],
    "decoupled": ["-m", "count", *GRPC, "--streaming", "--input-data", "count.json"],
    "input data": ["-m", "mlp", "--input-data", "mlp.json"],
    "checked output": ["-m", "mlp", *GRPC, "--input-data", "checked.json"],
    "sequences": ["-m", "totals", "--sequence-length", "4"],
    "sequences, gRPC": ["-m", "totals", *GRPC, "--sequence-length", "4", "--num-of-sequences", "4"],
    "sequences, a stream": ["-m", "totals", *GRPC, "--streaming", "--sequence-length", "4"],
    "shared memory": ["-m", "mlp", "--shared-memory", "system"],
    "shared memory, gRPC": ["-m", "mlp", *GRPC, "--shared-memory", "system"],
    "a version": ["-m", "versions", "-x", "1"],
    "no batch axis": ["-m", "sums", "--input-data", "sums.json"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_perf_analyzer_runs(server: Addresses, perf_analyzer: str, tmp_path: Path, name: str) -> None:
    data = {
        "mlp.json": {"data": [VALUES]},
        "checked.json": {"data": [VALUES], "validation_data": [{"y": [40.0, 50.0]}]},
        "sums.json": {"data": [{"x": {"content": [1, 2, 3], "shape": [3]}}]},
        "count.json": {"data": [{"n": [3]}]},
        "texts.json": {"data": [{"text_input": ["hello"], "repeat": [2]}]},
    }
    for file, content in data.items():
        (tmp_path / file).write_text(json.dumps(content))
    address = server.grpc if "grpc" in RUNS[name] else server.http
    command = [perf_analyzer, "-u", address, *RUNS[name], *SHORT]
    done = subprocess.run([*command, "-f", "table.csv"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with closing((tmp_path / "table.csv").open()) as file:
        (row,) = csv.DictReader(file)
    assert float(row["Inferences/Second"]) > 0, done.stdout
