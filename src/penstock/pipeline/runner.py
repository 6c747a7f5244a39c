"""PipelineRunner: runs all nodes of a graph concurrently, in threads and processes. Body: the children of a fan-out.

Everything here runs with one guard: on the loop, or on the thread of a node that has run a batch.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.core.arrays import nbytes_of
from penstock.core.contracts import Observer
from penstock.core.engine.direct import StageDriver
from penstock.core.engine.drivers import LaterCall, LaterCalls
from penstock.core.transports.slot import within
from penstock.core.wire.slabs import SlabPool
from penstock.errors import BadRequest, DeadlineExceeded, ItemFailed, ModelNotReady, PenstockError, QueueFull, nearest
from penstock.pipeline.engine import POOL_BYTES, Backpressure, NodeEngine
from penstock.pipeline.graph import REQUEST, Each, Graph, ItemRoute, chain_of, outside, route, subgraph_of
from penstock.pipeline.node import SharedState, placed
from penstock.pipeline.ops.base import DATA, NODE_NAME, RESULT, Fields
from penstock.pipeline.traversal import Done, ItemOutcome, RunningNode, Traversal, connect, locked, read_only
from penstock.types import Trace

LONGEST_NAME = 128  # of a node in an error message, because callers may send any length


class PipelineRunner:
    """Takes items through a graph. Call `start` first and `close` last. Every accepted item has exactly one outcome."""

    def __init__(
        self, graph: Graph, *, observers: Sequence[Observer] = (), on_room: Callable[[], object] = lambda: None
    ) -> None:
        """`graph` has passed `check`. `on_room` is called when bytes leave the queue of the entry while it is full."""
        self.graph = graph = placed(graph)
        self.in_flight = 0  # items
        self._takes_request = REQUEST in graph.kept
        self._routes: dict[str, ItemRoute] = {graph.entry: route(graph, graph.entry)}
        self._backpressure = Backpressure(graph)
        self._calls = LaterCalls(asyncio.get_running_loop())
        shared = {name: SharedState(compat=graph.compat) for name in graph.nodes}
        in_processes = any(node.processes for node in graph.nodes.values())
        self._pool = SlabPool(POOL_BYTES) if in_processes else None
        engines = [
            NodeEngine(graph, node, self._backpressure, observers, shared, self._calls, self._pool)
            for node in graph.nodes.values()
            if node.alias_of is None
        ]
        owners = {engine.name: engine for engine in engines}
        self._engines = engines
        self._nodes = {
            name: RunningNode(graph, node, owners[node.alias_of or name]) for name, node in graph.nodes.items()
        }
        self._backpressure.on_room = on_room
        self._backpressure.connect(owners)
        connect(graph, self._nodes)
        bodies: dict[str, Body] = {}
        for name, node in self._nodes.items():
            node.chained = next((self._nodes[after] for after in node.engine.chained), None)
            if node.filter is not None:
                for outcome, skipped in (("serial_skip", chain_of), ("subgraph_skip", subgraph_of)):
                    node.skips[outcome] = [self._nodes[other] for other in skipped(graph, name)]
            if node.node.each is not None:
                first = self._nodes[node.node.each.body]
                node.body = bodies.setdefault(first.name, Body(graph, first, self._backpressure))
        self.width = 0  # most items inside at once, known once it is loaded
        self._state = "LOADING"
        self._emptied = asyncio.Event()

    async def start(self) -> None:
        """Returns when all instances of all nodes are up. Raises LoadFailed, ConfigError that name the node."""
        try:
            await asyncio.gather(*(engine.load() for engine in self._engines))
        except BaseException:
            await self.close(0.0)
            raise
        self.width = self.graph.in_flight or sum(e.capacity + e.concurrency for e in self._engines)
        if self._state == "LOADING":
            self._state = "READY"

    async def close(self, drain_s: float) -> None:
        """Answers accepted items for at most `drain_s`, rejects the rest, and stops every thread."""
        end = time.monotonic() + drain_s
        self._state = "CLOSED"
        if self.in_flight and drain_s > 0:
            self._emptied.clear()
            await within(self._emptied, drain_s)
        left_s = max(0.0, end - time.monotonic())
        await asyncio.gather(*(engine.handle.close(left_s) for engine in self._engines))
        if self._pool is not None:
            self._pool.close()

    def forget(self) -> None:
        """In a forked child: closes its copies of what belongs to the nodes' processes."""
        for engine in self._engines:
            engine.handle.instances.forget()

    def submit(
        self,
        fields: Fields,
        done: Done,
        *,
        node: str | None = None,
        budget_s: float | None = None,
        priority: int = 0,
        trace: Trace | None = None,
    ) -> Traversal:
        """Accepts an item and calls `done` once, on the loop. `fields` are copied.

        The item begins at `node`, else at the node in its field `node_name`, else at the entry. Raises BadRequest for
        an unknown node, QueueFull, ModelNotReady, DeadlineExceeded.
        """
        if self._state != "READY":
            raise ModelNotReady(f"pipeline '{self.graph.name}' is {self._state.lower()}", retry_after_s=1.0)
        start = node
        if start is None and len(self._nodes) > 1:
            start = fields.get(NODE_NAME)
        if start is None:
            start = self.graph.entry
        known = self._routes.get(start) if isinstance(start, str) else None
        path = known or self._route(start)
        if self.in_flight >= self.width:
            raise QueueFull(f"the pipeline is full ({self.in_flight} items are inside): try again later")
        fields = self.graph.begun(fields)
        deadline_s = None if budget_s is None else time.monotonic() + budget_s
        traversal = Traversal(path, done, self._ended, deadline_s, priority, [] if self.graph.trace else None)
        traversal.trace = trace
        self.in_flight += 1
        shared = read_only(fields) if self._takes_request or len(path.starts) > 1 else fields
        if self._takes_request:
            traversal.kept[REQUEST] = shared
        for first in [self._nodes[name] for name in path.starts]:
            try:
                first.start(traversal, shared)
            except BaseException as e:
                traversal.cancel()
                if isinstance(e, PenstockError):
                    raise first.located(e) from None
                raise
        return traversal

    @property
    def has_room(self) -> bool:
        """Whether another item may enter: the pipeline has room for it, and the entry's queue for its bytes."""
        starts = self._routes[self.graph.entry].starts
        return self.in_flight < self.width and all(self._nodes[name].engine.has_room_for_bytes for name in starts)

    @property
    def entry_driver(self) -> StageDriver | None:
        """What takes the requests of items that begin at the entry; None if they may also begin elsewhere."""
        starts = self._routes[self.graph.entry].starts
        node = self._nodes[starts[0]]
        whole = len(starts) == 1 and node.condition is None and node.filter is None
        driver = node.engine.driver
        return driver if whole and isinstance(driver, StageDriver) else None

    def _route(self, start: Any) -> ItemRoute:
        if not isinstance(start, str) or start not in self.graph.nodes:
            given = repr(start[:LONGEST_NAME]) if isinstance(start, str) else f"a {type(start).__name__}"
            raise BadRequest(
                f"{NODE_NAME} is {given}, which is no node of pipeline '{self.graph.name}'"
                f"{nearest(given, self.graph.nodes)} (it has {', '.join(self.graph.nodes)})"
            )
        found = self._routes[start] = route(self.graph, start)
        return found

    def _ended(self, traversal: Traversal) -> None:
        self.in_flight -= 1
        self._backpressure.wake()
        if not self.in_flight and self._state == "CLOSED":
            self._calls.loop.call_soon_threadsafe(self._emptied.set)

    @property
    def ready(self) -> bool:
        """True while every node can run items."""
        return self._state == "READY" and all(engine.handle.ready for engine in self._engines)

    def statistics(self) -> dict[str, object]:
        """The statistics of each node by name, and the number of items inside."""
        nodes = {engine.name: engine.statistics() for engine in self._engines}
        return {"in_flight": self.in_flight, "width": self.width, "nodes": nodes}

    def node(self, name: str) -> RunningNode:
        return self._nodes[name]


