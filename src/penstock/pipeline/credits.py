"""Flow: what is between the nodes. How much each may start, and who is to look again when that changes.

Credits are read off the queues at the moment when a batch could start. Nothing is handed out, so nothing can leak: not
by an item that fails, expires, is cancelled or dies with its worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.core.batching.entry import INF
from penstock.pipeline.graph import Graph

if TYPE_CHECKING:
    from penstock.pipeline.host import Host

QUEUE_BYTES = 64 * 2**20
"""Bytes of `data` that may wait before a node that does not say `queue_bytes`."""


class Flow:
    """The edges of one running graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ahead: dict[str, list[Host]] = {}  # nodes that an item may come to from one, without another queue
        self._feeders: dict[str, list[Host]] = {}  # the same, the other way round
        self._before: dict[str, list[Host]] = {}  # all nodes from which an item may come
        self._blocked: set[Host] = set()

    def connect(self, hosts: Mapping[str, Host]) -> None:
        """Takes note of the nodes."""
        order = self._graph.order()
        for name in hosts:
            ahead, before = self._reached(hosts[name]), self._graph.upstream(name)
            self._ahead[name] = [hosts[n] for n in hosts if n in ahead]
            self._before[name] = [hosts[n] for n in order if n in before]
        for name in hosts:
            self._feeders[name] = [hosts[n] for n in hosts if hosts[name] in self._ahead[n]]

    def _reached(self, host: Host) -> set[str]:
        """The nodes in whose queue an item may be next; one that has a result passes by a node of the filter "or"."""
        found: set[str] = set()
        while host.then is not None:
            host = host.then
        stack = list(self._graph.nodes[host.name].next)
        while stack:
            if (after := stack.pop()) not in found:
                found.add(after)
                if self._graph.nodes[after].filter == "or":
                    stack += self._graph.nodes[after].next
        return found

    # ---- asked by policies

    def credit(self, host: Host) -> int:
        """Most items that a node may start now, for all that follow it to have room for what comes out."""
        ahead = self._ahead[host.name]
        if not ahead:
            return 2**31
        rows = min(map(self._room, ahead))
        if rows < 1:
            self._blocked.add(host)
        return rows

    def _room(self, host: Host) -> int:
        """Items that may be sent to a node, beside those that run before it. What a join holds is not its queue: else
        two branches would wait for each other's room."""
        batcher = host.batcher
        if batcher is None:
            return 0
        scheduler = batcher.scheduler
        coming = sum(f.running_rows for f in self._feeders[host.name])
        rows = host.capacity - scheduler.queued_rows - coming
        if host.row_bytes > 0:
            left = (host.node.queue_bytes or QUEUE_BYTES) - scheduler.queued_bytes
            by_bytes = int(left / host.row_bytes) - coming
            if by_bytes < 1 and not coming and not scheduler.queued_rows:
                by_bytes = 1  # larger than all the room there is: alone
            rows = min(rows, by_bytes)
        if rows < 1 and not host.pressed:
            host.pressed = True
            batcher.wake()
        return rows

    def coming(self, host: Host, now: float) -> tuple[float, int]:
        """(when the next items are expected at a node, how many), by what the nodes before it run and have learned.
        (INF, 0): nothing is on its way, or it has no room here."""
        if host.pressed:
            return INF, 0
        out: dict[str, tuple[float, int]] = {}  # of each node before: when it hands on, and how many
        for other in self._before[host.name]:
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
        if host.name not in out:
            return INF, 0
        self._blocked.add(host)
        return out[host.name]

    # ---- told by hosts

    def dispatched(self, host: Host) -> None:
        """A queue has become shorter."""
        host.pressed = False
        if self._blocked:
            self.stir()

    def stir(self) -> None:
        """Something has left a node: those who waited for that look again, in this pass of the loop."""
        blocked: Iterable[Host] = self._blocked
        self._blocked = set()
        for host in blocked:
            if host.batcher is not None:
                host.batcher.wake()

    @property
    def blocked(self) -> bool:
        """Whether anybody waits to be stirred."""
        return bool(self._blocked)
