"""Traversal: one item on its way through a graph, and RunningNode: the nodes that pass it on.

Everything here runs with the guard of the runner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec import Struct, field

from penstock.core.arrays import MOST_PARTS, nbytes_of
from penstock.core.contracts import Ticket
from penstock.core.engine.calls import Call
from penstock.errors import BadRequest, ItemFailed, PenstockError, describe
from penstock.pipeline import filters
from penstock.pipeline.collate import PadTo, shape_of
from penstock.pipeline.engine import NodeEngine
from penstock.pipeline.filters import Condition
from penstock.pipeline.graph import Graph, ItemRoute, Join, Node, arriving, starts_item, unchanged
from penstock.pipeline.handover import Arrived, BatchStamp, Visit
from penstock.pipeline.ops.base import DATA, RESULT, Fields
from penstock.tracing import child_of
from penstock.types import Item, ItemResult, Sink, Trace

log = logging.getLogger("penstock.pipeline")


class Hop(Struct, frozen=True):
    """One node on an item's path: the batch it was in, the batch's size, seconds in the queue and in the batch.

    `element` has the place of each element on the way from the item to this child of it; () for the item itself.
    """

    node: str
    batch_id: int
    size: int
    wait_s: float
    run_s: float
    element: tuple[int, ...] = ()


class ItemOutcome(Struct, frozen=True):
    """The end of one item.

    `fields` are the item's fields after the last node, with `result` unless a filter ended the item earlier. For a
    failed item they are the fields before the failure. `node` is where the item ended.
    """

    fields: dict[str, Any]
    error: PenstockError | None = None
    node: str = ""
    hops: tuple[Hop, ...] = ()


Done = Callable[[ItemOutcome], None]


class Leaves(Protocol):
    """An item's stay at a node, or in a fan-out."""

    def leave(self) -> None:
        """Drops the item there, because it has ended."""


class Splits(Protocol):
    """The body of a fan-out."""

    def take(self, node: RunningNode, traversal: Traversal, fields: Fields) -> None:
        """Splits an item of the node, and then passes it to the next nodes."""


class NodeServer(Protocol):
    """Runs the items of a node: a pipeline's engine, or a registered model of a workflow."""

    @property
    def takes_arrays(self) -> bool:
        """Whether only arrays of one shape can share a batch."""

    @property
    def draining(self) -> bool:
        """Whether the node is closing."""

    def submit(self, item: Item, sink: Sink, bucket: str, nbytes: int) -> Ticket:
        """Queues an item whose `data` has `nbytes` bytes. Raises PenstockError."""

    def freed(self) -> None:
        """A batch or a queued item has left the node."""


class Traversal(Struct, eq=False):
    """One accepted item. Its caller may `cancel` it.

    `waits` counts, for each join, the nodes that have not finished yet. `kept` has the fields of nodes that later joins
    read. `outputs` has the fields that reached an output. `dead` has the nodes that a condition removed from the item's
    path, with the fields before the removal. `hops` is None unless the path is recorded. `trace`: of its request, if
    that is traced.
    """

    route: ItemRoute
    done: Done | None
    on_end: Callable[[Traversal], None]
    deadline_s: float | None = None
    priority: int = 0
    hops: list[Hop] | None = None
    visits: set[Leaves] = field(default_factory=set)
    waits: dict[str, int] = field(default_factory=dict)
    kept: dict[str, Fields] = field(default_factory=dict)
    outputs: dict[str, Fields] = field(default_factory=dict)
    dead: dict[str, Fields] | None = None
    trace: Trace | None = None
    shared: Any = None  # data that children share: their parent counts its bytes
    behind_s: float = 0.0  # how much later a child may be served than others that arrive with it

    def __post_init__(self) -> None:
        self.waits |= self.route.waits

    def arrived(self, fields: Fields, node: str) -> None:
        """Ends the item when all its outputs are decided. It has the fields of all that are alive, or of all dead."""
        self.outputs[node] = fields
        names, dead = self.route.outputs, self.dead or ()
        if len(self.outputs) < len(names):
            return
        if len(names) > 1:
            alive = [name for name in names if name not in dead] or names
            fields = {name: value for output in alive for name, value in self.outputs[output].items()}
        self.end(fields, None, node)

    def end(self, fields: Fields, error: PenstockError | None, node: str) -> None:
        """Reports the outcome once, and cancels visits to other branches."""
        done, self.done = self.done, None
        if done is None:
            return
        self._leave()
        if error is None and self.route.sources:
            taken = [i for i in self.route.sources if i.source in self.kept.get(i.producer, ())]
            fields = fields | {i.name: self.kept[i.producer][i.source] for i in taken}
        try:
            done(ItemOutcome(fields, error, node, tuple(self.hops) if self.hops else ()))
        except Exception:
            log.exception("done_failed node=%s", node)

    def cancel(self) -> None:
        """Drops the item: queued visits do not run, running ones are ignored, and `done` is not called."""
        if self.done is not None:
            self.done = None
            self._leave()

    def budget_s(self, limit_s: float | None) -> float | None:
        """Seconds that the item has at a node: until its deadline, at most the node's limit."""
        if self.deadline_s is None:
            return limit_s
        left = self.deadline_s - time.monotonic()
        return left if limit_s is None else min(left, limit_s)

    def _leave(self) -> None:
        visits, self.visits = self.visits, set()
        for visit in visits:
            visit.leave()
        self.on_end(self)


