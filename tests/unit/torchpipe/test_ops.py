"""OpenvinoMat: images in, images out. PyTensor: the function of a user's module."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadRequest, ConfigError
from penstock.torchpipe.ops import OpenvinoMat, PyTensor

onnx = pytest.importorskip("onnx")


@pytest.fixture
def op(tmp_path: Path) -> OpenvinoMat:
    """A model `[1, 3, height, width]` -> itself, its mean over the width, and its mean over both."""
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = h.make_graph(
        [
            h.make_node("Identity", ["x"], ["same"]),
            h.make_node("ReduceMean", ["x"], ["rows"], axes=[3], keepdims=0),
            h.make_node("ReduceMean", ["x"], ["all"], axes=[2, 3], keepdims=0),
        ],
        "g",
        [h.make_tensor_value_info("x", kind, [1, 3, "h", "w"])],
        [h.make_tensor_value_info("same", kind, [1, 3, "h", "w"]), h.make_tensor_value_info("rows", kind, [1, 3, "h"]),
         h.make_tensor_value_info("all", kind, [1, 3])],
    )  # fmt: skip
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    made = OpenvinoMat(str(tmp_path / "m.onnx"))
    made.load("cpu")
    return made


def test_images_of_any_type_give_images(op: OpenvinoMat) -> None:
    image = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    results: Any = op([image, image.astype(np.float32)], [{}, {}])
    for same, rows, mean in results:
        assert np.array_equal(same, image.astype(np.float32))
        assert np.allclose(rows, image.mean(1).T, rtol=1e-5)
        assert np.allclose(mean, image.mean((0, 1))[None], rtol=1e-5)


def test_a_bad_image_fails_alone_and_tensors_are_accepted(op: OpenvinoMat) -> None:
    tensor = np.ones((1, 3, 4, 4), np.float32)
    bad, good = op(["no image", tensor], [{}, {}])
    assert "OpenvinoMat found str, expected an image" in str(bad)
    assert good[0].shape == (4, 4, 3)


def test_pytensor_calls_the_function_of_the_users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "PyTensor.py").write_text("def tensor2tensor(data):\n    return data.flip(-1).to(data.dtype)\n")
    with pytest.raises(ConfigError, match="there is no module 'PyTensor'"):
        PyTensor()
    monkeypatch.syspath_prepend(tmp_path)
    image = np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2)
    assert np.array_equal(PyTensor()(image, {}), image[..., ::-1])
    with pytest.raises(BadRequest, match="PyTensor found str, expected a tensor"):
        PyTensor()("text", {})
    monkeypatch.delitem(sys.modules, "PyTensor")
