"""Workflows: their specification, and a request on its way through a graph whose nodes are registered models.

Source: the YAML file in a .war archive, as TorchServe 0.12.0 reads it. A node of `dag` that `models` does not name is a
function of the archive's handler file. Running workflows belong to the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields

from penstock import tracing
from penstock.config.schema import Count, Positive
from penstock.core.contracts import Submitter, Ticket
from penstock.core.engine.calls import release
from penstock.core.transports.slot import within
from penstock.errors import ArchiveError, ItemFailed, PenstockError, nearest
from penstock.pipeline.graph import Graph, Node, NodeInput, cycle_in, route
from penstock.pipeline.handover import BatchStamp
from penstock.pipeline.ops.base import CONTEXT, DATA, RESULT, Fields
from penstock.pipeline.traversal import ItemOutcome, RunningNode, Traversal, TraversalVisit, connect
from penstock.torchserve.archive.manifest import check_model_name
from penstock.torchserve.protocol.api import JSON, ApiError, json_body, no_worker, read_error
from penstock.types import Item, ItemResult, Sink
from penstock.values import found

log = logging.getLogger("penstock.torchserve")

TAKEN: Final = "from "
"""Prefix of a field with the response of one of several previous nodes."""
_STAMP: Final = BatchStamp(0, 1, 0.0)  # the model's own metrics count its batches
_encode = msgspec.msgpack.Encoder().encode


# ---- specification


class NodeSettings(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The keys of a model, which `models` can also set for all."""

    min_workers: Positive = 1
    max_workers: Positive = 1
    batch_size: Positive = 1
    max_batch_delay: Count = 50  # ms
    retry_attempts: Count = 1  # after the first attempt
    timeout_ms: Positive = 10_000  # of one attempt

    @property
    def workers(self) -> int:
        """The workers to start: `max-workers`, as in TorchServe, but never fewer than `min-workers`."""
        return max(self.min_workers, self.max_workers)


class WorkflowNode(Struct, frozen=True):
    """A node: a model with the archive at `url`, or, without one, the function of its name."""

    name: str
    model: str  # the name that the model is registered with
    settings: NodeSettings
    url: str | None = None


class WorkflowSpec(Struct, frozen=True):
    """A workflow. `dag` has the nodes after each node as the file lists them."""

    name: str
    settings: NodeSettings
    nodes: dict[str, WorkflowNode]
    graph: Graph
    dag: dict[str, list[str]]

    @property
    def dag_text(self) -> str:
        """The DAG in the notation of TorchServe's description: `{a=[b, c], b=[d]}`."""
        return "{" + ", ".join(f"{name}=[{', '.join(after)}]" for name, after in self.dag.items()) + "}"


def make_workflow(name: str, source: Any) -> WorkflowSpec:
    """The workflow in the value of a YAML file. Raises ApiError: InvalidWorkflowException, InvalidDAGException."""
    if not isinstance(source, Mapping):
        raise invalid(f"found {found(source)}, expected the keys models and dag")
    if unknown := [str(key)[:100] for key in source if key not in ("models", "dag")]:
        log.warning("workflow=%s unknown_keys=%s consequence=they_have_no_effect", name, unknown[:10])
    settings, models = _models(source.get("models") or {})
    dag = _dag(source.get("dag"))
    nodes: dict[str, WorkflowNode] = {}
    for node in dict.fromkeys([*dag, *(after for following in dag.values() for after in following)]):
        try:
            model = check_model_name(f"{name}__{node}")
        except ArchiveError as e:
            raise invalid(f"dag: {e.message}") from None
        own = models.get(node)
        if own is None:
            one = NodeSettings(
                max_batch_delay=0, retry_attempts=settings.retry_attempts, timeout_ms=settings.timeout_ms
            )
            nodes[node] = WorkflowNode(node, model, one)
        else:
            nodes[node] = WorkflowNode(node, model, own[0], own[1])
    return WorkflowSpec(name, settings, nodes, _graph(name, nodes, dag), dag)


def invalid(message: str) -> ApiError:
    return ApiError("InvalidWorkflowException", f"workflow specification: {message}")


