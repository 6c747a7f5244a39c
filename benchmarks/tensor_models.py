"""The models of `tensors.py` as both servers load them, and requests to them with their answers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with one FP32 input and one FP32 output; shapes without axis 0, which is rows."""

    target: str  # of `penstock serve`; an ONNX file lies in the folder of `write_files`
    triton: str  # the file of `peers/triton/` that does the same
    input: tuple[str, tuple[int, ...]]
    output: tuple[str, tuple[int, ...]]
    instances: int = 1


_ROW = (64,)
MODELS: Mapping[str, Model] = {
    "mlp": Model("mlp.onnx", "onnx_model.py", ("x", _ROW), ("y", (10,))),
    "img": Model("img.onnx", "onnx_model.py", ("img", (3, -1, -1)), ("m", (3,))),
    "echo": Model("tensor_echo.py:Echo", "echo.py", ("x", _ROW), ("y", _ROW)),
    "device": Model("models.py:accelerator", "device.py", ("x", _ROW), ("y", _ROW)),
    "two_devices": Model("models.py:accelerator", "device.py", ("x", _ROW), ("y", _ROW), instances=2),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A request to a model, and its right answer."""

    model: str
    x: Array
    y: Array

    @property
    def name(self) -> str:
        """Of the input."""
        return MODELS[self.model].input[0]

    def check(self, answer: Any) -> None:
        """Raises ValueError unless the answer is the right one, up to the rounding of FP32."""
        found = np.asarray(answer, np.float32)
        if found.size != self.y.size or not np.allclose(found.reshape(self.y.shape), self.y, rtol=1e-4, atol=1e-4):
            raise ValueError(f"{self.model}: wrong answer {found.ravel()[:8]}, not {self.y.ravel()[:8]}")


def _weights() -> tuple[Array, Array]:
    random = np.random.default_rng(7)
    return random.normal(0, 0.1, (64, 256)).astype(np.float32), random.normal(0, 0.1, (256, 10)).astype(np.float32)


def case(model: str, rows: int = 1) -> Case:
    """Random rows for the model; numbers have three decimals, so their JSON is as long as that of most data."""
    random = np.random.default_rng(rows)
    shape = (3, 224, 224) if model == "img" else _ROW
    x = random.normal(size=(rows, *shape)).round(3).astype(np.float32)
    if model == "mlp":
        first, second = _weights()
        return Case(model, x, np.maximum(x @ first, 0) @ second)
    return Case(model, x, x.mean(axis=(2, 3)) if model == "img" else x)


def write_files(folder: Path) -> None:
    """Writes `mlp.onnx`, a network of 64, 256 and 10 units, and `img.onnx`, the mean of each channel of an image."""

    def save(name: str, nodes: list[Any], weights: Mapping[str, Array]) -> None:
        def tensors(key: str, shape: Sequence[int]) -> list[Any]:
            sizes = ["rows", *(size if size > 0 else None for size in shape)]
            return [helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, sizes)]

        arrays = [numpy_helper.from_array(array, key) for key, array in weights.items()]
        graph = helper.make_graph(nodes, name, tensors(*MODELS[name].input), tensors(*MODELS[name].output), arrays)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(model)
        onnx.save(model, folder / f"{name}.onnx")

    first, second = _weights()
    hidden = [
        helper.make_node("MatMul", ["x", "first"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "second"], ["y"]),
    ]
    save("mlp", hidden, {"first": first, "second": second})
    means = [helper.make_node("GlobalAveragePool", ["img"], ["means"]), helper.make_node("Flatten", ["means"], ["m"])]
    save("img", means, {})