# ---- fan-outs: an item's elements, as children, through a body

TURN = 256  # most children that start in one turn of the loop


class Body:
    """A sub-graph for children. It starts one of each parent in turn, while its first node has room.

    A child counts as if those of its parent that have not ended had run before it. If the next batches are full, only
    parents with less than their share of one may start more. So a parent that comes later gets into the next batch.
    """

    def __init__(self, graph: Graph, first: RunningNode, backpressure: Backpressure) -> None:
        self.first = first
        self.outside = outside(graph, first.name)
        self.route = route(graph, first.name, self.outside)
        self._backpressure = backpressure
        self._parents: deque[Parent] = deque()  # with children that have not started
        self._due = False

    def take(self, node: RunningNode, traversal: Traversal, fields: Fields) -> None:
        """Splits an item that has run the steps of `node`. After its children it passes to the next nodes."""
        if traversal.done is None:  # another branch has ended the item
            return
        try:
            parent = Parent(self, node, traversal, fields)
        except PenstockError as e:
            node.end_or_skip(traversal, fields, e)
            return
        if parent.begin():
            self._parents.append(parent)
            self.wake()

    def wake(self) -> None:
        """Starts more children, in the next turn of the loop."""
        if self._parents and not self._due:
            self._due = True
            self.first.engine.calls.soon(self._start)

    def _start(self) -> None:
        self._due = False
        engine, parents = self.first.engine, self._parents
        row_s, rows = engine.row_s, engine.concurrency
        left = TURN
        waiting = 0  # parents in a row that may not start more
        while parents and waiting < len(parents):
            room = min(left, self._backpressure.room(self.first.name))
            if room < 1:
                break
            while parents and room and waiting < len(parents):
                parent = parents.popleft()
                if engine.queued_rows >= rows and parent.inside * (len(parents) + 1) >= rows:
                    parents.append(parent)
                    waiting += 1
                    continue
                if parent.start(row_s):
                    parents.append(parent)
                waiting, room, left = 0, room - 1, left - 1
        if not parents:
            return
        if left:
            self._backpressure.blocked.add(self)
        else:  # others first
            self._due = True
            engine.calls.at(time.monotonic(), self._start)

    def ended(self) -> None:
        """A parent has left, so another may begin."""
        self._backpressure.wake()


