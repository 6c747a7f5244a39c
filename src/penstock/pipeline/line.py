"""Line: a Runner behind a portal. It loads in the background; items wait in line for it, and for room inside."""

from __future__ import annotations

import asyncio
from collections import deque

from msgspec import Struct

from penstock.core.contracts import Ticket
from penstock.errors import ModelNotReady, PenstockError, QueueFull, describe
from penstock.pipeline.graph import Graph
from penstock.pipeline.journey import Done, Journey
from penstock.pipeline.ops.base import Fields
from penstock.pipeline.outcome import Outcome
from penstock.pipeline.runner import Runner
from penstock.types import Item, ItemResult, Sink

MAX_LINE = 65_536  # items that wait for room inside; more are refused


class Begin(Struct):
    """One item as it is handed in: its fields, and the node where it begins."""

    fields: Fields
    node: str | None = None


class _Waiting:
    """One item in the line, later on its way. A Ticket."""

    __slots__ = ("backend", "begin", "done", "end_s", "journey", "priority")

    def __init__(self, backend: Line, begin: Begin, done: Done, budget_s: float | None, priority: int) -> None:
        self.backend = backend
        self.begin = begin
        self.done: Done | None = done
        self.end_s = None if budget_s is None else backend.loop.time() + budget_s
        self.priority = priority
        self.journey: Journey | None = None

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self.done = None
        if self.journey is not None:
            self.journey.cancel()
            self.journey = None
            self.backend.pump()


class _Many:
    """Items of one call: their outcomes in order, handed over when all are there. A Ticket."""

    def __init__(self, count: int, sink: Sink) -> None:
        self._outcomes: list[Outcome | None] = [None] * count
        self._left = count
        self._sink: Sink | None = sink
        self.tickets: list[_Waiting] = []

    def done(self, place: int) -> Done:
        def note(outcome: Outcome) -> None:
            self._outcomes[place] = outcome
            self._left -= 1
            if not self._left and self._sink is not None:
                self.tickets = []
                self._sink(ItemResult(self._outcomes))

        return note

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self._sink = None
        for ticket in self.tickets:
            ticket.cancel()


class Line:
    """See the module. A PortalBackend."""

    def __init__(self, graph: Graph) -> None:
        self.loop = asyncio.get_running_loop()
        self.runner = Runner(graph)
        self._line: deque[_Waiting] = deque()
        self._error: PenstockError | None = None
        self._up = False
        self._pumping = False
        self._emptied: asyncio.Event | None = None  # made by close(): the line is empty
        self._loading = self.loop.create_task(self._load())

    async def _load(self) -> None:
        try:
            await self.runner.start()
            self._up = True
        except Exception as e:
            self._error = e if isinstance(e, PenstockError) else PenstockError(f"internal error: {describe(e)}")
        self.pump()

    async def loaded(self) -> None:
        """Returns when all nodes are up. Raises what loading raised."""
        await asyncio.shield(self._loading)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def submit(
        self,
        model: str,
        version: str | None,
        item: Item,
        sink: Sink,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Ticket:
        """See `PortalBackend.submit`. The answer's body is an Outcome, or a list of them. Raises QueueFull."""
        if len(self._line) >= MAX_LINE:
            raise QueueFull(f"{len(self._line)} items wait for room in the pipeline: try again later")
        if not item.many:
            waiting = _Waiting(self, item.payload, lambda o: sink(ItemResult(o)), budget_s, priority)
            self._line.append(waiting)
            self.pump()
            return waiting
        many = _Many(len(item.payload), sink)
        tickets = [_Waiting(self, b, many.done(i), budget_s, priority) for i, b in enumerate(item.payload)]
        many.tickets = tickets
        self._line.extend(tickets)
        self.pump()
        return many

    def pump(self) -> None:
        """Lets in those at the head of the line for whom there is room; nobody, while it loads."""
        if self._pumping or not (self._up or self._error):
            return
        self._pumping = True
        runner, line = self.runner, self._line
        while line and (self._error or runner.in_flight < runner.width):
            waiting = line.popleft()
            if waiting.done is not None:
                self._begin(waiting)
        self._pumping = False
        if self._emptied is not None and not line:
            self._emptied.set()

    def _begin(self, waiting: _Waiting) -> None:
        begin, end_s = waiting.begin, waiting.end_s
        budget_s = None if end_s is None else end_s - self.loop.time()
        try:
            if self._error is not None:
                raise self._error
            waiting.journey = self.runner.submit(
                begin.fields, self._done(waiting), node=begin.node, budget_s=budget_s, priority=waiting.priority
            )
        except Exception as e:  # the line goes on, whatever was handed in
            error = e if isinstance(e, PenstockError) else PenstockError(f"internal error: {describe(e)}")
            self.loop.call_soon(self._tell, waiting, Outcome(begin.fields, error))  # who waits is not there yet

    def _done(self, waiting: _Waiting) -> Done:
        def done(outcome: Outcome) -> None:
            waiting.journey = None
            self._tell(waiting, outcome)
            if self._line:
                self.pump()

        return done

    @staticmethod
    def _tell(waiting: _Waiting, outcome: Outcome) -> None:
        done, waiting.done = waiting.done, None
        if done is not None:
            done(outcome)

    def statistics(self, model: str) -> dict[str, object]:
        """See `PortalBackend.statistics`."""
        return self.runner.statistics() | {"waiting": len(self._line)}

    async def close(self, drain_s: float) -> None:
        """See `PortalBackend.close`."""
        end = self.loop.time() + drain_s
        if self._line and not self._error:
            self._emptied = asyncio.Event()
            try:
                await asyncio.wait_for(self._emptied.wait(), drain_s)
            except TimeoutError:
                pass
        await self.runner.close(max(0.0, end - self.loop.time()))
        self._loading.cancel()
        self._error = self._error or ModelNotReady("the pipeline is closed")
        self.pump()

    def forget(self) -> None:
        """See `PortalBackend.forget`. A forked child has none of the nodes' threads, and nothing else was theirs."""
