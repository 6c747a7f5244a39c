"""An ONNX graph that takes pixels as they are: the cast from uint8, the mean and the standard deviation go into it.

A quarter of the bytes goes to the device so, and no pass over the pixels is made in Python. Needs the package `onnx`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.errors import LoadFailed, describe
from penstock.runtimes.tensors import Input

Array = np.ndarray[Any, Any]
RAW = "__uint8"  # what is added to the name of an input

Steps = Mapping[str, tuple[Array, Array]]


def normalised(path: str, steps_of: Callable[[list[Input]], Steps]) -> bytes | None:
    """The graph of a file some of whose inputs are uint8 instead, and become `(x - mean) * scale` in float32.

    `steps_of` says of the inputs, by name, what is subtracted and what is multiplied with, both of a shape that
    broadcasts to the input's. The new input is named `NAME__uint8`. None where that cannot be done: without the package
    `onnx`, and where weights lie in files of their own, which a graph that comes as bytes would not find. Raises
    LoadFailed.
    """
    try:
        import onnx
    except ImportError:
        return None
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as e:  # of protobuf, without a class of its own
        raise LoadFailed(f"{path} cannot be read as an ONNX model: {describe(e)[:500]}") from e
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer):
        return None
    graph = model.graph
    weights = {t.name for t in graph.initializer}
    steps = steps_of([_input(onnx, value) for value in graph.input if value.name not in weights])
    if not steps:
        return None
    before: list[Any] = []
    for value in graph.input:
        if value.name in steps:
            before += _steps(onnx, graph, value, *steps[value.name])
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend(before + rest)
    found: bytes = model.SerializeToString()
    return found


def plain_input(spec: Input) -> Input:
    """An input of a program as it is in the file, whether the graph was changed or not."""
    return Input(spec.name.removesuffix(RAW), "FP32", spec.shape) if spec.name.endswith(RAW) else spec


def _input(onnx: Any, value: Any) -> Input:
    kind = value.type.tensor_type
    names = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.DOUBLE: "FP64"}
    shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return Input(value.name, names.get(kind.elem_type, "other"), shape)


def _steps(onnx: Any, graph: Any, value: Any, mean: Array, scale: Array) -> list[Any]:
    """The nodes from a new uint8 input to the one that was there, which is renamed; constants go into the graph."""
    name, kind = value.name, value.type.tensor_type
    kinds, node = onnx.TensorProto, onnx.helper.make_node
    kind.elem_type, was = kinds.UINT8, kind.elem_type
    value.name = raw = name + RAW
    for suffix, constant in (("mean", mean), ("scale", scale)):
        graph.initializer.append(onnx.numpy_helper.from_array(constant.astype(np.float32), f"{raw}.{suffix}"))
    last = [f"{raw}.result"] if was != kinds.FLOAT else [name]
    nodes = [
        node("Cast", [raw], [f"{raw}.float"], to=kinds.FLOAT),
        node("Sub", [f"{raw}.float", f"{raw}.mean"], [f"{raw}.middle"]),
        node("Mul", [f"{raw}.middle", f"{raw}.scale"], last),
    ]
    if was != kinds.FLOAT:
        nodes.append(node("Cast", last, [name], to=was))
    return nodes
