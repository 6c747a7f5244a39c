"""PipelineModel: a whole pipeline as the model of a worker, for every protocol that serves models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, structs

from penstock.core.worker.python_model import Answer, model, options_of
from penstock.errors import BadOutput, BadRequest, ConfigError, ItemFailed
from penstock.pipeline.check import check
from penstock.pipeline.graph import AUTO, Graph, Node, NodeStep
from penstock.pipeline.load import load_graph
from penstock.pipeline.local import LocalPipeline, SubmittedItems
from penstock.pipeline.lower import op_class
from penstock.pipeline.node import tune_process
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import DATA, NODE_NAME, RESULT, BatchOp, Fields
from penstock.pipeline.traversal import Hop, ItemOutcome
from penstock.types import DTYPES, Headed, ModelMetadata, TensorSpec

NAMELESS = "input_0"  # the name of an array that was sent alone
MAX_ROWS = 4096  # of one request: rows enter one by one and delay other requests
_NO_TOKEN = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")


@model(policy="fixed", max_hold_s=0, max_batch_size=32)
class PipelineModel:
    """The model of a worker whose target is a pipeline's TOML file.

    A worker process runs requests concurrently: `__penstock_submit__`. With other transports each batch waits for its
    last item: `predict`. The nodes of the pipeline form the batches; the worker's batches only transfer requests.
    """

    platform = "penstock_pipeline"

    def __init__(self, file: str, compat: bool = False) -> None:
        """`compat`: the file is in TorchPipe's dialect, in which unknown keys cause warnings."""
        self._file, self._compat = file, compat
        self._tuned = self._whole = False
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.parameters: dict[str, Any] = {}

    def load(self, device: str) -> None:
        """Raises ConfigError, LoadFailed."""
        graph = on_worker_device(load_graph(self._file, compat=self._compat), device)
        check(graph)
        self._graph = graph
        first = graph.nodes[graph.entry].steps[0]
        self._kind = op_class(first.op, first.params).takes
        known = self._kind == "bytes" and graph.takes == (DATA,)  # the graph has no datatypes of other fields
        self.inputs = (TensorSpec(DATA, "BYTES", (-1,)),) if known else ()
        limits = [node.run_timeout_s for node in graph.nodes.values()]
        self.__penstock_options__ = options_of(PipelineModel) | {
            "run_timeout_s": sum(limits) + max(limits),  # more than one item needs that times out in every node
            "idempotent": all(node.idempotent for node in graph.nodes.values()),
        }
        self._pipeline = LocalPipeline(graph)
        sizes = self._pipeline.batch_sizes()
        models = [n.name for n in graph.nodes.values() if any(map(processes_batches, n.steps))]
        largest = max(sizes[name] for name in models or sizes)
        self.parameters = {"max_batch_size": largest, "pipeline": public_description(graph, sizes)}
        metadata = self._pipeline.metadata()
        self.outputs = outputs_of(graph, metadata)
        if self._kind == "tensor" and metadata[graph.entry].unbatched:
            self.__penstock_options__["rows"] = "none"

    def __penstock_unbatch__(self) -> None:
        self._whole = True

    def predict(self, items: list[Any]) -> list[Any]:
        """The responses, with an exception for each failed item."""
        requests = [self._request(item) for item in items]
        valid = [request for request in requests if isinstance(request, PipelineRequest)]
        many = [(fields, request.node) for request in valid for fields in request.fields]
        outcomes = iter(self._pipeline.infer_many(many))
        return [
            self._response(request, [next(outcomes) for _ in request.fields])
            if isinstance(request, PipelineRequest)
            else request
            for request in requests
        ]

    @property
    def __penstock_concurrency__(self) -> int:
        """Most items inside at once."""
        return self._pipeline.width

    def __penstock_submit__(
        self, values: list[Any], budgets_s: list[float | None], answer: Answer
    ) -> Callable[[], None]:
        """Submits a batch of requests, and responds to each when its items end. Only for a worker's own process."""
        if not self._tuned:
            self._tuned = True
            tune_process()
        submitted: list[SubmittedItems] = []
        known: list[tuple[int, Any]] = []

        def ended(place: int, request: PipelineRequest, outcomes: list[ItemOutcome]) -> None:
            answer([(place, self._response(request, outcomes))])

        for place, (value, budget_s) in enumerate(zip(values, budgets_s, strict=True)):
            request = self._request(value)
            if not isinstance(request, PipelineRequest):
                known.append((place, request))
            elif not request.fields:
                known.append((place, self._response(request, [])))
            else:
                submitted.append(self._submit(request, partial(ended, place, request), budget_s))
        if known:
            answer(known)

        def cancel() -> None:
            for items in submitted:
                items.cancel()

        return cancel

    def _submit(
        self, request: PipelineRequest, done: Callable[[list[ItemOutcome]], None], budget_s: float | None
    ) -> SubmittedItems:
        if len(request.fields) == 1:
            fields = request.fields[0]
            return self._pipeline.start(fields, lambda outcome: done([outcome]), request.node, budget_s=budget_s)
        many = [(fields, request.node) for fields in request.fields]
        return self._pipeline.start_many(many, done, budget_s=budget_s)

    def __penstock_soon__(self, call: Callable[[], None]) -> None:
        """Groups the responses of one turn of the pipeline's loop. Those from other threads leave at once."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            call()
        else:
            loop.call_soon(call)

    def unload(self) -> None:
        self._pipeline.close()

    def _request(self, value: Any) -> PipelineRequest | Exception:
        try:
            return request_of(value, self._graph, self._kind, self._whole)
        except Exception as e:
            return e

    def _response(self, request: PipelineRequest, outcomes: list[ItemOutcome]) -> Any:
        """The response to a request whose items have ended: a value, or an exception."""
        if not outcomes:
            known = {
                spec.name: np.empty([max(n, 0) for n in (0, *spec.shape[1:])], DTYPES[spec.datatype])
                for spec in self.outputs
            }
            return known or {name: np.empty(0, np.float32) for name in self._graph.gives}
        try:
            value = response_of(request, outcomes, self._graph.gives)
        except Exception as e:
            return e
        if not self._graph.trace:
            return value
        return Headed(value, [("server-timing", server_timing(outcomes[0].hops))])


def on_worker_device(graph: Graph, device: str) -> Graph:
    """The graph with its models on the worker's device, unless they specify the CPU.

    Raises ConfigError for another GPU, because a worker of a GPU sees only that one, as cuda:0. On "cpu" the nodes keep
    their own devices.
    """
    if not device.startswith("cuda"):
        return graph
    for node in graph.nodes.values():
        if node.device not in ("cpu", AUTO, device):
            raise ConfigError(
                f"{graph.name}: node '{node.name}': device {node.device}, but this worker sees only its own GPU,"
                f" {device}; remove the device, or give the workers devices = ['cpu'], with which they see all GPUs"
            )
    nodes = {
        name: structs.replace(n, device=device) if n.device == AUTO and _may_use_gpu(n) else n
        for name, n in graph.nodes.items()
    }
    return structs.replace(graph, nodes=nodes)


def _may_use_gpu(node: Node) -> bool:
    """Whether a node has a model that does not specify the CPU."""
    models = [step for step in node.steps if catalog.is_model(step.op)]
    return any(step.params.get("runtime", "auto") not in ("cpu", "openvino") for step in models)


def outputs_of(graph: Graph, metadata: Mapping[str, ModelMetadata]) -> tuple[TensorSpec, ...]:
    """The response's tensors, if the result is the rows of a model's output. `metadata` is by node."""
    if (
        graph.gives != (RESULT,)
        or len(graph.outputs) != 1
        or not catalog.is_model(graph.nodes[graph.outputs[0]].steps[-1].op)
        or metadata[graph.outputs[0]].unbatched
    ):
        return ()
    last = metadata[graph.outputs[0]].outputs
    names = [RESULT] if len(last) == 1 else [f"{RESULT}_{i}" for i in range(len(last))]
    return tuple(TensorSpec(name, t.datatype, (-1, *t.shape[1:])) for name, t in zip(names, last, strict=True))


def processes_batches(step: NodeStep) -> bool:
    """Whether an op takes many items at once, as models do."""
    return issubclass(op_class(step.op, step.params), BatchOp)


def public_description(graph: Graph, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The description of a pipeline for clients: its nodes in order with the names of their ops, without parameters.

    `sizes` has the most items of a batch by node.
    """
    return {
        "entry": graph.entry,
        "inputs": list(graph.takes),
        "outputs": list(graph.gives),
        "nodes": [
            {
                "name": node.name,
                "ops": [step.op for step in node.steps],
                "next": list(node.next),
                **({"body": node.each.body} if node.each is not None else {}),
                "instances": node.instances,
                "max_batch": sizes[node.name],
            }
            for node in (graph.nodes[name] for name in graph.order())
        ],
    }


