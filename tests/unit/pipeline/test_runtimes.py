"""Runtimes of model files: selection by file, key and device, sharing, and errors."""

from __future__ import annotations

import logging
import os
import types

import numpy as np
import pytest
from msgspec import structs

from penstock.core.worker.tensor_model import Input
from penstock.errors import ConfigError, LoadFailed
from penstock.pipeline import runtimes
from penstock.pipeline.collate import normalizations
from penstock.pipeline.model_op import ModelOp
from penstock.pipeline.runtimes import OPENVINO, ModelFile, cores, open_program, resolve
from penstock.runtimes import onnx as loaders
from support.files import write_onnx

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")


def write(path, weight=1.0):
    write_onnx(path, ["rows", 4], np.full((3, 4), weight, np.float32), np.zeros(3, np.float32))
    return str(path)


@pytest.fixture
def net(tmp_path):
    return write(tmp_path / "net.onnx")


@pytest.fixture
def has(monkeypatch):
    """`has(loaders.CUDA)` says which providers ONNX Runtime has besides that of the CPU."""

    def set_providers(*providers):
        monkeypatch.setattr(ort, "get_available_providers", lambda: [*providers, loaders.CPU])

    return set_providers


# ---- which


@pytest.mark.parametrize(
    ("runtime", "device", "providers", "expected"),
    [
        ("auto", "cpu", [loaders.TENSORRT, loaders.CUDA], ("cpu", "cpu")),
        ("auto", "cuda:1", [loaders.TENSORRT, loaders.CUDA], ("tensorrt", "cuda:1")),
        ("auto", "cuda:1", [loaders.CUDA], ("cuda", "cuda:1")),
        ("cpu", "cuda:1", [loaders.TENSORRT, loaders.CUDA], ("cpu", "cpu")),
        ("cuda", "cuda:1", [loaders.TENSORRT, loaders.CUDA], ("cuda", "cuda:1")),
        ("tensorrt", "cpu", [loaders.TENSORRT, loaders.CUDA], ("tensorrt", "cuda:0")),
        ("openvino", "cpu", [OPENVINO], ("openvino", "cpu")),
    ],
)
def test_the_runtime_follows_key_and_device(net, has, runtime, device, providers, expected):
    has(*providers)
    assert resolve(ModelFile(net, runtime=runtime), device) == expected


@pytest.mark.parametrize("name", ["net.pt", "net.PTH", "net.pt2", "net.ts"])
def test_pytorch_files_run_in_pytorch(tmp_path, name):
    (tmp_path / name).touch()
    assert resolve(ModelFile(str(tmp_path / name)), "cuda:1") == ("torch", "cuda:1")
    with pytest.raises(ConfigError, match=r"runtime: found cpu for .*, which is a PyTorch file; expected auto"):
        resolve(ModelFile(str(tmp_path / name), runtime="cpu"), "cpu")


def test_pytorch_runs_no_onnx_file(net):
    with pytest.raises(ConfigError, match=r"runtime: found torch for .*, which is an ONNX file; expected auto"):
        resolve(ModelFile(net, runtime="torch"), "cpu")


# ---- files


def test_an_unknown_file_type_of_a_model_is_an_error(tmp_path):
    (tmp_path / "net.trt").write_bytes(b"engine")
    (tmp_path / "net.bin").touch()
    with pytest.raises(
        ConfigError, match=r"found .*net\.trt, expected a file \.onnx.*an engine works with one version"
    ):
        resolve(ModelFile(str(tmp_path / "net.trt")), "cpu")
    with pytest.raises(ConfigError, match=r"found .*net\.bin, expected a file \.onnx, \.pt, \.pth, \.pt2 or \.ts$"):
        resolve(ModelFile(str(tmp_path / "net.bin")), "cpu")
    with pytest.raises(LoadFailed, match=r"is a folder, expected a file such as .*model\.onnx"):
        resolve(ModelFile(str(tmp_path)), "cpu")


def test_an_engine_without_its_model_is_an_error(tmp_path):
    (tmp_path / "net.trt").write_bytes(b"engine")
    wanted = ModelFile(str(tmp_path / "net.onnx"), cache=str(tmp_path / "net.trt"))
    with pytest.raises(LoadFailed, match=r"no file .*net\.onnx; model::cache .*net\.trt alone is not enough"):
        resolve(wanted, "cpu")
    with pytest.raises(LoadFailed, match=r"no file .*net\.onnx$"):
        resolve(structs.replace(wanted, cache=str(tmp_path / "other.trt")), "cpu")


