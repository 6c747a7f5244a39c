"""NodeEngine: the queue, batches and instances of one running node. Backpressure: how much each node may start.

Credits are derived from the queues whenever a batch could start. Nothing is handed out, so nothing leaks when an item
fails, expires, is cancelled, or loses its worker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from penstock import metrics, tracing
from penstock.config.schema import MOST, BatchingConfig, ModelConfig
from penstock.core.batching.entry import INF
from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.scheduler import Scheduler
from penstock.core.contracts import BatchRecord, Observer, Transport
from penstock.core.engine.batcher import Batcher
from penstock.core.engine.calls import Call
from penstock.core.engine.direct import DirectTransport, StageDriver
from penstock.core.engine.drivers import LaterCalls, LoopDriver
from penstock.core.engine.handle import ModelHandle
from penstock.core.engine.tracing import TraceObserver
from penstock.core.transports.local import ThreadTransport
from penstock.core.transports.process import LendingTransport
from penstock.core.wire.slabs import SlabPool
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import LoadFailed, PenstockError
from penstock.pipeline.graph import NODE_FILTERS, Graph, Node
from penstock.pipeline.handover import BatchStamp
from penstock.pipeline.linger import Linger
from penstock.pipeline.node import NodeModel, SharedState, chain
from penstock.pipeline.ops import catalog
from penstock.types import Item, MetricDelta, Sink

QUEUED_BATCHES = 2  # batches that may wait for each instance, without `queue`
POOL_BYTES = 256 * 2**20  # shared memory for the large inputs of all nodes in processes
REPLY_BYTES = 64 * 2**20  # shared memory for the large results of each process
QUEUE_BYTES = 64 * 2**20  # bytes of `data` that may wait for a node, without `queue_bytes`
WAITS_S = 30.0  # shortest queue timeout of a node; a node with long runs allows four of them
UNLIMITED = MOST  # the batcher's own bounds, which backpressure replaces
SLICE_S = 0.005  # target duration of a batch without a model; longer batches gain nothing and delay other items
GPU_WAIT_S = 0.002  # without `wait_s`
FLUSH_S = 0.05

WRAPPER = f"{NodeModel.__module__}:{NodeModel.__qualname__}"


class NodeEngine:
    """Queues the items of a node and runs its batches in threads or processes. These read large inputs in the `pool`.

    `shared` is the common state of the instances of each node, including those that run in the call of another.
    """

    def __init__(
        self,
        graph: Graph,
        node: Node,
        backpressure: Backpressure,
        observers: Sequence[Observer],
        shared: Mapping[str, SharedState],
        calls: LaterCalls,
        pool: SlabPool | None = None,
    ) -> None:
        self.name, self.node = node.name, node
        self.chained = chain(graph, node.name)  # nodes that run in the same call
        self.row_bytes = 0.0  # moving average of the bytes of `data`
        self.pressed = False  # a previous node waits for room in this queue
        self.full_of_bytes = False  # items outside wait for room in this queue
        self.parents = 0  # items whose children are in the body of the node's fan-out
        self.parent_bytes = 0
        self._backpressure = backpressure
        self._entry = not graph.upstream(node.name)
        self.has_model = False  # an op takes batches; known once the node is loaded, as the next one
        self.takes_arrays = False  # only arrays of one shape can share a batch
        devices = [node.device] * node.instances
        options: dict[str, Any] = {
            "shared": shared[node.name],
            "then": [(graph.nodes[name], shared[name]) for name in self.chained],
        }
        if node.processes:
            steps = [step for name in (node.name, *self.chained) for step in graph.nodes[name].steps]
            options["ops"] = catalog.registered(step.op for step in steps)
        spec = WorkerSpec(node.name, "1", _config(node), Wrapped(node, WRAPPER, options), instances=node.instances)
        self.calls = calls
        transport: Transport
        self.driver: StageDriver | LoopDriver | None = None
        if node.processes:
            self.driver = LoopDriver(calls.loop, stage=True)
            transport = LendingTransport(spec, node.instances, devices, pool, REPLY_BYTES)
        elif self.calls.inbox is None:
            transport = ThreadTransport(spec, node.instances, devices)
        else:
            self.driver = driver = StageDriver(node.name, self.calls.inbox, self.calls.loop)
            transport = DirectTransport(spec, node.instances, devices, driver)
        self.meter = NodeMeter(self)
        listening = [self.meter, *observers]
        if tracing.tracer is not None:
            listening.append(TraceObserver(tracing.tracer, "node"))
        self.handle = ModelHandle(spec, transport, devices, UNLIMITED, listening, self._policy, self.driver)
        self.batcher: Batcher | None = None
        # known once the node is loaded
        self.scheduler: Scheduler | None = None  # of its queue
        self.max_batch = self.concurrency = 1  # most items of a batch, and items that should run at once
        self.capacity = 0  # items that may wait

    async def load(self) -> None:
        """Returns when every instance is up. Raises LoadFailed, ConfigError that name the node."""
        try:
            await self.handle.load()
        except PenstockError as e:
            raise type(e)(f"node '{self.name}': {e.message}", detail=e.detail) from e
        if self.handle.instances.up < self.node.instances:
            found = f"{self.handle.instances.up} of {self.node.instances} instances loaded"
            raise LoadFailed(f"node '{self.name}': only {found}", detail=self.handle.instances.why_down().detail)
        self.batcher = self.handle.batcher
        assert self.batcher is not None
        self.scheduler, node = self.batcher.scheduler, self.node
        self.max_batch = most = self.scheduler.max_batch_size
        # without a model, instances share the queue, so more make slices smaller
        sliced = not self.has_model and node.max_batch is None
        self.concurrency = max(node.instances, most) if sliced else node.instances * most
        self.capacity = node.queue or QUEUED_BATCHES * self.concurrency
        self.batcher.on_dispatch = lambda dispatch: self._backpressure.dispatched(self)

    def _policy(self) -> BatchPolicy:
        """The node's policy. The handle asks for it when the ops are loaded."""
        assert self.handle.metadata is not None
        known = self.handle.metadata.parameters
        self.has_model, self.takes_arrays = known["model"], known["takes_arrays"]
        wait_s = self.node.wait_s
        if not self.has_model:
            wait_s = 0.0
        elif wait_s is None:
            wait_s = 0.0 if self.node.device == "cpu" else GPU_WAIT_S
        return Linger(
            Adaptive(wait_s if self._entry else 0.0),  # only arrivals from outside predict the next ones
            wait_s=0.0 if self._entry else wait_s,
            coming=partial(self._backpressure.coming, self),
            credit=partial(self._backpressure.credit, self),
            slice_s=None if self.has_model else SLICE_S,
        )

    def submit(self, item: Item, sink: Sink, bucket: str, nbytes: int) -> Call:
        """Queues an item whose `data` has `nbytes` bytes. Raises ModelNotReady, DeadlineExceeded."""
        if self.batcher is None or self.handle.state != "READY":  # the handle rejects it, or waits for an instance
            call = self.handle.submit(item, sink)
            assert isinstance(call, Call), "a node is no resident model"
            return call
        self.row_bytes += (nbytes - self.row_bytes) * (0.1 if self.row_bytes else 1.0)
        call = self.batcher.submit(item, sink, bucket, nbytes)
        if item.budget_s is not None and isinstance(self.driver, StageDriver):  # a turn that is due may be due later
            self.driver.soon()
        return call

    def wake(self) -> None:
        """Lets the node form batches again, because there may be room after it."""
        if self.batcher is not None:
            self.batcher.wake()

    @property
    def draining(self) -> bool:
        return self.handle.state == "DRAINING"

    def freed(self) -> None:
        """A batch or a queued item has left the node. There may be room, or nothing more to wait for."""
        self._backpressure.wake()

    @property
    def has_room_for_bytes(self) -> bool:
        """Whether the queue has room for the bytes of another item from outside."""
        queued = self.scheduler.queued_bytes if self.scheduler else 0
        self.full_of_bytes = queued >= (self.node.queue_bytes or QUEUE_BYTES)
        return not self.full_of_bytes

    @property
    def queued_rows(self) -> int:
        return self.scheduler.queued_rows if self.scheduler else 0

    @property
    def running_rows(self) -> int:
        return self.scheduler.running_rows if self.scheduler else 0

    @property
    def row_s(self) -> float:
        """Predicted seconds of an item of a full batch; 0 before anything was learned."""
        return self.scheduler.seconds(self.max_batch) / self.concurrency if self.scheduler else 0.0

    def statistics(self) -> dict[str, object]:
        """The scheduler's estimates, and the items that wait and run."""
        found = self.handle.statistics()
        if (scheduler := self.scheduler) is not None:
            found |= {"queued": scheduler.queued_rows, "queued_bytes": scheduler.queued_bytes}
            found |= {"running": scheduler.running_rows, "capacity": self.capacity}
        return found