# ---- requests and responses


class PipelineRequest(Struct):
    """One request: the fields of its items, the node where they begin (None: the entry), and whether they are rows, or
    one item of named arrays that are `whole`."""

    fields: list[Fields]
    node: str | None = None
    rows: bool = False
    whole: bool = False


def request_of(value: Any, graph: Graph, kind: str, whole: bool = False) -> PipelineRequest:
    """The request in a decoded body. `kind` is the data kind of the entry's first op. Raises BadRequest.

    Named arrays, as in Open Inference, have one item per row, or are one item if they are `whole`; there may be no
    rows. An object or a form has the fields of one item, and only those that the graph takes from callers, so that
    callers cannot set fields that ops pass to each other. Any other value is the item's `data`.
    """
    if not isinstance(value, dict):
        return PipelineRequest([{DATA: value}])
    if value.keys() == {NAMELESS} and isinstance(value[NAMELESS], np.ndarray):
        value = {DATA: value[NAMELESS]}
    for name in value:
        if name not in graph.takes:
            text = f"found the field {str(name)[:40]!r}, which the pipeline does not take; it takes"
            raise BadRequest(f"{text} {', '.join(graph.takes)}")
    if DATA not in value:
        raise BadRequest(f"found no '{DATA}' among the fields of the request; a pipeline needs it")
    arrays = all(isinstance(one, np.ndarray) for one in value.values())
    if arrays and whole:
        return PipelineRequest([value], whole=True)
    if arrays:
        rows = {array.shape[:1] for array in value.values()}
        if len(rows) > 1 or () in rows:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in value.items())
            raise BadRequest(f"found {shapes}; expected arrays with equal numbers of rows (axis 0)")
        if (count := len(value[DATA])) > MAX_ROWS:
            raise BadRequest(
                f"found {count} rows, expected at most {MAX_ROWS} in one request: each row is a separate item"
            )
        return PipelineRequest([_row(value, i, kind) for i in range(count)], rows=True)
    node = value.get(NODE_NAME)
    if node is not None and not isinstance(node, str):
        raise BadRequest(f"{NODE_NAME}: found a {type(node).__name__}, expected the name of a node")
    return PipelineRequest([{str(name): one for name, one in value.items() if name != NODE_NAME}], node)


