"""Graphs of a model that a worker loads onto a (simulated) device: which ones it captures, and what it says of them."""

import logging

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.core.worker.tensor_model import ProgramSettings, TensorModel
from penstock.errors import ConfigError
from penstock.runtimes import cuda, onnx
from penstock.runtimes import torch as loaders
from penstock.runtimes.device import DeviceProgram
from penstock.runtimes.graphs import difference
from penstock.runtimes.torch import of_module, on_device
from penstock.types import BatchPart, Graphs, Item, TensorSpec
from support.simulated_device import SimulatedDevice

torch = pytest.importorskip("torch")

SPECS = (TensorSpec("x", "FP32", (-1, 2)),)


class Doubling(torch.nn.Module):
    rows = 0  # of the last call

    def forward(self, x):
        Doubling.rows = len(x)
        return x * 2


class Mixing(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.fixture
def device():
    return SimulatedDevice(copy_s=0.0, launch_s=0.0, kernels_s=lambda rows: 1e-3 + 5e-5 * rows)


def opened(device, module=None, specs=SPECS, optimize=None, **batching):
    def open_program(settings):
        return DeviceProgram(of_module(module or Doubling(), ProgramSettings(inputs=specs)), device, graphs=True)

    config = ModelConfig(target="m:m", optimize=optimize, batching=BatchingConfig(**batching))
    return open_model(WorkerSpec("m", "1", config, TensorModel(open_program, ProgramSettings())), "cuda:0")


def size_of(runner, rows):
    """The rows of the call for so many rows."""
    parts: list[BatchPart] = []
    runner.run(0, runner.decode([Item(np.full((rows, 2), 3, "f4"))]), parts.append)
    assert (parts[-1].results[0].body == 6).all()
    return Doubling.rows


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "penstock")
    return lambda: [(r.levelname, r.message) for r in caplog.records if r.message.startswith("graphs_")]


@pytest.mark.parametrize("most", [12, "auto"])
def test_every_size_has_a_graph_before_the_model_is_ready(device, said, most):
    runner, ready = opened(device, max_batch_size=most)
    assert ready.graphs == Graphs(ready.sizes, device.held_bytes())
    assert said() == [("INFO", f"graphs_captured model=m sizes={ready.sizes} bytes={device.held_bytes()}")]
    assert len(ready.sizes) > 3
    assert {rows for rows, _ in ready.profile} == set(ready.sizes)
    captures = device.captures
    for rows in (1, 3, ready.sizes[-1]):
        replays = device.replays
        assert size_of(runner, rows) == next(n for n in ready.sizes if n >= rows)
        assert device.replays == replays + 1
    assert device.captures == captures == len(ready.sizes)


def test_sizes_that_leave_the_ladder_leave_the_graphs(device, said):
    device = SimulatedDevice(copy_s=0.0, launch_s=0.0, kernels_s=lambda rows: 0.0, most_bytes=6 * 8)
    _, ready = opened(device, sizes=(1, 4, 16, 64))
    assert ready.sizes == (1, 4)
    assert ready.graphs.sizes == (1, 4)


def test_a_size_without_memory_for_its_graph_runs_without_one(device, said):
    device.capture_fails = {1: MemoryError("full")}
    runner, ready = opened(device, sizes=(1, 4, 16))
    assert (ready.sizes, ready.graphs.sizes, ready.graphs.short) == ((1, 4, 16), (1, 4), (16,))
    assert said()[1] == (
        "WARNING",
        "graphs_out_of_memory model=m sizes=(16,): there is no memory for their graphs, and their kernels are launched"
        " one by one",
    )
    assert size_of(runner, 16) == 16


def test_a_network_that_cannot_be_captured_says_why_once(device, said):
    device.capture_fails = {1: RuntimeError("CUDA error: operation not permitted when stream is capturing")}
    runner, _ = opened(device, sizes=(1, 4, 16))
    assert said() == [
        (
            "WARNING",
            "graphs_failed model=m why='RuntimeError: CUDA error: operation not permitted when stream is capturing':"
            " its kernels are launched one by one",
        )
    ]
    assert size_of(runner, 3) == 4
    assert device.replays == 0


@pytest.mark.parametrize(
    ("module", "specs", "batching"),
    [
        (None, (TensorSpec("x", "FP32", (-1, -1)),), {"max_batch_size": 8}),
        (None, SPECS, {"sizes": "any"}),
        (None, SPECS, {"rows": "none"}),
        (Mixing(), SPECS, {}),
    ],
    ids=["open shapes", "any size", "no rows", "rows that depend on each other"],
)
@pytest.mark.parametrize("optimize", [None, "graph"])
def test_only_who_asked_for_graphs_is_warned_where_there_can_be_none(device, said, module, specs, batching, optimize):
    _, ready = opened(device, module, specs, optimize, **batching)
    assert ready.graphs == Graphs()
    assert device.held_bytes() == 0
    ((level, text),) = said()
    assert level == ("INFO" if optimize is None else "WARNING")
    assert text.startswith("graphs_none model=m: they need inputs of fixed shapes and batching.sizes")


@pytest.mark.parametrize(("optimize", "graphs"), [(None, True), ("graph", True), ("none", False), ("compile", False)])
def test_graphs_are_the_default_on_a_device(monkeypatch, device, optimize, graphs):
    monkeypatch.setattr(cuda, "CudaDevice", lambda name: device)
    program = of_module(Doubling(), ProgramSettings(inputs=SPECS))
    assert on_device(program, "cpu", graphs=True) is program
    settings = ProgramSettings(device="cuda:0", optimize=optimize, inputs=SPECS)
    monkeypatch.setattr(loaders, "prepare", lambda module, *_, **__: module)  # it would move it to the device
    found = of_module(Doubling(), settings).capture({2})
    assert found == (Graphs((2,), device.held_bytes()) if graphs else None)


def test_graphs_are_refused_where_there_are_none():
    with pytest.raises(ConfigError, match=r"optimize: found graph, which is for model files .* not for cpu; leave it"):
        of_module(Doubling(), ProgramSettings(optimize="graph"))
    with pytest.raises(ConfigError, match="optimize: found graph, which is for PyTorch models; leave it out"):
        onnx.compiled("cuda:0", "fp32", "graph")


def test_floats_may_differ_by_the_order_of_sums_and_nothing_else_may():
    y, k = np.array([1.0, -50, np.nan, np.inf], "f4"), np.array([1, 2])
    given = {"y": y, "k": k}
    assert difference({"y": y + np.float32(0.4), "k": k}, given) is None
    assert difference({"y": y + 1, "k": k}, given) == "y"
    assert difference({"y": np.nan_to_num(y), "k": k}, given) == "y"
    assert difference({"y": y.astype("f8"), "k": k}, given) == "y"
    assert difference({"y": y[:3], "k": k}, given) == "y"
    assert difference({"y": y, "k": k + 1}, given) == "k"
    assert difference({"y": y}, given) == difference(given, {"y": y}) == "k"