def _config(node: Node) -> ModelConfig:
    """The engine's configuration. The ops determine the batch size, and backpressure the queue."""
    batching = BatchingConfig(
        timeout_s=max(WAITS_S, 4 * node.run_timeout_s),
        max_queue=UNLIMITED,
        retry_split=node.retry_split,
        idempotent=node.idempotent,
        run_timeout_s=node.run_timeout_s,
    )
    return ModelConfig(
        target=node.name,
        instances=node.instances,
        devices=(node.device,),
        transport="process" if node.processes else "thread",
        batching=batching,
    )


class NodeMeter(Observer):
    """Metrics of one node: items by outcome, batches by size, seconds of waiting and running.

    It flushes a few times a second, because a metric call per item would cost as much as a hand-over.
    """

    def __init__(self, engine: NodeEngine) -> None:
        self._engine = engine
        self._items: Counter[str] = Counter()
        self._sizes: Counter[int] = Counter()
        self._waits_s: list[float] = []
        self._runs_s: list[float] = []
        self._chained = (-1, 0.0)  # the last batch
        self._due = False

    def on_complete(self, record: BatchRecord) -> None:
        self._sizes[record.rows] += 1
        self._waits_s.append(max(record.waits_s))
        self._runs_s.append(record.run_s)
        self._engine.freed()
        self._arm()

    def chained(self, stamp: BatchStamp | None) -> None:
        """Counts an item that ran in the call of the previous node: in the batch `stamp`, or failed (None)."""
        self._items["failed" if stamp is None else "ok"] += 1
        if stamp is not None and (stamp.batch_id, stamp.start_s) != self._chained:  # the first item of its batch
            self._chained = stamp.batch_id, stamp.start_s
            self._sizes[stamp.size] += 1
            self._waits_s.append(0.0)
            self._runs_s.append(stamp.run_s)
        self._arm()

    def _arm(self) -> None:
        if not self._due:
            self._due = True
            self._engine.calls.at(time.monotonic() + FLUSH_S, self.flush)

    def on_answer(self, model: str, version: str, latencies_s: Sequence[float], failed: int) -> None:
        self._items["ok"] += len(latencies_s) - failed
        self._items["failed"] += failed

    def on_reject(self, model: str, version: str, reason: str) -> None:
        self._items[reason] += 1

    def on_model_metrics(self, model: str, version: str, slot: int, deltas: Sequence[MetricDelta]) -> None:
        for delta in deltas:  # of a process; threads record theirs here
            metrics.record(delta.kind, delta.name, delta.value, delta.labels, delta.unit, delta.request_id)

    def flush(self) -> None:
        """Reports the counts since the last flush."""
        self._due = False
        node = self._engine.name
        for outcome, count in self._items.items():
            if count:
                metrics.counter("pipeline_items_total", count, node=node, outcome=outcome)
        for size, count in self._sizes.items():
            metrics.counter("pipeline_batches_total", count, node=node, size=size)
        metrics.timings("pipeline_wait", self._waits_s, node=node)
        metrics.timings("pipeline_run", self._runs_s, node=node)
        metrics.gauge("pipeline_queue_items", self._engine.queued_rows, node=node)
        metrics.gauge("pipeline_running_items", self._engine.running_rows, node=node)
        metrics.gauge("pipeline_instances", self._engine.handle.instances.up, node=node)
        self._items, self._sizes = Counter(), Counter()
        self._waits_s, self._runs_s = [], []


