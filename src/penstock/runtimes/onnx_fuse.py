"""Moves pixel normalization (cast from uint8, mean, standard deviation) into an ONNX graph.

The device then receives a quarter of the bytes, and Python does not touch the pixels. Needs the package `onnx`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.errors import LoadFailed, describe
from penstock.runtimes.tensor_model import Input

Array = np.ndarray[Any, Any]
RAW = "__uint8"  # suffix of a changed input

Steps = Mapping[str, tuple[Array, Array]]


def normalised(path: str, steps_of: Callable[[list[Input]], Steps]) -> bytes | None:
    """The graph of a file, with uint8 inputs that it converts to `(x - mean) * scale` in float32.

    `steps_of` receives the inputs and returns the mean and scale by input name, in shapes that broadcast to the input.
    A changed input is named `NAME__uint8`. Returns None without the package `onnx`, and for weights in external files,
    which a graph loaded from bytes cannot find. Raises LoadFailed.
    """
    try:
        import onnx
    except ImportError:
        return None
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as e:  # protobuf errors have no common class
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
    """An input as the file declares it, whether or not the graph was changed."""
    return Input(spec.name.removesuffix(RAW), "FP32", spec.shape) if spec.name.endswith(RAW) else spec


def _input(onnx: Any, value: Any) -> Input:
    kind = value.type.tensor_type
    names = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.DOUBLE: "FP64"}
    shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return Input(value.name, names.get(kind.elem_type, "other"), shape)


def _steps(onnx: Any, graph: Any, value: Any, mean: Array, scale: Array) -> list[Any]:
    """The nodes from the new uint8 input to the original one; their constants are added to the graph."""
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