class TraversalVisit(Visit):
    """A Visit with its traversal, its node, and the call that runs it. It is the sink of the node's result."""

    __slots__ = ("call", "node", "traversal")

    def __init__(self, node: RunningNode, traversal: Traversal, fields: Fields, swap: bool) -> None:
        self.fields = fields
        self.swap = swap
        self.place = -1
        self.node = node
        self.traversal = traversal
        self.call: Ticket | None = None

    def leave(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call.cancel()

    def __call__(self, result: ItemResult) -> None:
        """Takes the node's result. Always ends the item or passes it on, even if this raises."""
        self.traversal.visits.discard(self)
        try:
            self._took(result)
        except Exception as e:  # for instance a value whose attributes raise
            log.exception("hand_over_failed node=%s", self.node.name)
            error = self.node.located(PenstockError(f"internal error: {describe(e)}"))
            self.traversal.end(dict(self.fields), error, self.node.name)

    def _took(self, result: ItemResult) -> None:
        call, self.call = self.call, None  # breaks a reference cycle
        traversal, node = self.traversal, self.node
        if result.error is not None:
            node.failed(self, result.error)
            return
        fields: Fields
        stamp: BatchStamp
        found = result.body
        fields, stamp, *further = found.whole(self.fields) if type(found) is Arrived else found
        if traversal.hops is not None and isinstance(call, Call):
            self._hop(traversal.hops, node, stamp, call.entry.arrival_s)
        if further:
            self._pass_chained(traversal, node, fields, stamp, further)
        else:
            node.ran(traversal, fields)

    def _pass_chained(
        self, traversal: Traversal, node: RunningNode, fields: Fields, stamp: BatchStamp, further: list[Any]
    ) -> None:
        """Records nodes that ran in the same call. `further` has fields and stamp of each, or a final error."""
        rest = iter(further)
        for found in rest:
            assert node.chained is not None
            node, given = node.chained, fields
            if isinstance(found, PenstockError):
                node.engine.meter.chained(None)
                self.fields, self.swap = given, True
                node.failed(self, found)
                return
            end_s, fields, stamp = stamp.start_s + stamp.run_s, found, next(rest)
            node.engine.meter.chained(stamp)
            if traversal.hops is not None:
                self._hop(traversal.hops, node, stamp, end_s)
        node.ran(traversal, fields)

    @staticmethod
    def _hop(hops: list[Hop], node: RunningNode, stamp: BatchStamp, arrival_s: float) -> None:
        wait_s = max(0.0, stamp.start_s - arrival_s)
        hops.append(Hop(node.name, stamp.batch_id, stamp.size, wait_s, stamp.run_s))


class RunningNode:
    """One node of a running graph: queues items at its engine and passes them on to the next nodes.

    The runner sets `followers`, `joins`, `chained` and `body` when all nodes exist.
    """

    def __init__(self, graph: Graph, node: Node, server: NodeServer) -> None:
        self.name, self.node, self.server = node.name, node, server
        self.followers: list[RunningNode] = []  # next nodes, except joins
        self.joins: list[RunningNode] = []  # joins that wait for this node
        self.chained: RunningNode | None = None  # the next node, if it runs in the same call
        self.body: Splits | None = None  # of the node's fan-out
        self.taken = Join(graph, node)
        self.filter = filters.made(node.filter)
        self.skips: dict[str, list[RunningNode]] = {}  # the nodes that a filter skips, by its outcome
        self.condition = None if node.when is None else Condition(node.when)
        self._kept = node.name in graph.kept
        self._pad = PadTo(node.pad_to) if node.pad_to else None
        self._bucket_fields = [name.removesuffix(".shape") for name in node.bucket or ()]

    @property
    def engine(self) -> NodeEngine:
        """The server of a node that a pipeline runs itself."""
        assert isinstance(self.server, NodeEngine)
        return self.server

    def enter(self, traversal: Traversal, fields: Fields, swap: bool) -> None:
        """Queues an item. Raises ModelNotReady, DeadlineExceeded."""
        visit = TraversalVisit(self, traversal, fields, swap)
        data = fields.get(RESULT if swap else DATA)
        bucket = self._bucket(fields, data)
        nbytes = 0 if data is traversal.shared else nbytes_of(data)
        item = Item(visit, budget_s=traversal.budget_s(self.node.deadline_s), priority=traversal.priority)
        if traversal.trace is not None:
            item.trace = child_of(traversal.trace)
        if traversal.behind_s:
            item.behind_s = traversal.behind_s
        visit.call = self.server.submit(item, visit, bucket, nbytes)
        traversal.visits.add(visit)

    def _bucket(self, fields: Fields, data: Any) -> str:
        """Only items with equal buckets share a batch."""
        pad = None if self._pad is None else partial(self._pad.shape, fields=fields)
        if self.node.bucket is None:
            return shape_of(data, pad) if self.server.takes_arrays else ""
        return " ".join(shape_of(data if name == DATA else fields.get(name), pad) for name in self._bucket_fields)

    def ran(self, traversal: Traversal, fields: Fields) -> None:
        """Takes an item that has run the steps: through the fan-out, or to the next nodes."""
        if self.body is not None and fields.get(RESULT) is not None:
            self.body.take(self, traversal, fields)
        else:
            self.passed(traversal, fields)

    def passed(self, traversal: Traversal, fields: Fields) -> None:
        """Passes an item on to all next nodes, or ends it at an output."""
        if self._kept:
            traversal.kept[self.name] = fields
        if not self.node.next:
            traversal.arrived(fields, self.name)
            return
        if len(self.followers) + len(self.joins) > 1:
            fields = read_only(fields)
        for node in self.followers:
            node.follow(traversal, fields)
        for node in self.joins:
            node.join(traversal)

    def follow(self, traversal: Traversal, fields: Fields) -> None:
        """Takes an item from the only previous node, subject to the filter."""
        if traversal.done is None:  # another branch has ended the item
            return
        guard, no_result = self.node.filter, fields.get(RESULT) is None
        if guard == "or" and not no_result:
            self.passed(traversal, fields)
        elif guard == "swap" and no_result:
            traversal.end(fields, None, self.name)
        else:
            self.receive(traversal, fields, swap=guard == "swap")

    def died(self, traversal: Traversal, fields: Fields) -> None:
        """Takes an item that a condition removed from this branch. Joins and outputs learn that it will not come."""
        if traversal.done is None:
            return
        if traversal.dead is None:
            traversal.dead = {}
        traversal.dead[self.name] = fields
        if not self.node.next:
            traversal.arrived(fields, self.name)
        for node in self.followers:
            node.died(traversal, fields)
        for node in self.joins:
            node.join(traversal)

    def join(self, traversal: Traversal) -> None:
        """Counts one finished source. After the last one the item enters."""
        left = traversal.waits[self.name] = traversal.waits[self.name] - 1
        if left or traversal.done is None:
            return
        if traversal.dead and self.taken.is_dead(traversal.dead):
            self.died(traversal, self.taken.before(traversal.kept, traversal.dead))
            return
        error: PenstockError | None = None
        fields: Fields | None = None
        try:
            fields = self.taken.fields(traversal.kept)
        except ItemFailed as e:
            error = e
        if fields is None:
            traversal.end(dict(self.taken.before(traversal.kept, traversal.dead or {})), error, self.name)
        else:
            self.receive(traversal, fields, swap=False)

    def start(self, traversal: Traversal, fields: Fields) -> None:
        """Takes an item from outside. Raises as `enter` does."""
        given = self.taken.fields(traversal.kept) if starts_item(self.node) else fields
        if self.condition is None and self.filter is None:
            self.enter(traversal, dict(given or {}), swap=False)
        else:  # later, because the item may end here, and its caller has no ticket yet
            self.engine.calls.soon(partial(self.begin, traversal, dict(given or {})))

    def begin(self, traversal: Traversal, fields: Fields) -> None:
        """Takes an item that may end at the condition."""
        if traversal.done is None:
            return
        try:
            self.receive(traversal, fields, swap=False)
        except Exception as e:  # for instance a value whose attributes raise
            log.exception("begin_failed node=%s", self.name)
            traversal.end(fields, self.located(PenstockError(f"internal error: {describe(e)}")), self.name)

    def receive(self, traversal: Traversal, fields: Fields, swap: bool) -> None:
        """Queues an item if it meets the condition. Errors end the item."""
        try:
            if self.filter is not None:
                seen = dict(fields)
                if (outcome := self.filter(seen)) != "run":
                    self._refuse(traversal, seen, outcome)
                    return
                fields = seen
            if self.condition is None or self.condition(arriving(fields) if swap else fields):
                self.enter(traversal, fields, swap)
            else:
                self._refuse(traversal, fields, self.node.otherwise)
        except PenstockError as e:
            self.end_or_skip(traversal, fields, e)

    def _refuse(self, traversal: Traversal, fields: Fields, outcome: str) -> None:
        """Handles an item that the condition (`Node.otherwise`) or the filter (`filters.OUTCOMES`) did not let run."""
        match outcome:
            case "skip":
                self.passed(traversal, unchanged(fields))
            case "skip_branch":
                self.died(traversal, unchanged(fields))
            case "stop" | "break":
                traversal.end(unchanged(fields), None, self.name)
            case "fail":
                raise BadRequest(f"the item does not meet the condition '{self.node.when}'")
            case "error":
                raise ItemFailed(f"the filter '{self.node.filter}' returned Error")
            case _:
                self._skip(self.skips[outcome], traversal, read_only(unchanged(fields)))

    @staticmethod
    def _skip(skipped: Sequence[RunningNode], traversal: Traversal, fields: Fields) -> None:
        """Passes an item on to the nodes after skipped ones, which all give these fields."""
        for node in skipped:
            if node._kept:
                traversal.kept[node.name] = fields
        for node in skipped:
            if not node.node.next:
                traversal.arrived(fields, node.name)
            for after in (after for after in node.followers if after not in skipped):
                after.follow(traversal, fields)
            for after in (after for after in node.joins if after not in skipped):
                after.join(traversal)

    def failed(self, visit: TraversalVisit, error: PenstockError) -> None:
        """Handles an item that failed here or was dropped."""
        self.server.freed()
        self.end_or_skip(visit.traversal, visit.fields, error)

    def end_or_skip(self, traversal: Traversal, fields: Fields, error: PenstockError) -> None:
        """Ends the item. With `on_error = "skip"` it goes on unchanged, unless it is late or the node is closing."""
        late = traversal.deadline_s is not None and traversal.deadline_s <= time.monotonic()
        over = late or self.server.draining
        if self.node.on_error == "skip" and not over:
            self.passed(traversal, unchanged(fields))
        else:
            traversal.end(dict(fields), self.located(error), self.name)

    def located(self, error: PenstockError) -> PenstockError:
        """The error with the node's name. Errors of NodeModel already have it in their detail."""
        if error.detail.startswith("node '"):
            return error
        return type(error)(
            f"node '{self.name}': {error.message}", retry_after_s=error.retry_after_s, detail=error.detail
        )


def connect(graph: Graph, nodes: Mapping[str, RunningNode]) -> None:
    """Sets the followers and joins of all nodes of a graph."""
    for name, node in nodes.items():
        following = [nodes[after] for after in graph.nodes[name].next]
        node.followers = [after for after in following if not after.taken.sources]
        node.joins = [n for n in nodes.values() if name in n.taken.sources]


def read_only(fields: Fields) -> Fields:
    """The fields with read-only arrays, also in lists: several nodes see them."""
    return {
        name: list(map(locked, value)) if type(value) is list and len(value) <= MOST_PARTS else locked(value)
        for name, value in fields.items()
    }


def locked(value: Any) -> Any:
    """A read-only view of a NumPy array; any other value unchanged."""
    if not hasattr(value, "setflags"):
        return value
    view = value.view()
    view.setflags(write=False)
    return view