class Waits(Protocol):
    """A node or a body that waits for room."""

    def wake(self) -> None:
        """Lets it try again."""


class Backpressure:
    """The edges of one running graph: which nodes have room, and which wait for it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ahead: dict[str, list[NodeEngine]] = {}  # nodes that an item may enter next
        self._feeders: dict[str, list[NodeEngine]] = {}  # the reverse
        self._upstream: dict[str, list[NodeEngine]] = {}  # all nodes from which an item may come
        self._first: dict[str, list[NodeEngine]] = {}  # nodes that a child may enter first, by its body
        self.blocked: set[Waits] = set()  # nodes and bodies that wait to be woken
        self.on_room: Callable[[], object] = lambda: None  # the queue of an entry has room for bytes again

    def connect(self, engines: Mapping[str, NodeEngine]) -> None:
        """Derives the edges between engines. An alias is another place of an engine.

        An edge to an engine that comes earlier takes no credit, because the engine would wait for itself. `in_flight`
        limits these items.
        """
        owners = {name: node.alias_of or name for name, node in self._graph.nodes.items()}
        order = list(dict.fromkeys(owners[name] for name in self._graph.order()))  # by the first place of each
        for at, name in enumerate(order):
            places = [place for place, owner in owners.items() if owner == name]
            ahead = {
                owners[n]
                for place in places
                for n in self._next_queues(self._graph.nodes[(place, *engines[name].chained)[-1]].next)
            }
            upstream = {owners[n] for place in places for n in self._graph.upstream(place)}
            self._ahead[name] = [engines[n] for n in order[at + 1 :] if n in ahead]
            self._upstream[name] = [engines[n] for n in order if n in upstream and n != name]
        for body in self._graph.bodies:
            first = [engines[owners[n]] for n in self._next_queues([body])]
            before = [e for caller in self._graph.callers(body) for e in self._upstream[owners[caller]]]
            self._first[body] = [] if any(engine in before for engine in first) else first
        for name, engine in engines.items():
            self._feeders[name] = [engines[n] for n in engines if engine in self._ahead[n]]

    def _next_queues(self, following: Iterable[str]) -> set[str]:
        """The nodes whose queue an item may enter that comes to these nodes.

        It may pass nodes by, and it may enter a join by dying.
        """
        found: set[tuple[str, bool]] = set()
        entered: set[str] = set()
        stack = [(after, False) for after in following]
        while stack:
            if (step := stack.pop()) in found:
                continue
            found.add(step)
            node, dead = self._graph.nodes[step[0]], step[1]
            if not dead or node.inputs:
                entered.add(node.name)
                if node.filter not in ("swap", "run") or (node.when is not None and node.otherwise == "skip"):
                    stack += [(after, False) for after in node.next]
            if dead or node.filter not in NODE_FILTERS or (node.when is not None and node.otherwise == "skip_branch"):
                stack += [(after, True) for after in node.next]
        return entered

    def credit(self, engine: NodeEngine) -> int:
        """Most items that a node may start now, so that all following nodes have room for the results."""
        rows = min(map(self._room, self._ahead[engine.name]), default=UNLIMITED)
        each = engine.node.each
        if each is not None and (first := self._first[each.body]):  # as many as the body runs if each has one child
            full = engine.parent_bytes >= (engine.node.queue_bytes or QUEUE_BYTES)
            most = 0 if full else min(after.capacity + after.concurrency for after in first)
            rows = min(rows, most - engine.parents - engine.running_rows)
        if rows < 1:
            self.blocked.add(engine)
        return rows

    def room(self, body: str) -> int:
        """Most children that may enter a body now.

        A body whose first node also comes before the fan-out takes all, because it would wait for itself.
        """
        return min(map(self._room, self._first[body]), default=UNLIMITED)

    def _room(self, engine: NodeEngine) -> int:
        """Items that a node can accept in addition to those that run before it.

        Items that a join holds do not count: otherwise two branches would wait for each other's room.
        """
        batcher = engine.batcher
        if batcher is None:
            return 0
        scheduler = batcher.scheduler
        coming = sum(f.running_rows + f.parents for f in self._feeders[engine.name])
        rows = engine.capacity - scheduler.queued_rows - coming
        if engine.row_bytes > 0:
            left = (engine.node.queue_bytes or QUEUE_BYTES) - scheduler.queued_bytes
            by_bytes = int(left / engine.row_bytes) - coming
            if by_bytes < 1 and not coming and not scheduler.queued_rows:
                by_bytes = 1  # an item larger than the whole queue runs alone
            rows = min(rows, by_bytes)
        if rows < 1 and not engine.pressed:
            engine.pressed = True
            batcher.wake()
        return rows

    def coming(self, engine: NodeEngine, now: float) -> tuple[float, int]:
        """When a node can expect its next items, and how many, estimated from running batches upstream.

        (INF, 0): nothing is on its way, or there is no room for it.
        """
        if engine.pressed:
            return INF, 0
        out: dict[str, tuple[float, int]] = {}  # for each node: when items arrive, and how many
        for other in self._upstream[engine.name]:
            if other.batcher is None or (not other.batcher.pending and other.name not in out):
                continue
            scheduler = other.batcher.scheduler
            end_s, rows = scheduler.next_end()
            if not rows:
                begin_s, rows = out.get(other.name, (now, 1)) if not scheduler.queued_rows else (now, 1)
                end_s = begin_s + scheduler.seconds(rows)
            for after in self._ahead[other.name]:
                found = (max(end_s, now), rows)
                out[after.name] = min(found, out.get(after.name, found))
        if engine.name not in out:
            return INF, 0
        self.blocked.add(engine)
        return out[engine.name]

    def dispatched(self, engine: NodeEngine) -> None:
        engine.pressed = False
        if engine.full_of_bytes and engine.has_room_for_bytes:
            self.on_room()
        self.wake()

    def wake(self) -> None:
        """Lets all blocked nodes try again, in this pass of the loop."""
        if not self.blocked:
            return
        blocked, self.blocked = self.blocked, set()
        for waiting in blocked:
            waiting.wake()
