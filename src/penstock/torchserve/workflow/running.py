"""A running workflow: a request on its way through a pipeline whose nodes are registered models.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Final, cast

import msgspec

from penstock.core.contracts import Submitter, Ticket
from penstock.core.engine.calls import release
from penstock.errors import ItemFailed, PenstockError
from penstock.pipeline.engine import NodeEngine
from penstock.pipeline.graph import route
from penstock.pipeline.node import BatchStamp, SharedState
from penstock.pipeline.ops.base import CONTEXT, DATA, RESULT, Fields
from penstock.pipeline.traversal import ItemOutcome, RunningNode, Traversal, TraversalVisit, connect
from penstock.torchserve.protocol.api import ApiError, json_body, no_worker, read_error
from penstock.torchserve.protocol.openapi import JSON
from penstock.torchserve.workflow.spec import TAKEN, WorkflowNode, WorkflowSpec
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.torchserve")

_STAMP: Final = BatchStamp(0, 1, 0.0)  # the model's own metrics count its batches
_encode = msgspec.msgpack.Encoder().encode


class RunningWorkflow:
    """Takes requests through a workflow. `versions` has the version of each node's model."""

    def __init__(self, spec: WorkflowSpec, versions: Mapping[str, str], models: Submitter) -> None:
        self.in_flight = 0
        self._name = spec.name
        self._closed = False
        self._emptied = asyncio.Event()
        self._route = route(spec.graph, spec.graph.entry)
        self._nodes = {
            name: RunningNode(
                spec.graph,
                spec.graph.nodes[name],
                cast(NodeEngine, ServedNode(node, versions[name], models)),  # RunningNode uses no other part of it
            )
            for name, node in spec.nodes.items()
        }
        connect(spec.graph, self._nodes)

    def submit(self, item: Item, sink: Sink) -> Ticket:
        """Begins a request. Its answer is the answer of the last node, or a JSON object if several nodes are last.

        Raises ApiError once the workflow is closed.
        """
        payload = item.payload
        if self._closed:
            release(item)
            raise no_worker(self._name, None)
        body = bytes(getattr(payload, "view", payload))  # attempts share it
        given = msgspec.structs.replace(item, payload=body, budget_s=None, priority=0)  # each node has its own limit
        release(item)
        self.in_flight += 1

        def done(outcome: ItemOutcome) -> None:
            try:
                result = _answer(traversal, outcome)
            except PenstockError as e:
                result = ItemResult(error=e)
            sink(result)

        traversal = Traversal(self._route, done, self._ended, None, 0, False)
        fields = {DATA: given.payload, CONTEXT: given}
        # later, because the request may end at once, and its caller has no ticket yet
        asyncio.get_running_loop().call_soon(self._nodes[self._route.start].begin, traversal, fields)
        return traversal

    async def close(self, drain_s: float) -> None:
        """Refuses further requests, and waits at most `drain_s` for those in flight."""
        self._closed = True
        if self.in_flight:
            try:
                await asyncio.wait_for(self._emptied.wait(), drain_s)
            except TimeoutError:
                log.warning("workflow=%s in_flight=%d consequence=they_fail", self._name, self.in_flight)

    def _ended(self, traversal: Traversal) -> None:
        self.in_flight -= 1
        if self._closed and not self.in_flight:
            self._emptied.set()


def _answer(traversal: Traversal, outcome: ItemOutcome) -> ItemResult:
    """The answer to the client. Raises ApiError."""
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
    """The engine of a node: a registered model, which has its own queue, batches and workers."""

    shared: ClassVar = SharedState()
    state: ClassVar = "READY"

    def __init__(self, node: WorkflowNode, version: str, models: Submitter) -> None:
        self.node = node
        self.version = version
        self.models = models
        self.handle = self

    def submit(self, item: Item, sink: Sink, bucket: str, nbytes: int) -> Attempts:
        """Begins the first attempt. Raises ItemFailed if the model takes no request."""
        attempts = Attempts(self, item.payload, sink)
        attempts.begin()
        return attempts

    def freed(self) -> None:
        """Does nothing: the model's queue has its own bound."""


class Attempts:
    """A request at one node: attempts until one has an answer, each with a limit in time.

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
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._failed, f"no answer in {limit_s:g} s")
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
        """The item for the model: the client's at the first node, else the previous answers as bytes."""
        fields, given = self._fields, self._given
        if RESULT in fields:
            payload, codec, kind = fields[RESULT], "torchserve_raw", ""
        elif DATA in fields:
            payload, codec, kind = fields[DATA], given.codec, given.content_type
        else:
            taken = {name.removeprefix(TAKEN): body for name, body in fields.items() if name.startswith(TAKEN)}
            payload, codec, kind = _encode(taken), "torchserve_inputs", ""
        return Item(payload, codec, kind, request_id=str(uuid.uuid4()), headers=given.headers)

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
