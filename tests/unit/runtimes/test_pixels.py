"""Images for every kind of model file, and tables that do not fit a file."""

import warnings

import numpy as np
import pytest

from penstock.config.schema import BatchingConfig, InputConfig, ModelConfig
from penstock.core.worker.main import open_model
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError
from penstock.types import BatchPart, Item, TensorSpec

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")
KINDS = ("net.onnx", "net.ts", "net.pt2", "module")
MEAN, STD = (100.0, 50.0, 25.0), 2.0
TABLE = InputConfig(datatype="UINT8", shape=(-1, 4, 2, -1), layout="NHWC", mean=MEAN, std=STD)


class Net(torch.nn.Module):
    def forward(self, x):
        return x.flatten(2).sum(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, x = tmp_path_factory.mktemp("images"), torch.zeros(2, 3, 4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.script(Net()).save(str(folder / "net.ts"))
        rows = torch.export.Dim("rows", min=1, max=512)
        torch.export.save(torch.export.export(Net(), (x,), dynamic_shapes=({0: rows},)), folder / "net.pt2")
    for name, kind, shape in (
        ("net", "FLOAT", ["n", 3, 4, 2]),
        ("half", "FLOAT16", ["n", 3, 4, 2]),
        ("ids", "INT64", ["n", 7]),
    ):
        h, kind = onnx.helper, getattr(onnx.TensorProto, kind)
        x, y = h.make_tensor_value_info("x", kind, shape), h.make_tensor_value_info("y", kind, None)
        axes = h.make_tensor("axes", onnx.TensorProto.INT64, [2], [2, 3])
        node = (
            h.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
            if name != "ids"
            else h.make_node("Identity", ["x"], ["y"])
        )
        graph = h.make_graph([node], "g", [x], [y], [axes])
        onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), folder / f"{name}.onnx")
    return folder


def opened(folder, name, inputs):
    config = ModelConfig(target="unused:unused", inputs=inputs, batching=BatchingConfig(max_batch_size=8))
    return open_model(WorkerSpec("net", "1", config, Net if name == "module" else str(folder / name)), "cpu")


@pytest.mark.parametrize("name", [*KINDS, "half.onnx"])
def test_every_kind_of_file_takes_pixels(folder, name):
    runner, ready = opened(folder, name, {"x": TABLE})
    assert ready.metadata.inputs == (TensorSpec("x", "UINT8", (-1, 4, 2, 3)),)
    assert ready.profile, "it was warmed up"
    assert not ready.coupled
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 2, 3), np.uint8)
    parts: list[BatchPart] = []
    runner.run(
        1, runner.decode([Item(images[:2]), Item(images[2].tolist()), Item(images.astype(np.float32))]), parts.append
    )
    several, single, wrong = parts[-1].results
    expected = ((images - np.array(MEAN)) / STD).sum((1, 2))
    near = {"rtol": 2e-3, "atol": 1} if name == "half.onnx" else {"atol": 1e-3}
    assert np.allclose(several.body, expected[:2], **near)
    assert np.allclose(single.body, expected[2], **near)
    assert wrong.error.message == "input 'x': datatype must be UINT8, found FP32"
    runner.close()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_pixels_are_normalised_in_full_precision(folder, precision):
    """Values such as 40000 are beyond FP16 until they are normalised."""
    table = InputConfig(datatype="FP32", layout="NCHW", mean=40000.0, std=10000.0)
    config = ModelConfig(target="unused:unused", inputs={"x": table}, precision=precision)
    runner, _ = open_model(WorkerSpec("net", "1", config, Net), "cpu")
    parts: list[BatchPart] = []
    runner.run(1, runner.decode([Item(np.full((1, 1, 1, 2), 70000, np.float32))]), parts.append)
    assert parts[-1].results[0].body.tolist() == [[6]]


@pytest.mark.parametrize(
    ("name", "inputs", "told"),
    [
        ("net.onnx", {"image": TABLE}, "inputs.image: the model has no such input; it has x"),
        (
            "net.pt2",
            {"x": InputConfig(datatype="UINT8", layout="NCHW", shape=(-1, 3, 9, 9))},
            r"\[-1, 3, 4, 2\] in the layout",
        ),
        ("net.onnx", {"x": InputConfig(datatype="UINT8", layout="NHWC", mean=(1.0, 2.0))}, r"NHWC \[-1, 4, 2, 3\]"),
        (
            "ids.onnx",
            {"x": InputConfig(datatype="UINT8", layout="NHWC")},
            "images become floats, but the network takes INT64",
        ),
        (
            "net.onnx",
            {"x": TABLE, "y": "FP32[-1]"},
            "inputs: an ONNX graph declares its own inputs; leave the key out, except",
        ),
        ("net.ts", {"x": InputConfig(datatype="UINT8", layout="NHWC", std=0.0)}, "inputs.x.std: found"),
    ],
)
def test_a_table_that_does_not_fit_a_file_fails_the_load(folder, name, inputs, told):
    with pytest.raises(ConfigError, match=told):
        opened(folder, name, inputs)


def test_a_python_model_normalises_its_images_itself():
    config = ModelConfig(target="unused:unused", inputs={"x": TABLE})
    with pytest.raises(
        ConfigError, match=r"inputs.x.layout: found for a Python model, which receives images as clients"
    ):
        open_model(WorkerSpec("net", "1", config, lambda x: x), "cpu")
