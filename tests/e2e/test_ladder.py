"""A server whose batches have the sizes of a ladder: what `predict` receives before READY and under load."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = """
    import os
    import time

    import numpy as np
    import penstock
    from penstock.core.worker.tensor_model import ProgramSettings, TensorModel

    def note(name, rows):
        with open(os.path.join(os.environ["NOTES"], name), "a") as file:
            file.write(f"{rows}\\n")

    @penstock.model(sizes=[1, 4, 16])
    class Listed:
        def warmup(self):
            return [1, 2]

        def predict(self, items):
            note("Listed", len(items))
            time.sleep(0.005)
            if "bad" in items:
                raise ValueError("a bad item")
            return [2 * item for item in items]

    @penstock.model(sizes="auto", max_batch_size=12, max_queue=1000)
    class Arrays:
        inputs = {"x": "FP32[-1,2]"}
        outputs = {"y": "FP32[-1]"}

        def predict(self, x):
            note("Arrays", len(x))
            time.sleep(0.005)
            return x.sum(1)

    def open_doubling(settings):
        import torch

        from penstock.runtimes.device import DeviceProgram
        from penstock.runtimes.torch import of_module
        from penstock.types import TensorSpec
        from support.simulated_device import SimulatedDevice

        class Doubling(torch.nn.Module):
            def forward(self, x):
                return x * 2

        device = SimulatedDevice()
        device.capture_fails = {1: RuntimeError("CUDA error: out of memory")}  # of the largest size
        inputs = (TensorSpec("x", "FP32", (-1, 2)),)
        return DeviceProgram(of_module(Doubling(), ProgramSettings(inputs=inputs)), device, graphs=True)

    Graphed = TensorModel(open_doubling, ProgramSettings())

    @penstock.model(sizes=[2, 32])
    class Scarce:
        def warmup(self):
            return []

        def predict(self, items):
            note("Scarce", len(items))
            if len(items) > 2:
                raise MemoryError
            return items
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], notes: Path) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("NOTES", str(notes))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    ports = ["--port", "0", "--set", "server.management_port=0", "--set", "server.metrics_port=0"]
    ports += ["--set", "models.graphed.batching.sizes=[1, 4, 8]"]
    yield serve_all(SOURCE, "Listed", "Arrays", "Graphed", "Scarce", ports=ports)
    patch.undo()


def together(server: Any, model: str, bodies: list[Any]) -> list[tuple[int, bytes]]:
    with ThreadPoolExecutor(24) as pool:
        return list(
            pool.map(lambda body: server.post(f"/predictions/{model.lower()}", json.dumps(body).encode()), bodies)
        )


def sizes(notes: Path, model: str) -> list[int]:
    return [int(line) for line in (notes / model).read_text().splitlines()]


def test_only_listed_sizes_reach_a_model_and_all_of_them_before_it_is_ready(server: Any, notes: Path) -> None:
    warmed = sizes(notes, "Listed")
    assert set(warmed) == {1, 4, 16}
    found = together(server, "Listed", list(range(300)))
    assert [(status, json.loads(body)) for status, body in found] == [(200, 2 * k) for k in range(300)]
    assert set(sizes(notes, "Listed")) == {1, 4, 16}
    assert len(sizes(notes, "Listed")) > len(warmed)


def test_a_bad_item_fails_alone_beside_padding(server: Any, notes: Path) -> None:
    bodies: list[Any] = ["bad" if k % 10 == 3 else k for k in range(60)]
    for body, (status, answer) in zip(bodies, together(server, "Listed", bodies), strict=True):
        assert status == (500 if body == "bad" else 200)
        assert body == "bad" or json.loads(answer) == 2 * body
    assert set(sizes(notes, "Listed")) == {1, 4, 16}


def test_arrays_of_several_rows_are_padded_and_cut(server: Any, notes: Path) -> None:
    assert set(sizes(notes, "Arrays")) == {1, 2, 4, 8, 12}

    def ask(rows: int) -> list[float]:
        x = {"name": "x", "datatype": "FP32", "shape": [rows, 2], "data": [float(k) for k in range(2 * rows)]}
        status, body = server.post("/v2/models/arrays/infer", json.dumps({"inputs": [x]}).encode())
        assert status == 200, body
        found: list[float] = json.loads(body)["outputs"][0]["data"]
        return found

    with ThreadPoolExecutor(16) as pool:
        for k, found in enumerate(pool.map(ask, [1 + k % 30 for k in range(120)])):
            assert found == [4.0 * row + 1 for row in range(1 + k % 30)]
    assert set(sizes(notes, "Arrays")) == {1, 2, 4, 8, 12}


def test_batches_on_a_device_replay_the_graph_of_their_size(server: Any) -> None:
    bodies: list[Any] = [[float(k), 1.0] for k in range(200)]
    for body, (status, answer) in zip(bodies, together(server, "Graphed", bodies), strict=True):
        assert (status, json.loads(answer)) == (200, [2 * body[0], 2.0])
    _, body = server.get("/models/graphed/1", "management")
    found = json.loads(body)["batching"]["graphs"]
    assert found.pop("memory_bytes") > 0
    assert found == {"sizes": [1, 4], "short": [8], "failed": ""}
    assert "graphs_captured model=graphed sizes=(1, 4)" in server.said()
    assert "graphs_out_of_memory model=graphed sizes=(8,)" in server.said()


def test_a_size_that_memory_does_not_allow_is_left_to_smaller_ones(server: Any, notes: Path) -> None:
    assert "sizes_not_warmed model=scarce" in server.said()
    found = together(server, "Scarce", list(range(200)))
    assert [(status, json.loads(body)) for status, body in found] == [(200, k) for k in range(200)]
    assert set(sizes(notes, "Scarce")) == {2, 32}
    _, body = server.get("/models/scarce/1", "management")
    assert json.loads(body)["batching"]["ceiling"] == 2
    assert sizes(notes, "Scarce").count(32) < 10, "the ceiling keeps further batches small"
