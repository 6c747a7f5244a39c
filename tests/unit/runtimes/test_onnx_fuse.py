"""Pixel normalization inside an ONNX graph."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from penstock.errors import LoadFailed
from penstock.runtimes import onnx as loaders
from penstock.runtimes.onnx import RAW, normalised, plain_input
from penstock.runtimes.tensor_model import Input

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

KINDS = onnx.TensorProto
MEAN = np.array([123.675, 116.28, 103.53]).reshape(1, 3, 1, 1)
SCALE = 1 / np.array([58.395, 57.12, 57.375]).reshape(1, 3, 1, 1)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5)).astype(np.uint8)


def write(path, nodes, *, kind=KINDS.FLOAT, inputs=("x",), weights=(), **keys):
    h = onnx.helper
    shape = ["N", 3, 4, 5]
    graph = h.make_graph(
        nodes, "g", [h.make_tensor_value_info(n, kind, shape) for n in inputs],
        [h.make_tensor_value_info("y", kind, None)], list(weights),
    )  # fmt: skip
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, **keys)
    return str(path)


def node(op, inputs, outputs, **keys):
    return onnx.helper.make_node(op, inputs, outputs, **keys)


def run(path, graph, **feeds):
    return loaders.open_session(path, graph=graph).run(None, feeds)[0]


def constants(inputs):
    return {i.name: (MEAN, SCALE) for i in inputs}


def test_the_graph_normalizes_pixels(tmp_path):
    path = write(tmp_path / "a.onnx", [node("Identity", ["x"], ["y"])])
    graph = normalised(path, constants)
    (spec,) = loaders.OnnxProgram(loaders.open_session(path, graph=graph)).inputs
    assert spec == Input("x" + RAW, "UINT8", (-1, 3, 4, 5))
    assert plain_input(spec) == Input("x", "FP32", (-1, 3, 4, 5))
    found = run(path, graph, x__uint8=PIXELS)
    assert np.allclose(found, (PIXELS - MEAN) * SCALE, atol=1e-6)
    plain = run(path, None, x=((PIXELS.astype(np.float32) - np.float32(MEAN)) * np.float32(SCALE)))
    assert np.array_equal(found, plain)


def test_only_named_inputs_are_changed(tmp_path):
    path = write(tmp_path / "a.onnx", [node("Sub", ["x", "z"], ["y"])], inputs=("x", "z"))
    graph = normalised(path, lambda inputs: {inputs[0].name: (MEAN, SCALE)})
    zeros = np.zeros((2, 3, 4, 5), np.float32)
    assert np.allclose(run(path, graph, x__uint8=PIXELS, z=zeros), (PIXELS - MEAN) * SCALE, atol=1e-6)
    assert normalised(path, lambda inputs: {}) is None


def test_a_graph_of_fp16_gets_fp16(tmp_path):
    path = write(tmp_path / "a.onnx", [node("Identity", ["x"], ["y"])], kind=KINDS.FLOAT16)
    found = run(path, normalised(path, constants), x__uint8=PIXELS)
    assert found.dtype == np.float16
    assert np.allclose(found, (PIXELS - MEAN) * SCALE, atol=2e-3)


def test_inputs_of_an_inner_graph_are_normalized_too(tmp_path):
    h = onnx.helper
    one = h.make_graph([node("Identity", ["x"], ["i"])], "one", [], [h.make_tensor_value_info("i", KINDS.FLOAT, None)])
    two = h.make_graph([node("Neg", ["x"], ["i"])], "two", [], [h.make_tensor_value_info("i", KINDS.FLOAT, None)])
    yes = onnx.numpy_helper.from_array(np.array(True), "yes")
    path = write(tmp_path / "a.onnx", [node("If", ["yes"], ["y"], then_branch=one, else_branch=two)], weights=[yes])
    assert np.allclose(run(path, normalised(path, constants), x__uint8=PIXELS), (PIXELS - MEAN) * SCALE, atol=1e-6)


def test_weights_are_not_inputs(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((1, 3, 4, 5), np.float32), "w")
    path = write(tmp_path / "a.onnx", [node("Mul", ["x", "w"], ["y"])], inputs=("x", "w"), weights=[weight])
    seen = []
    normalised(path, lambda inputs: seen.extend(inputs) or {})
    assert [i.name for i in seen] == ["x"]


def test_a_graph_with_external_weights_is_not_changed(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((1, 3, 4, 5), np.float32), "w")
    path = write(
        tmp_path / "a.onnx", [node("Mul", ["x", "w"], ["y"])], weights=[weight],
        save_as_external_data=True, location="a.bin", size_threshold=0,
    )  # fmt: skip
    assert (tmp_path / "a.bin").exists()
    assert normalised(path, constants) is None


def test_without_the_package_onnx_nothing_is_changed(tmp_path, monkeypatch):
    path = write(tmp_path / "a.onnx", [node("Identity", ["x"], ["y"])])
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "onnx":
            raise ModuleNotFoundError("No module named 'onnx'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert normalised(path, constants) is None


def test_a_file_that_is_not_a_model_is_refused(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"this is no model")
    with pytest.raises(LoadFailed, match=r"bad\.onnx cannot be read as an ONNX model"):
        normalised(str(tmp_path / "bad.onnx"), constants)
