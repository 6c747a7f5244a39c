"""Host: one node of a running graph. A ModelHandle over threads, and where its items go from there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.engine.batcher import Batcher
from penstock.engine.handle import ModelHandle
from penstock.errors import BadRequest, LoadFailed, PenstockError
from penstock.observe.base import Observer
from penstock.ops.base import CONTEXT, RESULT, Fields
from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.journey import Journey, Stop, budget_of, nbytes_of
from penstock.pipeline.node import NodeModel
from penstock.pipeline.routes import needs
from penstock.transports.thread import ThreadTransport
from penstock.types import Item
from penstock.worker.spec import WorkerSpec, Wrapped

QUEUED_BATCHES = 2  # that may wait for each instance, without `queue`
QUEUE_BYTES = 64 * 2**20
WAITS_S = 30.0  # the least that an item may wait for a node; a node whose runs may take long, for four of them
ANY = 2**31  # rows or bytes of a batcher's own bound: credits are what bounds a node

WRAPPER = f"{NodeModel.__module__}:{NodeModel.__qualname__}"


class Host:
    """Runs a node's batches, and hands each item on. `after` and `joins` are set once all hosts are there."""

    def __init__(self, graph: Graph, node: Node, observers: Sequence[Observer]) -> None:
        self.name, self.node = node.name, node
        self.after: list[Host] = []  # that follow, and are no joins
        self.joins: list[Host] = []  # that wait for this node, among others
        self.needs = needs(graph, node.name)  # those that must have ended before, of a join
        self.kept = any(i.producer == node.name for n in graph.nodes.values() for i in n.inputs)
        self.output = not node.next
        devices = [node.device] * node.instances
        spec = WorkerSpec(node.name, "1", _config(node), _target(graph, node), instances=node.instances)
        transport = ThreadTransport(spec, node.instances, devices)
        self.handle = ModelHandle(spec, transport, devices, ANY, observers)
        self.batcher: Batcher | None = None

    async def load(self) -> None:
        """Returns when every instance is up. Raises LoadFailed, ConfigError that name the node."""
        try:
            await self.handle.load()
        except PenstockError as e:
            raise type(e)(f"node '{self.name}': {e.message}", detail=e.detail) from e
        if self.handle.up < self.node.instances:
            found = f"{self.handle.up} of {self.node.instances} instances loaded"
            raise LoadFailed(f"node '{self.name}': only {found}", detail=self.handle.why_down())
        self.batcher = self.handle.batcher

    @property
    def join(self) -> bool:
        """Whether it waits for more than the one node before it, or takes fields by name."""
        return bool(self.needs)

    @property
    def max_batch(self) -> int:
        """Most items of a batch; known once it is loaded."""
        return 1 if self.batcher is None else self.batcher.scheduler.max_batch_size

    @property
    def capacity(self) -> int:
        """Most items that may wait here."""
        return self.node.queue or QUEUED_BATCHES * self.node.instances * self.max_batch

    def statistics(self) -> dict[str, object]:
        """What its scheduler has learned, what waits and what runs."""
        told = self.handle.statistics()
        if self.batcher is not None:
            scheduler = self.batcher.scheduler
            told |= {
                "queued": scheduler.queued_rows,
                "queued_bytes": scheduler.queued_bytes,
                "running": scheduler.running_rows,
                "capacity": self.capacity,
            }
        return told

    # ---- items

    def enter(self, journey: Journey, fields: Fields, swap: bool) -> None:
        """Queues an item. Raises ModelNotReady, DeadlineExceeded."""
        stop = Stop(self, journey, fields, swap)
        item = Item(stop)
        budget_s = budget_of(journey, self.node.deadline_s)
        batcher = self.batcher
        if batcher is None or self.handle.state != "READY":  # it refuses, or a new instance will be there soon
            call = self.handle.submit(item, stop, budget_s, journey.priority)
        else:
            nbytes = nbytes_of(fields.get(RESULT if swap else "data"))
            call = batcher.submit(item, stop, budget_s, journey.priority, "", nbytes)
        stop.call = call
        journey.visits.add(stop)

    def passed(self, journey: Journey, fields: Fields) -> None:
        """An item has been here: it goes on, to all that follow, or ends."""
        if self.output:
            journey.outputs[self.name] = fields
            if len(journey.outputs) == len(journey.route.outputs):
                self._arrived(journey, fields)
            return
        if self.kept:
            journey.kept[self.name] = fields
        for host in self.after:
            host.follow(journey, fields)
        for host in self.joins:
            host.gather(journey)

    def _arrived(self, journey: Journey, fields: Fields) -> None:
        """The last output was reached: the fields of all of them, in their order."""
        if len(journey.outputs) > 1:
            fields = {k: v for name in journey.route.outputs for k, v in journey.outputs[name].items()}
        journey.end(fields, None, self.name)

    def follow(self, journey: Journey, fields: Fields) -> None:
        """Takes an item from the one node before, if the filter lets it run."""
        if journey.done is None:  # another branch has ended it
            return
        guard, none = self.node.filter, fields.get(RESULT) is None
        if guard == "or" and not none:
            self.passed(journey, fields)
        elif guard == "swap" and none:
            journey.end(fields, None, self.name)
        else:
            self._try(journey, fields, swap=guard == "swap")

    def gather(self, journey: Journey) -> None:
        """One more of those that this join waits for has ended; with the last one the item enters."""
        left = journey.waits[self.name] = journey.waits[self.name] - 1
        if left or journey.done is None:
            return
        fields: Fields = {}
        for i in self.node.inputs:
            found = journey.kept[i.producer]
            if CONTEXT in found:
                fields.setdefault(CONTEXT, found[CONTEXT])
            if i.source not in found:
                names = ", ".join(map(str, found)) or "none"
                text = f"node '{self.name}' takes field '{i.source}' of node '{i.producer}', which has only: {names}"
                journey.end(dict(found), BadRequest(text), self.name)
                return
            fields[i.name] = found[i.source]
        self._try(journey, fields, swap=False)

    def _try(self, journey: Journey, fields: Fields, swap: bool) -> None:
        try:
            self.enter(journey, fields, swap)
        except PenstockError as e:
            journey.end(dict(fields), self._told(e), self.name)

    def failed(self, stop: Stop, error: PenstockError) -> None:
        """An item failed here: it ends, unless the node is one that may be skipped."""
        if self.node.on_error == "skip":
            self.passed(stop.journey, stop.fields)
        else:
            stop.journey.end(dict(stop.fields), self._told(error), self.name)

    def _told(self, error: PenstockError) -> PenstockError:
        """The error with the node's name; what NodeModel made has it in its detail."""
        if error.detail.startswith("node '"):
            return error
        return type(error)(
            f"node '{self.name}': {error.message}", retry_after_s=error.retry_after_s, detail=error.detail
        )


def _target(graph: Graph, node: Node) -> Wrapped:
    return Wrapped(node, WRAPPER, {"ids": itertools.count(1), "compat": graph.compat})


def _config(node: Node) -> ModelConfig:
    """The node as the engine knows it. Its size is left to what the ops can take, its queue to the credits."""
    batching = BatchingConfig(
        timeout_s=max(WAITS_S, 4 * node.run_timeout_s),
        max_queue=ANY,
        retry_split=node.retry_split,
        idempotent=node.idempotent,
        run_timeout_s=node.run_timeout_s,
    )
    return ModelConfig(
        target=node.name, instances=node.instances, devices=(node.device,), transport="thread", batching=batching
    )