class Parent:
    """One item in a fan-out: its children, and what is gathered of those that have ended.

    Raises BadRequest for more elements than `max_fanout`, ItemFailed for a field that cannot be split.
    """

    def __init__(self, body: Body, node: RunningNode, traversal: Traversal, fields: Fields) -> None:
        assert node.node.each is not None
        each = node.node.each
        self._body, self._node, self._each, self._traversal, self._fields = body, node, each, traversal, fields
        given = read_only(fields)  # the children share it
        given[DATA] = given.pop(RESULT)
        self._given = given
        self._elements = [None] if each.split is None else elements_of(given, self._field, each)
        count = len(self._elements)
        self._gathered: list[list[Any]] = [[None] * count for _ in each.gather]
        self._children: dict[int, Traversal] | None = {}  # None: the item has left
        self._next, self._left = 0, count
        self._nbytes = nbytes_of(given[DATA])
        self._timer: LaterCall | None = None
        budget_s = traversal.budget_s(node.node.deadline_s)
        self.deadline_s = None if budget_s is None else time.monotonic() + budget_s

    @property
    def _field(self) -> str:
        """The field to split, as the children receive it."""
        return DATA if self._each.split == RESULT else self._each.split or ""

    def begin(self) -> bool:
        """Holds the item here. Returns whether it has children."""
        if not self._left:
            self._gather()
            return False
        engine = self._node.engine
        engine.parents += 1
        engine.parent_bytes += self._nbytes
        self._traversal.visits.add(self)
        if self.deadline_s is not None:
            self._timer = engine.calls.at(self.deadline_s, self._expire)
        return True

    @property
    def inside(self) -> int:
        """Children that have started and not ended."""
        return len(self._children or ())

    def start(self, row_s: float) -> bool:
        """Starts the next child, `row_s` behind each other one. Returns whether there are more."""
        if self._children is None:
            return False
        place, self._next = self._next, self._next + 1
        traversal, name, fields = self._traversal, self._node.name, self._given
        if self._each.split is not None:
            fields = {**fields, self._field: locked(self._elements[place])}
        child = Traversal(
            self._body.route,
            partial(self._ended, place),
            _left_alone,
            self.deadline_s,
            traversal.priority,
            None if traversal.hops is None else [],
        )
        child.shared, child.trace = self._given[DATA], traversal.trace
        child.behind_s = row_s * len(self._children)
        self._children[place] = child
        if self._body.outside:
            known = traversal.kept | {name: fields}
            child.kept = {other: known[other] for other in self._body.outside if other in known}
            child.dead = traversal.dead and dict(traversal.dead)
        first = self._body.first
        if first.node.inputs:
            child.waits[first.name] = 1
            first.join(child)
        else:
            first.begin(child, fields)
        return self._next < len(self._elements)

    def leave(self) -> None:
        """Drops the children, because the item has ended."""
        children, self._children = self._children, None
        if children is None:
            return
        self._traversal.visits.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        for child in children.values():
            child.cancel()
        engine = self._node.engine
        engine.parents -= 1
        engine.parent_bytes -= self._nbytes
        self._body.ended()

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("the deadline passed before all children ended"))

    def _ended(self, place: int, outcome: ItemOutcome) -> None:
        """Takes what a child gives. A failed one ends the item, or counts as the fan-out says."""
        if self._children is None:
            return
        del self._children[place]
        self._left -= 1
        if self._traversal.hops is not None:
            self._traversal.hops += [replace(hop, element=(place, *hop.element)) for hop in outcome.hops]
        if self.deadline_s is not None and self.deadline_s <= time.monotonic():
            self._expire()
            return
        error = outcome.error
        if error is None and (missing := next((n for n in self._each.gather if n not in outcome.fields), None)):
            ended = f" at node '{outcome.node}'" if outcome.node else ""
            error = ItemFailed(f"ended{ended} without the field '{missing}'")
        if error is None:
            for name, values in zip(self._each.gather, self._gathered, strict=True):
                values[place] = outcome.fields[name]
            if self._each.split is None:
                self._fields = outcome.fields
        elif self._each.on_item_error == "fail_parent":
            self._fail(error if self._each.split is None else self._of_element(error, place))
            return
        elif self._each.on_item_error == "drop":
            for values in self._gathered:
                values[place] = UNSET
        if not self._left:
            self.leave()
            self._gather()

    def _fail(self, error: PenstockError) -> None:
        self.leave()
        self._node.end_or_skip(self._traversal, self._fields, error)

    def _gather(self) -> None:
        """Passes the item to the next nodes."""
        fields = dict(self._fields)
        for name, values in zip(self._each.gather, self._gathered, strict=True):
            fields[name] = [value for value in values if value is not UNSET]
        self._node.passed(self._traversal, fields)

    def _of_element(self, error: PenstockError, place: int) -> PenstockError:
        """The error with the element's place in front. A user's class that cannot be made anew becomes ItemFailed."""
        where = f"node '{self._node.name}', element {place} of '{self._each.split}'"
        message, detail = f"{where}: {error.message}", f"{where}\n{error.detail}"
        try:
            return type(error)(message, retry_after_s=error.retry_after_s, detail=detail)
        except TypeError:
            return ItemFailed(message, detail=detail)


def elements_of(fields: Fields, name: str, each: Each) -> Any:
    """The elements of a field: a list, a tuple, or an array, whose elements are its rows.

    Raises ItemFailed: no such field, or another type; BadRequest: more elements than `max_fanout`.
    """
    if name not in fields:
        raise ItemFailed(f"there is no field '{name}' to split, only: {', '.join(map(str, fields))}")
    value = fields[name]
    if not isinstance(value, list | tuple) and not len(getattr(value, "shape", ())):
        raise ItemFailed(f"field '{name}' is {type(value).__name__}, expected a list, a tuple or an array with rows")
    if each.max_fanout is not None and len(value) > each.max_fanout:
        raise BadRequest(f"field '{name}' has {len(value)} elements, expected at most {each.max_fanout} (max_fanout)")
    return value


def _left_alone(child: Traversal) -> None:
    """A child that ends frees nothing but its place in queues, which they report."""
