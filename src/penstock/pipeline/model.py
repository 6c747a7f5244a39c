"""PipelineModel: a whole pipeline as the model of a worker, for every protocol that serves models."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from penstock.core.worker.logs import running
from penstock.core.worker.predict import Unit
from penstock.core.worker.python_model import Answer, model, options_of
from penstock.errors import ConfigError
from penstock.pipeline.check import check
from penstock.pipeline.graph import AUTO, Graph, Node, NodeStep
from penstock.pipeline.load import load_graph
from penstock.pipeline.local import LocalPipeline, SubmittedItems
from penstock.pipeline.lower import op_class
from penstock.pipeline.node import placed, tune_process
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import CLIENT_REQUEST, DATA, RESULT, BatchOp
from penstock.pipeline.requests import Declared, PipelineRequest, request_of, response_of
from penstock.pipeline.traversal import Hop, ItemOutcome
from penstock.types import DTYPES, Headed, ModelMetadata, TensorSpec, Trace

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
        self._declared: Declared | None = None
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.parameters: dict[str, Any] = {}

    def load(self, device: str) -> None:
        """Raises ConfigError, LoadFailed."""
        graph = on_worker_device(load_graph(self._file, compat=self._compat), device)
        check(graph)
        self._graph = graph
        self.__penstock_asks__ = {CLIENT_REQUEST: "request"} if graph.client_request else {}
        first = graph.nodes[graph.entry].steps[0]
        self._kind = op_class(first.op, first.params).takes
        known = self._kind == "bytes" and graph.takes == (DATA,)  # the graph has no datatypes of other fields
        self.inputs = (TensorSpec(DATA, "BYTES", (-1,)),) if known else ()
        if graph.tensors or graph.results:
            self._declared = Declared(graph)
            self.inputs = graph.tensors or self.inputs
        limits = [node.run_timeout_s for node in graph.nodes.values()]
        self.__penstock_options__ = options_of(PipelineModel) | {
            "run_timeout_s": sum(limits) + max(limits),  # more than one item needs that times out in every node
            "idempotent": all(node.idempotent for node in graph.nodes.values()),
        }
        here = placed(graph)
        self._pipeline = LocalPipeline(here)
        sizes = self._pipeline.batch_sizes()
        models = [n.name for n in graph.nodes.values() if any(map(processes_batches, n.steps))]
        largest = max(sizes[name] for name in models or sizes)
        self.parameters = {"max_batch_size": largest, "pipeline": public_description(graph, sizes)}
        if device == "cpu":  # else a node sees its GPU under another name than the machine's
            self.parameters["devices"] = list(dict.fromkeys(node.device for node in here.nodes.values()))
        metadata = self._pipeline.metadata()
        self.outputs = graph.results or outputs_of(graph, metadata)
        if self._kind == "tensor" and metadata[graph.entry].unbatched:
            self.__penstock_options__["rows"] = "none"

    def __penstock_unbatch__(self) -> None:
        self._whole = True
        if self._declared is not None:
            self._declared.checks.__penstock_unbatch__()

    def warmup(self) -> list[Any]:
        """Two rows of declared inputs; nothing if a size is unknown."""
        return self._declared.checks.warmup() if self._declared is not None and self._graph.tensors else []

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

        items = running.items
        for place, (value, budget_s) in enumerate(zip(values, budgets_s, strict=True)):
            trace = items[place].trace if items else None
            request = self._request(value)
            if not isinstance(request, PipelineRequest):
                known.append((place, request))
            elif not request.fields:
                known.append((place, self._response(request, [])))
            else:
                submitted.append(self._submit(request, partial(ended, place, request), budget_s, trace))
        if known:
            answer(known)

        def cancel() -> None:
            for items in submitted:
                items.cancel()

        return cancel

    def _submit(
        self,
        request: PipelineRequest,
        done: Callable[[list[ItemOutcome]], None],
        budget_s: float | None,
        trace: Trace | None,
    ) -> SubmittedItems:
        pipeline, node = self._pipeline, request.node
        if len(request.fields) == 1:
            fields = request.fields[0]
            return pipeline.start(fields, lambda outcome: done([outcome]), node, budget_s=budget_s, trace=trace)
        many = [(fields, node) for fields in request.fields]
        return pipeline.start_many(many, done, budget_s=budget_s, trace=trace)

    def __penstock_soon__(self, call: Callable[[], None]) -> None:
        """Groups the responses of one pass of the pipeline. Those from other threads leave at once."""
        self._pipeline.after(call)

    def unload(self) -> None:
        self._pipeline.close()

    def _request(self, value: Any) -> PipelineRequest | Exception:
        if type(value) is Unit:
            found = self._request(value.value)
            if isinstance(found, PipelineRequest):
                found.fields = [fields | value.asked for fields in found.fields]
            return found
        try:
            if self._declared is not None and self._graph.tensors:
                return self._declared.request(value, self._whole)
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
            if self._declared is not None and self._graph.results:
                value = self._declared.response(request, outcomes)
            else:
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
