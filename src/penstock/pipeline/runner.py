"""PipelineRunner: runs all nodes of a graph concurrently, in threads of this process. Call it on one event loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.core.contracts import Observer
from penstock.core.worker.devices import visible_gpus
from penstock.errors import BadRequest, LoadFailed, ModelNotReady, PenstockError, QueueFull, nearest
from penstock.pipeline.engine import Backpressure, NodeEngine
from penstock.pipeline.fanout import Body
from penstock.pipeline.graph import AUTO, Graph, ItemRoute, Node, chain_of, route, subgraph_of
from penstock.pipeline.lower import files_of
from penstock.pipeline.node import SharedState, computes
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import NODE_NAME, Fields
from penstock.pipeline.runtimes import cores
from penstock.pipeline.traversal import Done, RunningNode, Traversal, connect
from penstock.runtimes.onnx import CUDA, TENSORRT, import_onnxruntime
from penstock.runtimes.torch import import_torch

log = logging.getLogger("penstock.pipeline")

LONGEST_NAME = 128  # of a node in an error message, because callers may send any length


class PipelineRunner:
    """Takes items through a graph. Call `start` first and `close` last. Every accepted item has exactly one outcome."""

    def __init__(
        self, graph: Graph, *, observers: Sequence[Observer] = (), on_room: Callable[[], object] = lambda: None
    ) -> None:
        """`graph` has passed `check`. `on_room` is called when bytes leave the queue of the entry while it is full."""
        self.graph = graph = placed(graph)
        self.in_flight = 0  # items
        self._routes: dict[str, ItemRoute] = {graph.entry: route(graph, graph.entry)}
        self._backpressure = Backpressure(graph)
        shared = {name: SharedState(compat=graph.compat) for name in graph.nodes}
        engines = [
            NodeEngine(graph, node, self._backpressure, observers, shared)
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
            try:
                await asyncio.wait_for(self._emptied.wait(), drain_s)
            except TimeoutError:
                pass
        left_s = max(0.0, end - time.monotonic())
        await asyncio.gather(*(engine.handle.close(left_s) for engine in self._engines))

    def submit(
        self, fields: Fields, done: Done, *, node: str | None = None, budget_s: float | None = None, priority: int = 0
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
        deadline_s = None if budget_s is None else time.monotonic() + budget_s
        traversal = Traversal(path, done, self._ended, deadline_s, priority, [] if self.graph.trace else None)
        self.in_flight += 1
        first = self._nodes[path.start]
        try:
            if first.condition is None and first.filter is None:
                first.enter(traversal, dict(fields), swap=False)
            else:  # later, because the item may end here, and its caller has no ticket yet
                asyncio.get_running_loop().call_soon(first.begin, traversal, dict(fields))
        except BaseException as e:
            traversal.done = None
            self._ended(traversal)
            if isinstance(e, PenstockError):
                raise first.located(e) from None
            raise
        return traversal

    @property
    def has_room(self) -> bool:
        """Whether another item may enter: the pipeline has room for it, and the entry's queue for its bytes."""
        return self.in_flight < self.width and self._nodes[self.graph.entry].engine.has_room_for_bytes

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
        if not self.in_flight:
            self._emptied.set()

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


# ---- where nodes run


def placed(graph: Graph) -> Graph:
    """The graph with a device of this machine for each "auto" node, and no more instances than can run at once."""
    nodes = {name: replace(n, device=_device(n)) if n.device == AUTO else n for name, n in graph.nodes.items()}
    return replace(graph, nodes={name: _limited(n) for name, n in nodes.items()})


def _limited(node: Node) -> Node:
    """The node with at most one instance per core if it only computes on the CPU.

    More threads only take turns: on 2 cores, 8 and 4 instances gave 690 images a second, 2 and 2 gave 820.
    """
    most = cores()
    if node.device != "cpu" or node.instances <= most:
        return node
    ops = [catalog.find(step.op) for step in node.steps]
    if not all(computes(op) or op.model_file for op in ops):
        return node
    log.info("node=%s instances=%d of=%d hint=the CPU has no more cores", node.name, most, node.instances)
    return replace(node, instances=most)


def _device(node: Node) -> str:
    params = next((step.params for step in node.steps if "model" in step.params), {})
    if params.get("runtime") in ("cpu", "openvino") or not visible_gpus():
        return "cpu"
    try:
        if not all(file.lower().endswith(".onnx") for file in files_of(params)):
            usable, needed = import_torch().cuda.is_available(), "a PyTorch for CUDA"
        else:
            known = import_onnxruntime().get_available_providers()
            usable, needed = bool({CUDA, TENSORRT} & set(known)), "onnxruntime-gpu"
    except LoadFailed:  # loading the node reports it
        return "cpu"
    if not usable:
        log.warning("node=%s device=cpu hint=install %s to use the GPU", node.name, needed)
    return "cuda:0" if usable else "cpu"
