"""Requests to a pipeline as the fields of items, and responses from the outcomes of items."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from penstock.core.arrays import plain_array
from penstock.core.columns import Block, TensorRows
from penstock.core.worker.array_model import PythonProgram
from penstock.core.worker.rows import check_rows
from penstock.core.worker.tensor_model import ProgramSettings, TensorModel
from penstock.errors import BadOutput, BadRequest, ItemFailed
from penstock.pipeline.graph import REQUEST, Graph
from penstock.pipeline.lower import op_class
from penstock.pipeline.ops.base import DATA, NODE_NAME, RESULT, Fields
from penstock.pipeline.traversal import ItemOutcome
from penstock.types import TensorSpec

NAMELESS = "input_0"  # the name of an array that was sent alone
MAX_ROWS = 4096  # of one request: rows enter one by one and delay other requests
_AS_DATA = (REQUEST, DATA)


class PipelineRequest(Struct):
    """One request: the fields of its items, the node where they begin (None: the entry), and whether they are rows, or
    one item of named arrays that are `whole`. `single` and `named` as in a TensorRequest."""

    fields: list[Fields]
    node: str | None = None
    rows: bool = False
    whole: bool = False
    single: bool = False
    named: bool = False


def request_of(value: Any, graph: Graph, kind: str, whole: bool = False) -> PipelineRequest:
    """The request in a decoded body. `kind` is the data kind of the entry's first op. Raises BadRequest.

    Named arrays, as in Open Inference, have one item per row, or are one item if they are `whole`; there may be no
    rows. An object or a form has the fields of one item, and only those that the graph takes from callers, so that
    callers cannot set fields that ops pass to each other. Any other value is the item's `data`.
    """
    main = graph.takes[0] if len(graph.takes) == 1 else DATA
    if not isinstance(value, dict) and (main in graph.takes or not graph.takes):
        return PipelineRequest([{main: value}])
    if not isinstance(value, dict):
        raise BadRequest(f"the pipeline has the inputs {', '.join(graph.takes)}; expected an object with these")
    if value.keys() == {NAMELESS} and isinstance(value[NAMELESS], np.ndarray):
        value = {main: value[NAMELESS]}
    for name in value:
        if name not in graph.takes:
            text = f"found the field {str(name)[:40]!r}, which the pipeline does not take; it takes"
            raise BadRequest(f"{text} {', '.join(graph.takes)}")
    if DATA in graph.takes and DATA not in value:
        raise BadRequest(f"found no '{DATA}' among the fields of the request; a pipeline needs it")
    graph.begun(value)  # no row may begin if an input is missing
    arrays = all(isinstance(one, np.ndarray) for one in value.values())
    if arrays and whole:
        return PipelineRequest([value], whole=True)
    if arrays:
        rows = {array.shape[:1] for array in value.values()}
        if len(rows) > 1 or () in rows:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in value.items())
            raise BadRequest(f"found {shapes}; expected arrays with equal numbers of rows (axis 0)")
        count = _count(len(next(iter(value.values()))))
        kinds = {main: kind}
        return PipelineRequest([_row(value, i, kinds) for i in range(count)], rows=True)
    node = value.get(NODE_NAME)
    if node is not None and not isinstance(node, str):
        raise BadRequest(f"{NODE_NAME}: found a {type(node).__name__}, expected the name of a node")
    fields = {str(name): one for name, one in value.items() if name != NODE_NAME}
    return PipelineRequest([fields], node)


def _count(rows: int) -> int:
    """The number of rows of a request. Raises BadRequest for too many."""
    if rows > MAX_ROWS:
        raise BadRequest(f"found {rows} rows, expected at most {MAX_ROWS} in one request: each row is a separate item")
    return rows


def _row(arrays: Mapping[str, np.ndarray[Any, Any]], i: int, kinds: Mapping[str, str]) -> Fields:
    """The fields of one row: plain bytes and text, a mat `[h, w, c]`, otherwise a tensor `[1, ...]`."""
    return {
        name: array[i] if array.dtype.kind == "O" or kinds.get(name) == "mat" else array[i : i + 1]
        for name, array in arrays.items()
    }


class Declared:
    """The tensors that a pipeline declares: reads requests as a model with declared tensors does, and checks results.

    `checks` is such a model, of which only the checks are used.
    """

    def __init__(self, graph: Graph) -> None:
        program = self._program = PythonProgram(lambda **_: None, graph.tensors, graph.results, "the pipeline")
        self.checks = TensorModel(lambda _: program, ProgramSettings())
        self.checks.load("cpu")
        self._graph = graph
        readers = {i.source: n for n in graph.nodes.values() for i in n.inputs if (i.producer, i.name) == _AS_DATA}
        if len(graph.takes) == 1 or DATA in graph.takes:
            readers.setdefault(graph.takes[0] if len(graph.takes) == 1 else DATA, graph.nodes[graph.entry])
        self._kinds = {name: op_class(n.steps[0].op, n.steps[0].params).takes for name, n in readers.items()}

    def request(self, value: Any, whole: bool) -> PipelineRequest:
        """As `request_of`. Raises BadRequest also for a datatype or a shape that is not declared."""
        specs, plain = self._graph.tensors, isinstance(value, bytes | bytearray | memoryview | str)
        if plain and len(specs) == 1 and specs[0].datatype == "BYTES":
            cell = np.empty((1,) * len(specs[0].shape), object)
            cell[...] = value if isinstance(value, str) else bytes(value)
            value = {specs[0].name: cell}
        else:
            plain = False
        found = self.checks.preprocess(value)
        single, named = found.single or plain, found.named and not plain
        if whole:
            return PipelineRequest([found.arrays], whole=True, single=single, named=named)
        fields = [_row(found.arrays, i, self._kinds) for i in range(_count(found.rows))]
        for spec in specs:
            if spec.datatype == "BYTES" and {*spec.shape[1:]} == {1}:
                fields = [one | {spec.name: one[spec.name].item()} for one in fields]
        return PipelineRequest(fields, rows=True, single=single, named=named)

    def response(self, request: PipelineRequest, outcomes: Sequence[ItemOutcome]) -> Any:
        """As `response_of`. Raises BadOutput also for results that are not as declared, ItemFailed for missing ones."""
        arrays = {}
        for place, spec in enumerate(self._graph.results):
            rows = [_result(outcome, place, spec, self._graph.gives, request.whole) for outcome in outcomes]
            arrays[spec.name] = self._program.checked(spec.name, rows[0] if request.whole else _array(spec.name, rows))
        if not request.whole:
            check_rows(arrays, len(outcomes))
        named = request.named or (request.rows and not self._graph.tensors)
        return TensorRows(Block(arrays, len(outcomes)), 0, len(outcomes), request.single, named).plain()


def _result(outcome: ItemOutcome, place: int, spec: TensorSpec, names: Sequence[str], whole: bool) -> Any:
    """An output of one item as an array, with an axis of rows: the field of its name, otherwise its part of the result.

    Raises the error of a failed item.
    """
    if outcome.error is not None:
        raise outcome.error
    value, result = outcome.fields.get(spec.name), outcome.fields.get(RESULT)
    if value is None and isinstance(result, dict):
        value = result.get(spec.name)
    elif value is None and isinstance(result, list | tuple) and len(result) == len(names) > 1:
        value = result[place]
    elif value is None and len(names) == 1:
        value = result
    if value is None:
        ended = f" at node '{outcome.node}'" if outcome.node else ""
        raise ItemFailed(f"the item ended{ended} without output '{spec.name}'")
    value = plain_array(value)
    array = np.asarray(value, object if spec.datatype == "BYTES" else None)
    missing = len(spec.shape) - array.ndim
    return (
        array if whole or missing < 1 or (missing > 1 and array.ndim) else array.reshape((1,) * missing + array.shape)
    )


def response_of(request: PipelineRequest, outcomes: Sequence[ItemOutcome], outputs: Sequence[str]) -> Any:
    """The response to a request: the only output, or several by name. Raises the error of a failed item.

    For rows it is a dict of arrays: results `[1, ...]` are concatenated, others are stacked on a new axis.
    """
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        if all(outcome.fields.get(name) is None for name in outputs):
            ended = f" at node '{outcome.node}'" if outcome.node else ""
            raise ItemFailed(f"the item ended{ended} without {' or '.join(outputs)}")
    found = [{name: plain_array(outcome.fields.get(name)) for name in outputs} for outcome in outcomes]
    if request.whole:
        return {name: one for output in outputs for name, one in _parts(output, found[0][output]).items()}
    if not request.rows:
        return found[0] if len(outputs) > 1 else found[0][outputs[0]]
    return {name: array for output in outputs for name, array in _joined(output, [one[output] for one in found])}


def _joined(name: str, values: list[Any]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """The named outputs of all rows: several if each value is a dict or a list of arrays."""
    parts = [_parts(name, value) for value in values]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise BadOutput(f"output '{name}' has different parts in different rows")
    return [(str(key), _array(str(key), [part[key] for part in parts])) for key in parts[0]]


def _parts(name: str, value: Any) -> dict[Any, Any]:
    """The named outputs of one row: several if its value is a dict or a list of arrays."""
    if isinstance(value, (list, tuple)) and value and all(hasattr(one, "shape") for one in value):
        return {f"{name}_{i}": one for i, one in enumerate(value)}
    return value if isinstance(value, dict) else {name: value}


def _array(name: str, values: list[Any]) -> np.ndarray[Any, Any]:
    arrays = []
    for value in map(plain_array, values):
        if isinstance(value, (bytes, str)):
            cell = np.empty(1, object)
            cell[0] = value
            arrays.append(cell)
        else:
            arrays.append(np.asarray(value))
    try:
        if all(array.ndim and len(array) == 1 for array in arrays):
            return np.concatenate(arrays)
        return np.stack(arrays)
    except ValueError:
        shapes = sorted({str(list(array.shape)) for array in arrays})
        raise BadOutput(
            f"output '{name}' has rows of different shapes, {' and '.join(shapes[:3])}; request one row at a time"
        ) from None