def _models(source: Any) -> tuple[NodeSettings, dict[str, tuple[NodeSettings, str]]]:
    """The settings for all models, and the settings and URL of each."""
    if not isinstance(source, Mapping):
        raise invalid(f"models: found {found(source)}, expected models by name")
    keys = [each.encode_name for each in fields(NodeSettings)]
    common = {key: value for key, value in source.items() if key in keys}
    models: dict[str, tuple[NodeSettings, str]] = {}
    for name, own in source.items():
        if name in keys:
            continue
        if not isinstance(own, Mapping) or not isinstance(name, str):
            hint = nearest(str(name), keys)
            raise invalid(f"models: {str(name)[:100]}: found {found(own)}, expected a model's keys{hint}")
        url = own.get("url")
        if not isinstance(url, str) or not url:
            raise invalid(f"models: {name[:100]}: found no url, expected the archive's name or URL")
        if unknown := [str(key)[:100] for key in own if key != "url" and key not in keys]:
            log.warning("workflow_model=%s unknown_keys=%s consequence=they_have_no_effect", name, unknown[:10])
        own = {key: value for key, value in own.items() if key in keys}
        models[name] = (_settings(f"models: {name[:100]}", {**common, **own}), url)
    return _settings("models", common), models


def _settings(where: str, values: Mapping[str, Any]) -> NodeSettings:
    try:
        return convert(values, NodeSettings)
    except ValidationError as e:
        raise invalid(f"{where}: {e}") from None


def _dag(source: Any) -> dict[str, list[str]]:
    if not isinstance(source, Mapping):
        raise invalid(f"dag: found {found(source)}, expected nodes, each with a list of the nodes after it")
    dag: dict[str, list[str]] = {}
    for name, after in source.items():
        after = [] if after is None else after
        if not isinstance(name, str) or not isinstance(after, list):
            raise invalid(f"dag: {str(name)[:100]}: found {found(after)}, expected a list of the nodes after it")
        if wrong := next((each for each in after if not isinstance(each, str | None)), None):
            raise invalid(f"dag: {name[:100]}: found {found(wrong)}, expected names of nodes")
        dag[name] = list(dict.fromkeys(each for each in after if each and each.strip()))
    return dag


def _graph(workflow: str, nodes: Mapping[str, WorkflowNode], dag: Mapping[str, list[str]]) -> Graph:
    """The nodes as a pipeline: a node after several others takes the response of each."""
    before: dict[str, list[str]] = {name: [] for name in nodes}
    for name, following in dag.items():
        for after in following:
            if after == name:
                raise ApiError("InvalidDAGException", f"Self loop exception: {name}")
            before[after].append(name)
    starts = [name for name in nodes if not before[name]]
    if len(starts) != 1:
        named = ", ".join(starts) or "none"
        raise ApiError("InvalidDAGException", f"DAG should have only one start node; found {named}")
    made: dict[str, Node] = {}
    for name in nodes:
        taken = before[name] if len(before[name]) > 1 else ()
        inputs = tuple(NodeInput(producer, RESULT, TAKEN + producer) for producer in taken)
        made[name] = Node(name, next=tuple(dag.get(name, ())), inputs=inputs)
    if cycle := cycle_in(made):
        raise ApiError("InvalidDAGException", f"Not a valid DAG: {cycle}")
    return Graph(workflow, made, starts[0])


# ---- requests


class RunningWorkflow:
    """Takes requests through a workflow. `versions` has the version of each node's model."""

    def __init__(self, spec: WorkflowSpec, versions: Mapping[str, str], models: Submitter) -> None:
        self.in_flight = 0
        self._name = spec.name
        self._closed = False
        self._emptied = asyncio.Event()
        self._route = route(spec.graph, spec.graph.entry)
        self._nodes = {
            name: RunningNode(spec.graph, spec.graph.nodes[name], ServedNode(node, versions[name], models))
            for name, node in spec.nodes.items()
        }
        connect(spec.graph, self._nodes)

    def submit(self, item: Item, sink: Sink) -> Ticket:
        """Begins a request. The last node's response is its response; several last nodes give a JSON object.

        Raises ApiError once the workflow is closed.
        """
        payload = item.payload
        if self._closed:
            release(item)
            raise no_worker(self._name, None)
        if tracing.tracer is not None:
            sink = tracing.traced(f"workflow {self._name}", tracing.SERVER, item, sink)
        body = bytes(getattr(payload, "view", payload))  # attempts share it
        given = msgspec.structs.replace(item, payload=body, budget_s=None, priority=0)  # each node has its own limit
        release(item)
        self.in_flight += 1

        def done(outcome: ItemOutcome) -> None:
            try:
                result = _response(traversal, outcome)
            except PenstockError as e:
                result = ItemResult(error=e)
            sink(result)

        traversal = Traversal(self._route, done, self._ended)
        fields = {DATA: given.payload, CONTEXT: given}
        # later, because the request may end at once, and its caller has no ticket yet
        asyncio.get_running_loop().call_soon(self._nodes[self._route.start].begin, traversal, fields)
        return traversal

    async def close(self, drain_s: float) -> None:
        """Refuses further requests, and waits at most `drain_s` for those in flight."""
        self._closed = True
        if self.in_flight and not await within(self._emptied, drain_s):
            log.warning("workflow=%s in_flight=%d consequence=they_fail", self._name, self.in_flight)

    def _ended(self, traversal: Traversal) -> None:
        self.in_flight -= 1
        if self._closed and not self.in_flight:
            self._emptied.set()