def test_invalid_model_content_is_an_error(tmp_path, net):
    with open(net, "rb") as file:
        whole = file.read()
    for content in (b"", b"no model", whole[: len(whole) // 2]):
        (tmp_path / "bad.onnx").write_bytes(content)
        with pytest.raises(LoadFailed, match=r"bad\.onnx cannot be loaded"):
            open_program(ModelFile(str(tmp_path / "bad.onnx")), "cpu")


def test_a_foreign_file_at_the_engine_cache_causes_one_warning(tmp_path, net, caplog):
    (tmp_path / "net.trt").write_bytes(b"engine")
    for _ in range(2):
        open_program(ModelFile(net, cache=str(tmp_path / "net.trt")), "cpu")
    (record,) = caplog.records
    assert "model=net.trt key=model::cache found='a file from another program'" in record.getMessage()
    assert (tmp_path / "net.trt").read_bytes() == b"engine"


# ---- one program for the instances of a process


def test_instances_on_the_cpu_share_a_session(net, tmp_path):
    first, second = (open_program(ModelFile(net), "cpu").program for _ in range(2))
    assert first is second
    assert open_program(ModelFile(net, threads=2), "cpu").program is not first
    assert open_program(ModelFile(write(tmp_path / "b.onnx")), "cpu").program is not first


@pytest.mark.parametrize(("threads", "instances", "expected"), [(1, 8, 1), (2, 1, 2), (4, 4, 13)])
def test_the_threads_of_all_instances_are_in_the_session_that_they_share(net, gpu, threads, instances, expected):
    """ONNX Runtime runs a call in the thread that makes it, too: 4 callers and 12 helpers are 4 threads for each."""
    open_program(ModelFile(net, threads=threads, instances=instances), "cpu")
    assert gpu[-1] == ("CPU", {"device": "cpu", "graph": None, "threads": expected})


class Beside:
    """A program that notes who ran, and runs `during` calls beside its own."""

    platform, inputs, outputs, rows, unbatched = "", (), (), (1, 9), False

    def __init__(self, name, ran, clock, seconds):
        self.name, self.ran, self.clock, self.seconds = name, ran, clock, seconds
        self.during = None

    def run(self, arrays):
        self.ran.append(self.name)
        self.clock[0] += self.seconds * len(arrays["x"])
        during, self.during = self.during, None
        if during is not None:
            during()
        return arrays


@pytest.fixture
def sharing(monkeypatch):
    """`sharing(seconds, threads)`: a program of two sessions, and the names of those that ran."""

    def make(seconds, threads):
        ran, clock = [], [0.0]
        monkeypatch.setattr(runtimes.time, "monotonic", lambda: clock[0])
        narrow, wide = Beside("one", ran, clock, seconds), Beside("all", ran, clock, seconds / threads)
        return runtimes._CoreSharingProgram(narrow, wide, threads), ran

    return make


X = {"x": np.zeros((1, 4))}


def test_a_call_that_runs_alone_has_all_cores(sharing):
    program, ran = sharing(0.060, 2)
    program.run(X)  # measures
    program.run(X)
    assert ran == ["one", "all"]
    program._wide.during = lambda: program.run(X)
    program.run(X)
    program.run(X)
    assert ran[2:] == ["all", "one", "all"]


def test_calls_share_the_cores_with_those_of_other_models(sharing):
    program, ran = sharing(0.060, 4)
    other, _ = sharing(0.060, 4)
    program.run(X)
    other.run(X)
    other._wide.during = lambda: program.run(X)  # two for two calls
    other.run(X)
    ran.clear()
    runtimes._calls.update({1, 2})
    program.run(X)
    runtimes._calls.clear()
    assert ran == ["one"]


def test_a_short_call_keeps_to_one_core_unless_it_has_many_rows(sharing):
    program, ran = sharing(0.0005, 2)
    for _ in range(3):
        program.run(X)
    program.run({"x": np.zeros((8, 4))})
    program.run(X)
    assert ran == ["one", "one", "one", "all", "one"]


def test_a_failed_call_frees_its_cores(sharing):
    program, ran = sharing(0.060, 2)
    program.run(X)
    program._wide.during = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        program.run(X)
    program.run(X)
    assert ran == ["one", "all", "all"]


@pytest.mark.parametrize(("keys", "expected"), [({}, [1, 2]), ({"threads": 1}, [1]), ({"instances": 1}, [2])])
def test_a_node_of_two_instances_has_a_session_of_all_cores_unless_it_sets_threads(
    net, gpu, monkeypatch, keys, expected
):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    ModelOp(**({"model": net, "instances": 2} | keys)).load("cpu")
    assert [told["threads"] for _, told in gpu] == expected


def test_a_changed_file_is_opened_again(net, tmp_path):
    first = open_program(ModelFile(net), "cpu").program
    write(tmp_path / "new.onnx", 2.0)
    os.utime(tmp_path / "new.onnx", ns=(1, 1))
    os.replace(tmp_path / "new.onnx", net)
    assert open_program(ModelFile(net), "cpu").program is not first


def test_a_session_is_released_with_its_last_instance(net):
    program = open_program(ModelFile(net), "cpu").program
    assert [key for key in runtimes._shared if key[0] == net]
    del program
    assert not [key for key in runtimes._shared if key[0] == net]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_opens_its_own_session(net):
    first = open_program(ModelFile(net), "cpu").program
    read, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write_end, b"own" if not len(runtimes._shared) and first is not None else b"shared")
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"own"
    os.waitpid(child, 0)


def test_cores_are_limited_to_those_of_the_process(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert cores() == 3
    for nonsense in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert cores() == len(os.sched_getaffinity(0))


# ---- precision


def test_an_unsupported_precision_on_the_cpu_causes_one_warning(net, caplog):
    for _ in range(2):
        open_program(ModelFile(net, precision="fp16"), "cpu")
    (record,) = caplog.records
    assert "found='fp16, which the CPU does not have' consequence='it runs in fp32" in record.getMessage()


def test_the_best_precision_is_the_best_available(net, caplog):
    with caplog.at_level(logging.WARNING):
        open_program(ModelFile(net, precision="best"), "cpu")
    assert caplog.records == []


# ---- GPUs, with sessions that stand for theirs


@pytest.fixture
def gpu(monkeypatch, has):
    """ONNX Runtime with CUDA and TensorRT, whose sessions run on the CPU; gives (provider, keys) of what was opened."""
    has(loaders.TENSORRT, loaders.CUDA)
    opened, real = [], loaders.open_session

    def session(path, device="cpu", *, threads=1, providers=None, graph=None):
        told = {"device": device, "graph": graph}
        opened.append(("CUDA", told) if device.startswith("cuda") else ("CPU", told | {"threads": threads}))
        return real(path, graph=graph)

    def tensorrt(path, device, *, graph=None, **keys):
        opened.append(("TensorRT", keys | {"device": device, "graph": graph}))
        return real(path, graph=graph)

    monkeypatch.setattr(loaders, "open_session", session)
    monkeypatch.setattr(loaders, "open_tensorrt", tensorrt)
    return opened


def test_tensorrt_gets_what_the_node_says(net, gpu):
    wanted = ModelFile(net, precision="fp16", cache="net.trt", rows=(2, 8))
    found = open_program(wanted, "cuda:1")
    assert (found.gpu, found.raw) == (True, False)
    ((name, keys),) = gpu
    assert name == "TensorRT"
    assert keys == {
        "precision": "fp16",
        "least_rows": 2,
        "most_rows": 8,
        "cache": "net.trt",
        "device": "cuda:1",
        "graph": None,
    }


def test_each_instance_on_a_gpu_has_a_session(net, gpu):
    assert open_program(ModelFile(net), "cuda:0").program is not open_program(ModelFile(net), "cuda:0").program


def test_cuda_runs_a_model_that_tensorrt_rejects(net, gpu, monkeypatch, caplog):
    def refuse(*args, **keys):
        raise LoadFailed("there is no libnvinfer")

    monkeypatch.setattr(loaders, "open_tensorrt", refuse)
    for _ in range(2):
        assert open_program(ModelFile(net, precision="fp16"), "cuda:0").gpu
    assert [name for name, _ in gpu] == ["CUDA", "CUDA"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "TensorRT does not run it (there is no libnvinfer)" in told[0]
    assert "fp16, which cuda on cuda:0 does not have" in told[1]
    with pytest.raises(LoadFailed, match="no libnvinfer"):
        open_program(ModelFile(net, runtime="tensorrt"), "cuda:0")


def test_best_is_fp16_by_tensorrt(net, gpu, caplog):
    open_program(ModelFile(net, precision="best"), "cuda:0")
    assert gpu[0][1]["precision"] == "fp16"
    assert caplog.records == []


def test_a_graph_of_pixels_is_requested_with_its_inputs(tmp_path, gpu):
    path = write(tmp_path / "net.onnx")
    asked = []

    def normalize(inputs):
        asked.extend(inputs)
        return {}

    assert not open_program(ModelFile(path), "cuda:0", normalize).raw
    assert asked == [Input("x", "FP32", (-1, 4))]
    with pytest.raises(ConfigError, match="the model takes none"):
        open_program(ModelFile(path), "cuda:0", lambda inputs: normalizations(inputs, (1.0,), ()))


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="needs ONNX Runtime without CUDA")
@pytest.mark.parametrize("runtime", ["cuda", "tensorrt", "openvino"])
def test_a_missing_runtime_is_an_error(net, runtime):
    package = "onnxruntime-openvino" if runtime == "openvino" else "onnxruntime-gpu|TensorRT provider"
    with pytest.raises(LoadFailed, match=package):
        open_program(ModelFile(net, runtime=runtime), "cpu")


def test_openvino_is_a_provider_of_its_own(net, has, monkeypatch):
    got = []

    def session(path, options, providers):
        got.append(providers)
        return types.SimpleNamespace(get_providers=lambda: [OPENVINO], get_inputs=list, get_outputs=list)

    has(OPENVINO)
    monkeypatch.setattr(ort, "InferenceSession", session)
    open_program(ModelFile(net, runtime="openvino", threads=3, instances=2), "cpu")
    assert got == [[(OPENVINO, {"device_type": "CPU", "num_of_threads": 6}), loaders.CPU]]
