"""Host: one node of a running graph. A ModelHandle over threads, and where its items go from there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.linger import Linger
from penstock.core.contracts import Observer
from penstock.core.engine.batcher import Batcher
from penstock.core.engine.handle import ModelHandle
from penstock.core.transports.thread import ThreadTransport
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import ItemFailed, LoadFailed, PenstockError
from penstock.pipeline.collate import PadTo
from penstock.pipeline.credits import Flow
from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.journey import MOST_PARTS, Journey, Stop, budget_of, nbytes_of, shape_of
from penstock.pipeline.meter import Meter
from penstock.pipeline.node import NodeModel, Shared
from penstock.pipeline.ops.base import CONTEXT, DATA, RESULT, Fields
from penstock.pipeline.placement import chain
from penstock.pipeline.routes import needs
from penstock.types import Item

QUEUED_BATCHES = 2  # that may wait for each instance, without `queue`
WAITS_S = 30.0  # the least that an item may wait for a node; a node whose runs may take long, for four of them
ANY = 2**31  # rows or bytes of a batcher's own bound: credits are what bounds a node
SLICE_S = 0.005  # of a batch without a model: longer ones gain nothing more, and let others wait
GPU_WAIT_S = 0.002  # without `wait_s`

WRAPPER = f"{NodeModel.__module__}:{NodeModel.__qualname__}"


class Host:
    """Runs a node's batches, and hands each item on. `after`, `joins` and `then` are set once all hosts are there.

    `shared` is what the instances of each node have in common, also of those that run in the call of another.
    """

    def __init__(
        self, graph: Graph, node: Node, flow: Flow, observers: Sequence[Observer], shared: dict[str, Shared]
    ) -> None:
        self.name, self.node = node.name, node
        self.after: list[Host] = []  # that follow, and are no joins
        self.joins: list[Host] = []  # that wait for this node, among others
        self.then: Host | None = None  # that follows, and is run in the same call
        self.needs = needs(graph, node.name)  # those that must have ended before, of a join
        self.kept = any(i.producer == node.name for n in graph.nodes.values() for i in n.inputs)
        self.output = not node.next
        self.row_bytes = 0.0  # of the `data` of the items that came lately, on average
        self.pressed = False  # one that is before it waits for room in its queue
        self._flow = flow
        self._pad = PadTo(node.pad_to) if node.pad_to else None
        self._names = [name.removesuffix(".shape") for name in node.bucket or ()]
        self._entry = not graph.producers(node.name)
        self._shared = shared[self.name]
        devices = [node.device] * node.instances
        then = [(graph.nodes[name], shared[name]) for name in chain(graph, node.name)]
        options = {"shared": self._shared, "then": then}
        spec = WorkerSpec(node.name, "1", _config(node), Wrapped(node, WRAPPER, options), instances=node.instances)
        transport = ThreadTransport(spec, node.instances, devices)
        self.meter = Meter(self.name, self.left, lambda: (self.queued_rows, self.running_rows))
        self.handle = ModelHandle(spec, transport, devices, ANY, [self.meter, *observers], self._policy)
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
        assert self.batcher is not None
        self.batcher.on_dispatch = lambda dispatch: self._flow.dispatched(self)

    def _policy(self) -> BatchPolicy:
        """Called once the ops are known."""
        wait_s = self.node.wait_s
        if not self._shared.model:
            wait_s = 0.0
        elif wait_s is None:
            wait_s = 0.0 if self.node.device == "cpu" else GPU_WAIT_S
        return Linger(
            Adaptive(wait_s if self._entry else 0.0),  # where items come from outside, arrivals tell what is coming
            wait_s=0.0 if self._entry else wait_s,
            coming=partial(self._flow.coming, self),
            credit=partial(self._flow.credit, self),
            slice_s=None if self._shared.model else SLICE_S,
        )

    @property
    def queued_rows(self) -> int:
        """Items that wait here."""
        return 0 if self.batcher is None else self.batcher.scheduler.queued_rows

    @property
    def running_rows(self) -> int:
        """Items that run here."""
        return 0 if self.batcher is None else self.batcher.scheduler.running_rows

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
        return self.node.queue or QUEUED_BATCHES * self.at_once

    @property
    def at_once(self) -> int:
        """Items that it is meant to run at once. Slices are the smaller the more instances share what waits."""
        sliced = not self._shared.model and self.node.max_batch is None
        return max(self.node.instances, self.max_batch) if sliced else self.node.instances * self.max_batch

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
            data = fields.get(RESULT if swap else DATA)
            nbytes = nbytes_of(data)
            self.row_bytes += (nbytes - self.row_bytes) * (0.1 if self.row_bytes else 1.0)
            call = batcher.submit(item, stop, budget_s, journey.priority, self._bucket(fields, data), nbytes)
        stop.call = call
        journey.visits.add(stop)

    def left(self) -> None:
        """A batch has ended, or a queued item: there may be room, or nothing on its way any more."""
        if self._flow.blocked:
            self._flow.stir()

    def _bucket(self, fields: Fields, data: Any) -> str:
        """Only items with the same may share a batch."""
        fill = None if self._pad is None else partial(self._pad.shape, fields=fields)
        if self.node.bucket is None:
            return shape_of(data, fill) if self._shared.given else ""
        return " ".join(shape_of(data if name == DATA else fields.get(name), fill) for name in self._names)

    def passed(self, journey: Journey, fields: Fields) -> None:
        """An item has been here: it goes on, to all that follow, or ends."""
        if self.output:
            journey.outputs[self.name] = fields
            if len(journey.outputs) == len(journey.route.outputs):
                self._arrived(journey, fields)
            return
        if self.kept:
            journey.kept[self.name] = fields
        if len(self.after) + len(self.joins) > 1:
            fields = _read_only(fields)
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
                if i.source == RESULT:  # a filter has ended the item on that branch: so it ends
                    journey.end(dict(found), None, self.name)
                    return
                names = ", ".join(map(str, found)) or "none"
                text = f"node '{self.name}' takes field '{i.source}' of node '{i.producer}', which has only: {names}"
                journey.end(dict(found), ItemFailed(text), self.name)
                return
            fields[i.name] = found[i.source]
        self._try(journey, fields, swap=False)

    def _try(self, journey: Journey, fields: Fields, swap: bool) -> None:
        try:
            self.enter(journey, fields, swap)
        except PenstockError as e:
            self._gave_up(journey, fields, e)

    def failed(self, stop: Stop, error: PenstockError) -> None:
        """An item failed here, or was dropped."""
        self.left()
        self._gave_up(stop.journey, stop.fields, error)

    def _gave_up(self, journey: Journey, fields: Fields, error: PenstockError) -> None:
        """The item ends; or goes on as it came, where the node may be skipped and somebody still waits."""
        over = self.handle.state == "DRAINING" or (
            journey.deadline_s is not None and journey.deadline_s <= time.monotonic()
        )
        if self.node.on_error == "skip" and not over:
            self.passed(journey, fields)
        else:
            journey.end(dict(fields), self.told(error), self.name)

    def told(self, error: PenstockError) -> PenstockError:
        """The error with the node's name; what NodeModel made has it in its detail."""
        if error.detail.startswith("node '"):
            return error
        return type(error)(
            f"node '{self.name}': {error.message}", retry_after_s=error.retry_after_s, detail=error.detail
        )


def _read_only(fields: Fields) -> Fields:
    """The fields with arrays that cannot be written, also in lists: others see them too."""
    return {
        name: list(map(_locked, value)) if type(value) is list and len(value) <= MOST_PARTS else _locked(value)
        for name, value in fields.items()
    }


def _locked(value: Any) -> Any:
    """An array of NumPy that cannot be written, the one that was handed in stays as it is; anything else as it is."""
    if not hasattr(value, "setflags"):
        return value
    view = value.view()
    view.setflags(write=False)
    return view


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