def _response(traversal: Traversal, outcome: ItemOutcome) -> ItemResult:
    """The response to the client. Raises ApiError."""
    if outcome.error is not None:
        raise ApiError("InternalServerException", outcome.error.message, detail=outcome.error.detail)
    last = {name: traversal.outputs[name][RESULT] for name in traversal.route.outputs}
    if len(last) == 1:
        return ItemResult(next(iter(last.values())), JSON, reason="OK")
    values: dict[str, Any] = {}
    for name, body in last.items():
        try:
            values[name] = json.loads(body)
        except (ValueError, RecursionError):
            message = f"Node {name} returned no JSON, which a workflow with several last nodes needs"
            raise ApiError("InternalServerException", message) from None
    return ItemResult(json_body(values), content_type=JSON, reason="OK")


class ServedNode:
    """The server of a node: a registered model, which has its own queue, batches and workers."""

    takes_arrays: ClassVar = False
    draining: ClassVar = False

    def __init__(self, node: WorkflowNode, version: str, models: Submitter) -> None:
        self.node = node
        self.version = version
        self.models = models

    def submit(self, item: Item, sink: Sink, bucket: str, nbytes: int) -> Attempts:
        """Begins the first attempt. Raises ItemFailed if the model takes no request."""
        attempts = Attempts(self, item.payload, sink)
        attempts.begin()
        return attempts

    def freed(self) -> None:
        """Does nothing: the model's queue has its own bound."""


class Attempts:
    """A request at one node: it is tried until an attempt has a response, each within a time limit.

    As in TorchServe, every failure is retried, unless the model takes no request.
    """

    def __init__(self, served: ServedNode, visit: TraversalVisit, sink: Sink) -> None:
        self._served = served
        self._given: Item = visit.fields[CONTEXT]
        self._fields = visit.fields
        self._sink: Sink | None = sink
        self._left = served.node.settings.retry_attempts
        self._parts: list[bytes] = []
        self._ticket: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Raises ItemFailed."""
        served, self._parts = self._served, []
        limit_s = served.node.settings.timeout_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._failed, f"no response in {limit_s:g} s")
        try:
            self._ticket = served.models.submit(served.node.model, served.version, self._item(), self._take)
        except PenstockError as e:
            self._stop()
            raise ItemFailed(e.message, detail=f"node '{served.node.name}': {e.detail or e.message}") from e

    def cancel(self) -> None:
        """Drops the request at this node."""
        self._sink = None
        self._stop()

    def _item(self) -> Item:
        """The item for the model: the client's at the first node, else the previous responses as bytes."""
        fields, given = self._fields, self._given
        if RESULT in fields:
            payload, codec, kind = fields[RESULT], "torchserve_raw", ""
        elif DATA in fields:
            payload, codec, kind = fields[DATA], given.codec, given.content_type
        else:
            taken = {name.removeprefix(TAKEN): body for name, body in fields.items() if name.startswith(TAKEN)}
            payload, codec, kind = _encode(taken), "torchserve_inputs", ""
        item = Item(payload, codec, kind, request_id=str(uuid.uuid4()), headers=given.headers)
        if tracing.tracer is not None:
            tracing.descend(item, given.trace)
        return item

    def _take(self, result: ItemResult) -> None:
        """The sink of the attempt. As in TorchServe, only an error counts, not a status that the handler set."""
        if result.error is not None:
            self._failed(f"{result.error.message} {result.error.detail}".rstrip())
            return
        self._parts.append(bytes(result.body))
        if not result.final:
            return
        message = read_error(result.status, self._parts[-1]) if result.status >= 400 else None
        if message is not None:
            self._failed(message)
        else:
            fields: Fields = {RESULT: b"".join(self._parts), CONTEXT: self._given}
            self._end(ItemResult((fields, _STAMP)))

    def _failed(self, reason: str) -> None:
        self._stop()
        name = self._served.node.name
        log.warning("workflow_model=%s attempts_left=%d failed: %s", self._served.node.model, self._left, reason)
        error = ItemFailed(f"Error executing {name}", detail=f"node '{name}': {reason}")
        if self._left:
            self._left -= 1
            try:
                self.begin()
                return
            except ItemFailed as e:
                error = e
        self._end(ItemResult(error=error))

    def _stop(self) -> None:
        """Ends the attempt in progress."""
        ticket, self._ticket = self._ticket, None
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if ticket is not None:
            ticket.cancel()

    def _end(self, result: ItemResult) -> None:
        self._stop()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink(result)
