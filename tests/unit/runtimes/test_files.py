"""Model files and PyTorch modules as targets of a worker."""

import subprocess
import sys

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import BadRequest, ConfigError, LoadFailed, TargetNotFound
from penstock.serving.protocols.native import JSON
from penstock.types import BatchPart, Item
from support.files import scores, write_onnx

X = [[1.0, 2, 3, 4], [0, 0, 1, 0]]
onnx = pytest.importorskip("onnx")
KINDS = ("net.onnx", "net.ts", "net.pt", "net.pt2")


def opened(target, **keys):
    keys = {"batching": BatchingConfig(max_batch_size=8), **keys}
    spec = WorkerSpec("net", "1", ModelConfig(target="unused:unused", **keys), target)
    return open_model(spec, "cpu")


def run(runner, *items):
    parts: list[BatchPart] = []
    runner.run(1, runner.decode(list(items)), parts.append)
    return parts[-1].results


@pytest.fixture
def in_folder(model_files, monkeypatch):
    monkeypatch.chdir(model_files)
    return model_files


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_a_model(in_folder, name):
    runner, ready = opened(name)
    (single, rows, bad, named) = run(runner, Item(X[0]), Item(np.array(X, np.float32)), Item([1, 2]), Item({"x": X}))
    assert np.allclose(single.body, scores(X[0]), atol=1e-6)
    assert np.allclose(rows.body, scores(X), atol=1e-6)
    assert bad.error is not None
    assert np.allclose(next(iter(named.body.values())), scores(X), atol=1e-6)
    known = name in ("net.onnx", "net.pt2")
    assert isinstance(bad.error, BadRequest) == known
    assert [(i.name, i.datatype, i.shape) for i in ready.metadata.inputs] == [("x", "FP32", (-1, 4))] * known
    assert ready.metadata.platform.startswith(("onnxruntime", "pytorch"))
    runner.close()


@pytest.mark.parametrize("target", ["net.py:Net", "the object"])
def test_a_module_with_weights_is_a_model(in_folder, target):
    if target == "the object":
        import torch

        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
        state = torch.load("weights.pt")
        module.load_state_dict({k.replace("linear.", "0."): v for k, v in state.items()})
        runner, ready = opened(module)
    else:
        runner, ready = opened(target, weights="weights.pt", inputs={"x": "FP32[-1,4]"})
        assert ready.metadata.inputs[0].shape == (-1, 4)
        assert ready.profile, "it was warmed up"
    (answer,) = run(runner, Item(X[0]))
    assert np.allclose(answer.body, scores(X[0]), atol=1e-6)


def test_a_worker_of_a_broker_wraps_a_file(in_folder):
    runner, _ = opened(Wrapped("net.onnx", "penstock.streamer.model:served"), inputs={})
    (answer,) = run(runner, Item(X[0]))
    assert np.allclose(answer.body, scores(X[0]), atol=1e-6)


def test_a_module_with_its_own_predict_is_called_through_it(tmp_path):
    torch = pytest.importorskip("torch")
    own = type("Own", (torch.nn.Module,), {"predict": lambda self, items: [i + 1 for i in items]})
    runner, _ = opened(own)
    assert [r.body for r in run(runner, Item(1), Item(2))] == [2, 3]
    with pytest.raises(ConfigError, match="weights: the target does not take this key"):
        opened(own, weights="weights.pt")


def test_an_http_request_is_checked_item_by_item(in_folder):
    runner, _ = opened("net.onnx")
    data = b'{"inputs":[{"name":"x","shape":%s,"datatype":"FP32","data":[1,2,3,4,0,0,1,0]}]}'
    fine, wrong, plain, image = run(
        runner,
        Item(data % b"[2,4]", codec="oip_json", content_type=JSON),
        Item(data % b"[4,2]", codec="oip_json", content_type=JSON),
        Item(b"[1,2,3,4]", codec="native", content_type=JSON),
        Item(b"\x89PNG", codec="native", content_type="image/png"),
    )
    assert b'"shape":[2,3]' in fine.body
    assert wrong.error.message == "input 'x': shape must be [-1, 4] (-1 is any size), found [4, 2]"
    assert plain.body.startswith(b"[0.")
    assert isinstance(image.error, BadRequest)


@pytest.mark.parametrize("batching", [BatchingConfig(), BatchingConfig(max_batch_size=2)], ids=["auto", "given"])
def test_a_graph_of_one_row_limits_the_batch_size(tmp_path, batching):
    write_onnx(tmp_path / "one.onnx", [1, 4], np.ones((3, 4), np.float32), np.zeros(3, np.float32))
    _, ready = opened(str(tmp_path / "one.onnx"), batching=batching)
    assert ready.options == {"max_batch_size": 1}


def write_softmax(path, shape, axis):
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (h.make_tensor_value_info(name, kind, shape) for name in "xy")
    graph = h.make_graph([h.make_node("Softmax", ["x"], ["y"], axis=axis)], "g", [x], [y])
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


