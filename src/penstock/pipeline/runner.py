"""Runner: a graph whose nodes run at the same time, in threads of this process. All calls are made on one loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from penstock.core.contracts import Observer
from penstock.errors import BadRequest, ModelNotReady, PenstockError, QueueFull, nearest
from penstock.pipeline.credits import Flow
from penstock.pipeline.graph import Graph
from penstock.pipeline.host import Host
from penstock.pipeline.journey import Done, Journey
from penstock.pipeline.node import Shared
from penstock.pipeline.ops.base import NODE_NAME, Fields
from penstock.pipeline.placement import chain, placed
from penstock.pipeline.routes import Route, check_runnable, route

LONGEST_NAME = 128  # of a node; what callers give instead may be of any length


class Runner:
    """Takes items through a graph. `start` first, `close` at the end; every accepted item has exactly one outcome."""

    def __init__(self, graph: Graph, *, observers: Sequence[Observer] = ()) -> None:
        """Raises ConfigError for what a graph may hold and this does not run yet."""
        check_runnable(graph)
        graph = placed(graph)
        self.graph = graph
        self.in_flight = 0  # items
        self._routes: dict[str, Route] = {graph.entry: route(graph, graph.entry)}
        self._flow = Flow(graph)
        shared = {name: Shared(compat=graph.compat) for name in graph.nodes}
        self._hosts = {name: Host(graph, node, self._flow, observers, shared) for name, node in graph.nodes.items()}
        for name, host in self._hosts.items():
            host.then = next((self._hosts[after] for after in chain(graph, name)), None)
        self._flow.connect(self._hosts)
        for name, host in self._hosts.items():
            for next_name in graph.nodes[name].next:
                follower = self._hosts[next_name]
                if not follower.join:
                    host.after.append(follower)
            host.joins = [h for h in self._hosts.values() if h.join and name in h.needs]
        self._width = 0
        self._state = "LOADING"
        self._emptied = asyncio.Event()

    # ---- life

    async def start(self) -> None:
        """Returns when all instances of all nodes are up. Raises LoadFailed, ConfigError that name the node."""
        try:
            await asyncio.gather(*(host.load() for host in self._hosts.values()))
        except BaseException:
            await self.close(0.0)
            raise
        self._width = self.graph.in_flight or sum(h.capacity + h.at_once for h in self._hosts.values())
        if self._state == "LOADING":
            self._state = "READY"

    async def close(self, drain_s: float) -> None:
        """Answers what was accepted, at most for `drain_s`, refuses the rest, and ends every thread."""
        end = time.monotonic() + drain_s
        self._state = "CLOSED"
        if self.in_flight and drain_s > 0:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), drain_s)
            except TimeoutError:
                pass
        left_s = max(0.0, end - time.monotonic())
        await asyncio.gather(*(host.handle.close(left_s) for host in self._hosts.values()))

    # ---- items

    @property
    def width(self) -> int:
        """Items that it takes at once: what fits its nodes and edges, or `in_flight` of the graph."""
        return self._width

    def submit(
        self,
        fields: Fields,
        done: Done,
        *,
        node: str | None = None,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Journey:
        """Takes an item, whose `done` is called once, on the loop. `node`: where it begins, without it the field
        `node_name` says so, or the graph. `fields` are copied.

        Raises BadRequest for a node that is not there, QueueFull, ModelNotReady, DeadlineExceeded.
        """
        if self._state != "READY":
            raise ModelNotReady(f"pipeline '{self.graph.name}' is {self._state.lower()}", retry_after_s=1.0)
        start = node
        if start is None and len(self._hosts) > 1:
            start = fields.get(NODE_NAME)
        if start is None:
            start = self.graph.entry
        way = self._routes.get(start) if isinstance(start, str) else None
        if way is None:
            way = self._route(start)
        if self.in_flight >= self._width:
            raise QueueFull(f"the pipeline is full ({self.in_flight} items are inside): try again later")
        deadline_s = None if budget_s is None else time.monotonic() + budget_s
        journey = Journey(way, done, self._ended, deadline_s, priority, self.graph.trace)
        self.in_flight += 1
        try:
            self._hosts[way.start].enter(journey, dict(fields), swap=False)
        except BaseException as e:
            journey.done = None
            self._ended(journey)
            if isinstance(e, PenstockError):
                raise self._hosts[way.start].told(e) from None
            raise
        return journey

    def _route(self, start: Any) -> Route:
        if not isinstance(start, str) or start not in self.graph.nodes:
            given = repr(start[:LONGEST_NAME]) if isinstance(start, str) else f"a {type(start).__name__}"
            raise BadRequest(
                f"{NODE_NAME} is {given}, which is no node of pipeline '{self.graph.name}'"
                f"{nearest(given, self.graph.nodes)} (it has {', '.join(self.graph.nodes)})"
            )
        way = self._routes[start] = route(self.graph, start)
        return way

    def _ended(self, journey: Journey) -> None:
        self.in_flight -= 1
        if self._flow.blocked:
            self._flow.stir()
        if not self.in_flight:
            self._emptied.set()

    # ---- what it says of itself

    @property
    def ready(self) -> bool:
        """True while every node can answer."""
        return self._state == "READY" and all(h.handle.ready for h in self._hosts.values())

    def statistics(self) -> dict[str, object]:
        """What each node has learned and done, by its name, and the items inside."""
        nodes = {name: h.statistics() for name, h in self._hosts.items()}
        return {"in_flight": self.in_flight, "width": self._width, "nodes": nodes}

    def host(self, name: str) -> Host:
        """A node as it runs."""
        return self._hosts[name]
