"""Devices, instances and chains of nodes on this machine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock import metrics
from penstock.errors import LoadFailed
from penstock.pipeline import node
from penstock.pipeline.engine import FLUSH_S
from penstock.pipeline.graph import Graph, Node, NodeStep
from penstock.pipeline.load import parse_graph
from penstock.pipeline.node import placed


def device_of(device: str = "auto", **params: object) -> str:
    node = Node("net", (NodeStep("Mat2Tensor"), NodeStep("OnnxTensor", params)), device=device)
    return placed(Graph("g", {"net": node}, "net")).nodes["net"].device


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The providers of an ONNX Runtime on a machine with a GPU."""
    found = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(node, "visible_gpus", lambda: 1)
    monkeypatch.setattr(node, "import_onnxruntime", lambda: SimpleNamespace(get_available_providers=lambda: found))
    return found


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "visible_gpus", lambda: 0)
    assert device_of(model="net.onnx") == "cpu"
    assert device_of("cuda:1", model="net.onnx") == "cuda:1"


def test_a_gpu_is_used_if_the_runtime_supports_it(providers: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert device_of(model="net.onnx") == "cuda:0"
    assert device_of("cpu", model="net.onnx") == "cpu"
    assert device_of(model="net.onnx", runtime="openvino") == "cpu"
    assert not caplog.records
    providers.remove("CUDAExecutionProvider")
    assert device_of(model="net.onnx") == "cpu"
    assert "install onnxruntime-gpu to use the GPU" in caplog.text


def test_placement_of_pytorch_files_asks_pytorch(providers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, device in ((True, "cuda:0"), (False, "cpu")):
        torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda usable=usable: usable))
        monkeypatch.setattr(node, "import_torch", lambda torch=torch: torch)
        assert device_of(model="net.pt") == device
        tables = {"decode": {"ops": ["DecodeTensor"], "next": "crop"}, "crop": {"ops": ["CropTensor"]}}
        nodes = placed(parse_graph(tables, name="g", folder=".")).nodes
        assert (nodes["decode"].device, nodes["crop"].device) == (device, "cpu")


def test_a_missing_runtime_is_an_error_of_the_node(providers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LoadFailed("not installed")

    monkeypatch.setattr(node, "import_onnxruntime", missing)
    assert device_of(model="net.onnx") == "cpu"


def instances_of(*steps: NodeStep, device: str = "auto") -> int:
    node = Node("n", steps, device=device, instances=8)
    return placed(Graph("g", {"n": node}, "n")).nodes["n"].instances


def test_nodes_that_only_compute_have_at_most_one_instance_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "visible_gpus", lambda: 0)
    monkeypatch.setattr(node, "cores", lambda: 3)
    image, net = NodeStep("DecodeMat"), NodeStep("OnnxTensor", {"model": "net.onnx"})
    assert instances_of(image) == instances_of(NodeStep("Mat2Tensor"), net) == 3
    assert instances_of(net, device="cuda:0") == 8
    for waits in (NodeStep("Sleep"), NodeStep("SaveMat"), NodeStep("Python", {"target": "pkg.mod:obj"})):
        assert instances_of(image, waits) == 8
    monkeypatch.setattr(node, "cores", lambda: 16)
    assert instances_of(image) == 8


cv2: Any = pytest.importorskip("cv2")

DECODE = NodeStep("DecodeMat")
RESIZE = NodeStep("ResizeMat", {"resize_h": 8, "resize_w": 6})
CROP = NodeStep("CropMat")  # fails without a box
TENSOR = NodeStep("Mat2Tensor")
PNG = cv2.imencode(".png", np.random.default_rng(1).integers(0, 255, (20, 30, 3), np.uint8))[1].tobytes()
TWO = {"instances": 2}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "cores", lambda: 2)


def preparing(make_graph: Any, **more: Any) -> Any:
    nodes = {"decode": (DECODE, "prepare", TWO), "prepare": ((RESIZE, TENSOR), "words", TWO), "words": "Shape"}
    return make_graph(nodes, **more)


@pytest.fixture(autouse=True)
def shape() -> None:
    from penstock.pipeline.ops import catalog
    from penstock.pipeline.ops.base import ItemOp

    class Shape(ItemOp):
        def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
            return f"{list(data.shape)} {int(data.sum())}"

    catalog.register("Shape", Shape)


# ---- which


def test_image_ops_on_the_cpu_run_in_the_same_call(make_graph: Any) -> None:
    graph = preparing(make_graph)
    assert node.chain(graph, "decode") == ("prepare",)
    assert node.chain(graph, "prepare") == ()  # what follows is a user's, and may wait for something
    three = {"a": (DECODE, "b", TWO), "b": (RESIZE, "c", TWO), "c": TENSOR}
    assert node.chain(make_graph(three), "a") == ("b", "c")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"instances": 1}, {}),  # two threads decode and resize at once where one is too few for the cores
        ({"device": "cuda:0"}, {}),
        ({"on_error": "skip"}, {}),
        ({}, {"on_error": "skip"}),
        ({}, {"filter": "or"}),
        ({}, {"queue": 4}),
        ({}, {"deadline_s": 1.0}),
        ({}, {"run_timeout_s": 1.0}),
        ({}, {"device": "cuda:0"}),
        ({}, {"bucket": ("data.shape",)}),
        ({}, {"pad_to": (32,)}),
        ({}, {"inputs": [("a", "result", "data")]}),
    ],
)
def test_a_node_that_needs_its_own_instances_is_not_chained(
    make_graph: Any, first: dict[str, Any], second: dict[str, Any]
) -> None:
    graph = make_graph({"a": (DECODE, "b", {**TWO, **first}), "b": (RESIZE, {**TWO, **second})})
    assert node.chain(graph, "a") == ()


