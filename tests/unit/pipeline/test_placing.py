"""Where nodes run that leave it open."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.errors import LoadFailed
from penstock.pipeline import placing
from penstock.pipeline.graph import Graph, Node, Step
from penstock.pipeline.placing import placed


def device_of(device: str = "auto", **params: object) -> str:
    node = Node("net", (Step("Mat2Tensor"), Step("OnnxTensor", params)), device=device)
    return placed(Graph("g", {"net": node}, "net")).nodes["net"].device


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The providers of an ONNX Runtime on a machine with a GPU."""
    found = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(placing, "visible_gpus", lambda: 1)
    monkeypatch.setattr(placing, "import_onnxruntime", lambda: SimpleNamespace(get_available_providers=lambda: found))
    return found


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "visible_gpus", lambda: 0)
    assert device_of(model="net.onnx") == "cpu"
    assert device_of("cuda:1", model="net.onnx") == "cuda:1"


def test_a_gpu_is_taken_where_the_runtime_can_use_it(
    providers: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert device_of(model="net.onnx") == "cuda:0"
    assert device_of("cpu", model="net.onnx") == "cpu"
    assert device_of(model="net.onnx", runtime="openvino") == "cpu"
    assert not caplog.records
    providers.remove("CUDAExecutionProvider")
    assert device_of(model="net.onnx") == "cpu"
    assert "the GPU is used where onnxruntime-gpu is installed" in caplog.text


def test_files_of_pytorch_ask_pytorch(providers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, device in ((True, "cuda:0"), (False, "cpu")):
        torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda usable=usable: usable))
        monkeypatch.setattr(placing, "import_torch", lambda torch=torch: torch)
        assert device_of(model="net.pt") == device


def test_a_runtime_that_is_not_there_is_the_nodes_own_error(
    providers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise LoadFailed("not installed")

    monkeypatch.setattr(placing, "import_onnxruntime", missing)
    assert device_of(model="net.onnx") == "cpu"


def instances_of(*steps: Step, device: str = "auto") -> int:
    node = Node("n", steps, device=device, instances=8)
    return placed(Graph("g", {"n": node}, "n")).nodes["n"].instances


def test_what_only_computes_on_the_cpu_has_no_more_instances_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "visible_gpus", lambda: 0)
    monkeypatch.setattr(placing, "cores", lambda: 3)
    image, net = Step("DecodeMat"), Step("OnnxTensor", {"model": "net.onnx"})
    assert instances_of(image) == instances_of(Step("Mat2Tensor"), net) == 3
    assert instances_of(net, device="cuda:0") == 8
    for waits in (Step("Sleep"), Step("Python", {"target": "pkg.mod:obj"})):
        assert instances_of(image, waits) == 8
    monkeypatch.setattr(placing, "cores", lambda: 16)
    assert instances_of(image) == 8
