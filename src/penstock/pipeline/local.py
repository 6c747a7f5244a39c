"""LocalPipeline: the sync face of a pipeline. Nodes run in threads of this process; any number of threads call it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from penstock.core.contracts import Ticket
from penstock.core.engine.portal import Portal
from penstock.core.engine.waiters import Future
from penstock.errors import ModelNotReady, PenstockError, QueueFull, describe
from penstock.pipeline.graph import Graph
from penstock.pipeline.journey import Done, Journey
from penstock.pipeline.ops.base import Fields
from penstock.pipeline.outcome import Outcome
from penstock.pipeline.routes import check_runnable
from penstock.pipeline.runner import Runner
from penstock.types import Item, ItemResult, ModelMetadata, Sink


class LocalPipeline:
    """A running pipeline. Use as a context manager, or call `close()`.

    Without `lazy` it is loaded when this returns. Items beyond what the nodes hold wait in line, all that a call brings
    while fewer than `line.MAX_LINE` wait. After a fork the child loads a pipeline of its own at its first call.
    """

    def __init__(self, graph: Graph, *, lazy: bool = False) -> None:
        """Raises ConfigError; without `lazy` also LoadFailed."""
        check_runnable(graph)
        self.graph = graph
        self._portal = Portal(make=lambda: Line(graph), lazy=lazy, word="pipeline")
        if not lazy:
            try:
                self.wait_until_loaded()
            except BaseException:
                self._portal.close(0.0)
                raise

    def __enter__(self) -> LocalPipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_until_loaded(self) -> None:
        """Returns when all nodes are up. Raises LoadFailed, ConfigError that name the node."""
        self._portal.call(_loaded)

    def infer(self, fields: Fields, node: str | None = None, budget_s: float | None = None) -> Outcome:
        """What becomes of one item; blocks this thread only."""
        return self.infer_many([(fields, node)], budget_s)[0]

    def infer_many(
        self, many: Sequence[Fields | tuple[Fields, str | None]], budget_s: float | None = None
    ) -> list[Outcome]:
        """What becomes of each item, in order; one that is refused has its error there. An item may be a tuple of its
        fields and the node where it begins."""
        begins = [Begin(*item) if isinstance(item, tuple) else Begin(item) for item in many]
        found: list[Outcome] = self._portal.predict("", begins, budget_s=budget_s)
        return found

    def submit(
        self,
        fields: Fields,
        done: Done | None = None,
        node: str | None = None,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Future:
        """A future of one item's Outcome. `done` is called with it, too, on the pipeline's own thread."""
        future = self._portal.submit("", Begin(fields, node), budget_s=budget_s, priority=priority)
        if done is not None:
            future.add_done_callback(lambda f: f.cancelled() or done(the_outcome(f)))
        return future

    def start(
        self,
        fields: Fields,
        done: Done,
        node: str | None = None,
        *,
        budget_s: float | None = None,
        priority: int = 0,
    ) -> Started:
        """Hands in one item, at less cost than `submit`; `done` is called on the pipeline's own thread."""
        started = Started(done, self._portal)
        self._portal.hand("", Item(Begin(fields, node)), started, budget_s=budget_s, priority=priority)
        return started

    def statistics(self) -> dict[str, object]:
        """What each node has learned and done."""
        return self._portal.statistics("")

    def metadata(self) -> dict[str, ModelMetadata]:
        """What each node says of its model, by its name."""
        return self._portal.call(_metadata)

    @property
    def width(self) -> int:
        """Items that are inside at once; 0 until it is loaded."""
        return self._portal.call(_width)

    def close(self, drain_s: float = 30.0) -> None:
        """Answers what was accepted, at most for `drain_s`, and ends all threads. Idempotent."""
        self._portal.close(drain_s)


class Started:
    """The ticket of an item that was handed in; the sink of its answer on the loop."""

    __slots__ = ("_done", "_portal", "_ticket")

    def __init__(self, done: Done, portal: Portal) -> None:
        self._done: Done | None = done
        self._portal = portal
        self._ticket: Ticket | None = None

    def cancel(self) -> None:
        """From any thread: nobody waits for the item any more, and `done` is not called if it was not yet."""
        self._portal.post(self._leave)

    def _leave(self) -> None:
        self._done = None
        if self._ticket is not None:
            self._ticket.cancel()

    def accepted(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def __call__(self, result: ItemResult) -> None:
        done, self._done, self._ticket = self._done, None, None
        if done is not None:
            done(result.body if result.error is None else Outcome({}, result.error))


def the_outcome(future: concurrent.futures.Future[Any]) -> Outcome:
    """What a future of `submit` has; a refusal as the outcome that it is."""
    error = future.exception()
    if isinstance(error, PenstockError):
        return Outcome({}, error)
    found: Outcome = future.result()
    return found


async def _loaded(backend: Line) -> None:
    await backend.loaded()


async def _metadata(backend: Line) -> dict[str, ModelMetadata]:
    found = {name: backend.runner.host(name).handle.metadata for name in backend.runner.graph.nodes}
    return {name: metadata for name, metadata in found.items() if metadata is not None}


async def _width(backend: Line) -> int:
    return backend.runner.width


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