def test_nodes_of_branches_have_calls_of_their_own(make_graph: Any) -> None:
    nodes = {
        "a": (DECODE, "b c", TWO),
        "b": (RESIZE, "d", TWO),
        "c": (RESIZE, "d", TWO),
        "d": (TENSOR, {"inputs": [("b", "result", "data"), ("c", "result", "other")]}),
    }
    graph = make_graph(nodes)
    assert [node.chain(graph, name) for name in nodes] == [(), (), (), ()]


def test_a_node_whose_fields_are_used_later_is_not_chained(make_graph: Any) -> None:
    nodes = {
        "a": (DECODE, "b", TWO),
        "b": (RESIZE, "c", TWO),
        "c": (TENSOR, {"inputs": [("a", "result", "whole"), ("b", "result", "data")]}),
    }
    assert node.chain(make_graph(nodes), "a") == ()


# ---- how


async def test_results_are_those_of_nodes_with_calls_of_their_own(
    stage: Any, make_graph: Any, monkeypatch: Any
) -> None:
    s = await stage(preparing(make_graph))
    assert s.runner.node("decode").chained is s.runner.node("prepare")
    found = await s.results(*[PNG] * 5, b"no image", PNG)
    monkeypatch.setattr(node, "cores", lambda: 99)
    apart = await stage(preparing(make_graph))
    assert apart.runner.node("decode").chained is None
    assert await apart.results(*[PNG] * 5, b"no image", PNG) == found
    assert found[0].startswith("[1, 3, 8, 6] ")
    assert found[5] == "undecodable"


async def test_a_trace_contains_each_node(stage: Any, make_graph: Any) -> None:
    s = await stage(preparing(make_graph, trace=True))
    outcomes = await asyncio.gather(*[s.put(PNG) for _ in range(3)])
    for outcome in outcomes:
        assert [hop.node for hop in outcome.hops] == ["decode", "prepare", "words"]
        assert all(hop.wait_s >= 0 and hop.run_s >= 0 for hop in outcome.hops)
        assert outcome.hops[0].size == outcome.hops[1].size


async def test_a_failed_item_has_its_node_and_its_fields(stage: Any, make_graph: Any) -> None:
    nodes = {"decode": (DECODE, "crop", TWO), "crop": (CROP, "tensor", TWO), "tensor": (TENSOR, "", TWO)}
    s = await stage(make_graph(nodes, trace=True))
    future = s.send({"data": PNG, "_box": (2, 3, 12, 10)})
    bad, good = await asyncio.gather(s.put(PNG), future)
    assert good.fields["result"].shape == (1, 3, 7, 10)
    assert (bad.node, bad.fields["data"]) == ("crop", PNG)
    assert bad.fields["result"].shape == (20, 30, 3)
    assert bad.error.detail.startswith("node 'crop', op 'CropMat'")
    assert [hop.node for hop in bad.hops] == ["decode"]


async def test_an_item_may_begin_at_such_a_node(stage: Any, make_graph: Any) -> None:
    s = await stage(preparing(make_graph, trace=True))
    outcome = await s.put(np.zeros((4, 4, 3), np.uint8), node="prepare")
    assert outcome.fields["result"] == "[1, 3, 8, 6] 0"
    assert [hop.node for hop in outcome.hops] == ["prepare", "words"]


async def test_items_and_batches_are_counted_where_they_were(stage: Any) -> None:
    metrics.drain()
    s = await stage({"decode": (DECODE, "crop", TWO), "crop": (CROP, "", TWO)})
    future = s.send({"data": PNG, "_box": (2, 3, 12, 10)})
    await asyncio.gather(s.put(PNG), s.put(b"no image"), future)
    await asyncio.sleep(2 * FLUSH_S)
    found = {(d.name, *sorted(d.labels.values())): d.value for d in metrics.drain() or []}
    assert found["pipeline_items_total", "decode", "ok"] == 2
    assert found["pipeline_items_total", "decode", "failed"] == 1
    assert found["pipeline_items_total", "crop", "ok"] == 1
    assert found["pipeline_items_total", "crop", "failed"] == 1
    assert sum(value for key, value in found.items() if key[0] == "pipeline_batches_total" and "crop" in key) == 1


async def test_a_slow_next_node_limits_the_first_chained_node(stage: Any, doors: Any) -> None:
    s = await stage(
        {
            "decode": (DECODE, "prepare", TWO),
            "prepare": (TENSOR, "slow", TWO),
            "slow": (NodeStep("Door", {"gate": "g"}), {"queue": 3}),
        }
    )
    futures = [s.put(PNG) for _ in range(20)]
    await doors.until("g", 1)
    await asyncio.sleep(0.1)
    slow = s.runner.node("slow").engine
    assert slow.queued_rows <= 3
    assert s.runner.node("decode").engine.queued_rows >= 20 - 3 - 1 - 2
    doors.open_all()
    outcomes = await asyncio.wait_for(asyncio.gather(*futures), 20)
    assert all(outcome.error is None for outcome in outcomes)
