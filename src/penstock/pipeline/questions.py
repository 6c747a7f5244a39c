"""What a request asks of a pipeline, and what its outcomes answer: values of the protocols <-> fields of items."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from penstock.errors import BadOutput, BadRequest, ItemFailed
from penstock.pipeline.graph import Graph
from penstock.pipeline.ops.base import DATA, NODE_NAME, Fields
from penstock.pipeline.outcome import Hop, Outcome

NAMELESS = "input_0"  # an array that came alone, without a name (`protocols/oip_npy.py`)
MAX_ROWS = 4096  # of one request: they enter one by one, and others wait meanwhile
_NO_TOKEN = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")


class Question(Struct):
    """One request: the fields of its items, the node that they begin at (None: the entry), whether they are rows."""

    fields: list[Fields]
    node: str | None = None
    rows: bool = False


def question_of(value: Any, graph: Graph, kind: str) -> Question:
    """What a decoded body asks. `kind` is that of the data of the entry's first op. Raises BadRequest.

    Arrays by name, as of Open Inference, are as many items as they have rows. An object or a form is the fields of one
    item: those that the graph takes of its callers, no others, for what ops tell each other is not the callers' to say.
    Any other value is its `data`.
    """
    if not isinstance(value, dict):
        return Question([{DATA: value}])
    if value.keys() == {NAMELESS} and isinstance(value[NAMELESS], np.ndarray):
        value = {DATA: value[NAMELESS]}
    for name in value:
        if name not in graph.takes:
            told = f"found the field {str(name)[:40]!r}, which the pipeline does not take; it takes"
            raise BadRequest(f"{told} {', '.join(graph.takes)}")
    if DATA not in value:
        raise BadRequest(f"found no '{DATA}' among the fields of the request; a pipeline needs it")
    if all(isinstance(one, np.ndarray) for one in value.values()):
        rows = {array.shape[:1] for array in value.values()}
        if len(rows) > 1 or not rows.isdisjoint([(), (0,)]):
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in value.items())
            raise BadRequest(f"found {shapes}; expected arrays of as many rows (axis 0), 1 or more")
        if (count := len(value[DATA])) > MAX_ROWS:
            told = f"found {count} rows, expected at most {MAX_ROWS} in one request"
            raise BadRequest(f"{told}: each is an item of its own in a pipeline")
        return Question([_row(value, i, kind) for i in range(count)], rows=True)
    node = value.get(NODE_NAME)
    if node is not None and not isinstance(node, str):
        raise BadRequest(f"{NODE_NAME}: found a {type(node).__name__}, expected the name of a node")
    return Question([{str(name): one for name, one in value.items() if name != NODE_NAME}], node)


def _row(arrays: Mapping[str, np.ndarray[Any, Any]], i: int, kind: str) -> Fields:
    """The fields of one row: bytes and text as they are, a mat `[h, w, c]`, and else a tensor `[1, ...]`."""
    return {
        name: array[i] if array.dtype.kind == "O" or (name == DATA and kind == "mat") else array[i : i + 1]
        for name, array in arrays.items()
    }


def answer_of(question: Question, outcomes: Sequence[Outcome], outputs: Sequence[str]) -> Any:
    """The value that answers a request: the one output, or several by their names. Raises what an item failed with.

    Of rows it is a dict of arrays: results `[1, ...]` are put end to end, others are rows of a new axis.
    """
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        if all(outcome.fields.get(name) is None for name in outputs):
            ended = f" at node '{outcome.node}'" if outcome.node else ""
            raise ItemFailed(f"the item ended{ended} without {' or '.join(outputs)}")
    found = [{name: plain_array(outcome.fields.get(name)) for name in outputs} for outcome in outcomes]
    if not question.rows:
        return found[0] if len(outputs) > 1 else found[0][outputs[0]]
    return {name: array for output in outputs for name, array in _joined(output, [one[output] for one in found])}


def plain_array(value: Any) -> Any:
    """A tensor of PyTorch as an array on the CPU; anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") and hasattr(value, "cpu") else value


def _joined(name: str, values: list[Any]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """The outputs by name that the values of all rows make: several where each is a dict, or a list of arrays."""
    first = values[0]
    if isinstance(first, (list, tuple)) and first and all(hasattr(one, "shape") for one in first):
        values = [{f"{name}_{i}": one for i, one in enumerate(value)} for value in values]
    elif not isinstance(first, dict):
        return [(name, _array(name, values))]
    if any(not isinstance(value, dict) or value.keys() != values[0].keys() for value in values):
        raise BadOutput(f"output '{name}' has other parts for some rows than for others")
    return [(str(key), _array(str(key), [value[key] for value in values])) for key in values[0]]


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
            f"output '{name}' has rows of different shapes, {' and '.join(shapes[:3])}; ask for one row at a time"
        ) from None


def server_timing(hops: Sequence[Hop]) -> str:
    """The way of an item as a `Server-Timing` header (W3C): each node, and the milliseconds of its run."""
    return ", ".join(
        f"{_NO_TOKEN.sub('_', hop.node)};dur={hop.run_s * 1000:.3f}"
        f';desc="batch {hop.batch_id} of {hop.size}, waited {hop.wait_s * 1000:.3f} ms"'
        for hop in hops
    )
