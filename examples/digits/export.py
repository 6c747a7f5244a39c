"""Writes the digits network as `digits.onnx` next to this file: `python examples/digits/export.py`.

Input "image" float32 `[N, 3, 8, 8]`, RGB from 0 to 1, white on black; output "probability" float32 `[N, 10]`.
N is free. It needs the package `onnx`, which `pip install '.[dev]'` includes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.cli.demo.digits import FIRST, SECOND, SIDE, data

FILE = Path(__file__).with_name("digits.onnx")


def network() -> onnx.ModelProto:
    """The network of `penstock.cli.demo.digits` with convolutions in place of the unrolled matrices."""
    weights = {name: array.astype(np.float32) for name, array in data("weights.npz").items()}
    for name, (_, inputs, outputs) in {"first": FIRST, "second": SECOND}.items():
        weights[name] = weights[name].reshape(3, 3, inputs, outputs).transpose(3, 2, 0, 1)
    weights["axes"] = np.array([1], np.int64)
    nodes = [
        helper.make_node("ReduceMean", ["image", "axes"], ["gray"]),
        helper.make_node("Conv", ["gray", "first", "first_bias"], ["first_out"]),
        helper.make_node("Relu", ["first_out"], ["first_relu"]),
        helper.make_node("Conv", ["first_relu", "second", "second_bias"], ["second_out"]),
        helper.make_node("Relu", ["second_out"], ["second_relu"]),
        helper.make_node("Transpose", ["second_relu"], ["channels_last"], perm=[0, 2, 3, 1]),
        helper.make_node("Flatten", ["channels_last"], ["flat"]),
        helper.make_node("Gemm", ["flat", "dense", "dense_bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probability"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


if __name__ == "__main__":
    onnx.save(network(), FILE)
    print(f"{FILE}  {FILE.stat().st_size / 1024:.0f} KiB")