def _row(arrays: Mapping[str, np.ndarray[Any, Any]], i: int, kind: str) -> Fields:
    """The fields of one row: plain bytes and text, a mat `[h, w, c]`, otherwise a tensor `[1, ...]`."""
    return {
        name: array[i] if array.dtype.kind == "O" or (name == DATA and kind == "mat") else array[i : i + 1]
        for name, array in arrays.items()
    }


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


def plain_array(value: Any) -> Any:
    """A PyTorch tensor as an array on the CPU; any other value unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") and hasattr(value, "cpu") else value


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


def server_timing(hops: Sequence[Hop]) -> str:
    """An item's path as a `Server-Timing` header (W3C): each node with its run time in milliseconds.

    A node that ran children of the item has the sum of their batches.
    """
    own = [hop for hop in hops if not hop.element]
    parts = [
        (hop.node, hop.run_s, f"batch {hop.batch_id} of {hop.size}, waited {hop.wait_s * 1000:.3f} ms") for hop in own
    ]
    batches: dict[str, dict[int, float]] = {}
    for hop in hops:
        if hop.element:
            batches.setdefault(hop.node, {})[hop.batch_id] = hop.run_s
    parts += [(node, sum(runs.values()), f"children in {len(runs)} batches") for node, runs in batches.items()]
    return ", ".join(f'{_NO_TOKEN.sub("_", node)};dur={run_s * 1000:.3f};desc="{text}"' for node, run_s, text in parts)