@pytest.mark.parametrize(
    ("shape", "axis", "rows", "unbatched", "coupled"),
    [
        (["n", 3], 0, "auto", True, True),
        (["n"], 0, "auto", True, True),
        (["n", 3], 1, "auto", False, False),
        (["n", 3], 0, "axis0", False, False),
        (["n", 3], 1, "none", True, False),
        ([8, 3], 1, "auto", True, False),
        ([8, 3], 1, "axis0", False, False),
        ([1, 3], 0, "auto", False, False),
    ],
)
def test_a_worker_says_whether_axis_0_is_rows(tmp_path, shape, axis, rows, unbatched, coupled):
    path = write_softmax(tmp_path / "softmax.onnx", shape, axis)
    runner, ready = opened(path, batching=BatchingConfig(rows=rows, max_batch_size=16))
    assert (ready.metadata.unbatched, bool(ready.coupled)) == (unbatched, coupled)
    assert runner.metadata == ready.metadata
    given = np.arange(24, dtype=np.float32).reshape(8, 3) if len(shape) > 1 else np.arange(8, dtype=np.float32)
    e = np.exp(given - given.max(axis, keepdims=True))
    (found,) = run(runner, Item({"x": given}))
    if shape[0] != 1:
        assert np.allclose(found.body["y"], e / e.sum(axis, keepdims=True), atol=1e-6)


def test_a_model_whose_floats_are_indices_is_warmed_up(tmp_path):
    h, kind = onnx.helper, onnx.TensorProto
    x, y = (h.make_tensor_value_info(name, kind.FLOAT, ["n", 50]) for name in "xy")
    table = h.make_tensor("table", kind.FLOAT, [1], [2.0])
    nodes = [h.make_node("Cast", ["x"], ["i"], to=kind.INT64), h.make_node("Gather", ["table", "i"], ["y"])]
    model = h.make_model(h.make_graph(nodes, "g", [x], [y], [table]), opset_imports=[h.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "table.onnx")
    assert opened(str(tmp_path / "table.onnx"))[1].profile


def test_a_file_of_unknown_shapes_is_batched_by_shape(in_folder):
    _, ready = opened("net.ts")
    assert ready.options == {"bucket": "shape"}
    _, ready = opened("net.ts", inputs={"x": "FP32[-1,4]"})
    assert ready.options == {}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_precision_and_optimisation_reach_the_module(in_folder, precision):
    runner, _ = opened("net.ts", precision=precision, optimize="optimize_for_inference", inputs={"x": "FP32[-1,4]"})
    (answer,) = run(runner, Item(X[0]))
    assert answer.body.dtype == np.float32
    assert 1e-6 < np.abs(answer.body - scores(X[0])).max() < 4e-2


@pytest.mark.parametrize(
    ("target", "keys", "error", "message"),
    [
        ("nowhere.onnx", {}, LoadFailed, "there is no file nowhere.onnx"),
        ("nowhere.pt", {}, LoadFailed, "there is no file nowhere.pt"),
        ("nowhere.py:Net", {"weights": "weights.pt"}, TargetNotFound, "there is no file nowhere.py"),
        ("net.py:Net", {"weights": "nowhere.pt"}, LoadFailed, "there is no file nowhere.pt"),
        ("weights.pt", {}, LoadFailed, "holds a state dict"),
        ("whole.pt", {}, LoadFailed, 'trust = "pickle"'),
        ("net.onnx", {"weights": "weights.pt"}, ConfigError, "found with the target net.onnx"),
        ("net.onnx", {"inputs": {"x": "FP32[-1,4]"}}, ConfigError, "inputs: an ONNX graph declares its own inputs"),
        (
            "net.pt2",
            {"inputs": {"x": "FP32[-1,4]"}},
            ConfigError,
            "inputs: an exported program declares its own inputs",
        ),
        ("net.py:NET", {}, TargetNotFound, "has no 'NET'"),
        ("net.ts", {"inputs": {"x": "BYTES[-1]"}}, ConfigError, "found BYTES, but PyTorch has no string tensors"),
        ("math:sin", {"weights": "weights.pt"}, ConfigError, "weights: the target does not take this key"),
        ("math:sin", {"inputs": {"x": "FP32[-1,4]"}}, LoadFailed, r"found predict\(x, /\) for the inputs x"),
        ("net.ts", {"outputs": {"y": "FP32[-1,3]"}}, ConfigError, "outputs: a model file or module names its outputs"),
        ("net.onnx", {"precision": "bf16"}, ConfigError, "fp32|bf16 needs"),
        ("net.ts", {"inputs": {"x": "FP32[-1,5]"}}, LoadFailed, "fails on its own warm-up items"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_reported(in_folder, target, keys, error, message):
    with pytest.raises(error, match=message):
        opened(target, **keys)


def test_a_pickled_module_is_loaded_when_it_is_trusted(in_folder):
    runner, _ = opened("whole.pt", trust="pickle")
    assert run(runner, Item(X[0]))[0].body.shape == (3,)


def test_the_threads_of_the_configuration_reach_pytorch(in_folder):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    try:
        opened("net.ts", threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_file_loads_the_runtime_that_it_needs_and_no_other(in_folder):
    code = (
        "import sys; from penstock.core.worker.main import open_model;"
        "from penstock.core.worker.spec import WorkerSpec;"
        "from penstock.config.schema import ModelConfig;"
        "open_model(WorkerSpec('m', '1', ModelConfig(target='t'), 'net.onnx'), 'cpu');"
        "print('torch' in sys.modules, 'onnxruntime' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("name", ["net.onnx", "net.pt", "net.pt2"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n")
    with pytest.raises(LoadFailed, match=f"{name} is a pointer of Git LFS, not the file itself: run git lfs pull"):
        opened(str(tmp_path / name))
