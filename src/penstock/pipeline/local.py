"""LocalPipeline: the synchronous interface of a pipeline. Any number of threads call it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from penstock import tracing
from penstock.core.arrays import nbytes_of
from penstock.core.contracts import Ticket
from penstock.core.engine.direct import StageDriver
from penstock.core.engine.drivers import LaterCall, LaterCalls
from penstock.core.portal.portal import Portal
from penstock.core.portal.waiters import Future
from penstock.core.transports.slot import within
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, describe
from penstock.pipeline.graph import Graph
from penstock.pipeline.ops.base import DATA, NODE_NAME, Fields
from penstock.pipeline.runner import PipelineRunner
from penstock.pipeline.traversal import Done, ItemOutcome, Traversal
from penstock.types import Item, ItemResult, ModelMetadata, Sink, Trace

ENTRY = "entry"  # the name of the inbox of the entry's threads
MAX_WAITING = 65_536  # items that wait for room inside; further calls are rejected
MAX_WAITING_BYTES = 256 * 2**20  # of their `data`


class LocalPipeline:
    """A running pipeline whose nodes are threads of this process, or processes. A context manager, or call `close()`.

    Without `lazy` it is loaded when the constructor returns. Items that the nodes cannot hold yet wait in a queue; a
    call is rejected if MAX_WAITING items, or MAX_WAITING_BYTES of `data`, already wait. After a fork the child loads
    its own pipeline at its first call.
    """

    def __init__(self, graph: Graph, *, lazy: bool = False) -> None:
        """`graph` has passed `check`. Raises LoadFailed and ConfigError, unless it is `lazy`."""
        self.graph = graph
        self._portal = Portal(make=lambda: PipelineBackend(graph), lazy=lazy, word="pipeline")
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
        self._portal.call(PipelineBackend.loaded)

    def infer(self, fields: Fields, node: str | None = None, budget_s: float | None = None) -> ItemOutcome:
        """The outcome of one item. Blocks only the calling thread."""
        return self.infer_many([(fields, node)], budget_s)[0]

    def infer_many(
        self, many: Sequence[Fields | tuple[Fields, str | None]], budget_s: float | None = None
    ) -> list[ItemOutcome]:
        """The outcome of each item, in order, with its error if it was rejected.

        An item is its fields, or a tuple of its fields and the node where it begins.
        """
        items = _new_items(many)
        found: list[ItemOutcome] = self._portal.predict(_inbox_of(items), items, budget_s=budget_s)
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
        """A future of one item's outcome. `done` also receives the outcome, on a thread of the pipeline."""
        item = NewItem(fields, node)
        future = self._portal.submit(_inbox_of([item]), item, budget_s=budget_s, priority=priority)
        if done is not None:
            future.add_done_callback(lambda f: f.cancelled() or done(outcome_of(f)))
        return future

    def start(
        self,
        fields: Fields,
        done: Done,
        node: str | None = None,
        *,
        budget_s: float | None = None,
        priority: int = 0,
        trace: Trace | None = None,
    ) -> SubmittedItems:
        """Submits one item without a future, which costs less. Calls `done` on a thread of the pipeline."""
        submitted = SubmittedItems(done, self._portal)
        new = NewItem(fields, node)
        item = Item(new, budget_s=budget_s, priority=priority, trace=trace)
        self._portal.submit_item(_inbox_of([new]), item, submitted)
        return submitted

    def start_many(
        self,
        many: Sequence[Fields | tuple[Fields, str | None]],
        done: Callable[[list[ItemOutcome]], None],
        *,
        budget_s: float | None = None,
        trace: Trace | None = None,
    ) -> SubmittedItems:
        """Submits several items and calls `done` once, with all outcomes in order, or one if all were rejected."""
        submitted = SubmittedItems(lambda found: done(found if isinstance(found, list) else [found]), self._portal)
        items = _new_items(many)
        item = Item(items, rows=len(many), many=True, budget_s=budget_s, trace=trace)
        self._portal.submit_item(_inbox_of(items), item, submitted)
        return submitted

    def after(self, call: Callable[[], None]) -> None:
        """Calls `call` after the other outcomes of this pass, if `done` of an item calls this; else at once."""
        self._portal.after(call)

    def statistics(self) -> dict[str, object]:
        """The statistics of each node."""
        return self._portal.statistics("")

    def metadata(self) -> dict[str, ModelMetadata]:
        """The metadata of each node's model, by the node's name."""
        return self._portal.call(PipelineBackend.metadata)

    def batch_sizes(self) -> dict[str, int]:
        """The most items of a batch, by the name of the node."""
        return self._portal.call(PipelineBackend.batch_sizes)

    @property
    def width(self) -> int:
        """Most items inside at once; 0 until it is loaded."""
        return self._portal.call(PipelineBackend.width)

    def close(self, drain_s: float = 30.0) -> None:
        """Answers accepted items for at most `drain_s`, and stops all threads. Idempotent."""
        self._portal.close(drain_s)


class NewItem(Struct):
    """One submitted item: its fields, and the node where it begins."""

    fields: Fields
    node: str | None = None


def _new_items(many: Sequence[Fields | tuple[Fields, str | None]]) -> list[NewItem]:
    return [NewItem(*item) if isinstance(item, tuple) else NewItem(item) for item in many]


def _inbox_of(items: Sequence[NewItem]) -> str:
    """The inbox of the entry's threads, or of the loop: only the loop starts what begins elsewhere at once."""
    at_entry = all(item.node is None and NODE_NAME not in item.fields for item in items)
    return ENTRY if at_entry else ""


class SubmittedItems:
    """The ticket of submitted items, and the sink of their outcome on the loop."""

    __slots__ = ("_done", "_portal", "_ticket")

    def __init__(self, done: Callable[[Any], None], portal: Portal) -> None:
        self._done: Callable[[Any], None] | None = done
        self._portal = portal
        self._ticket: Ticket | None = None

    def cancel(self) -> None:
        """Drops the items, from any thread. `done` is not called any more."""
        self._done = None  # now: threads of the pipeline answer without the loop
        self._portal.post(self._leave)

    def _leave(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()

    def accepted(self, ticket: Ticket) -> None:
        if self._done is None:
            ticket.cancel()
        else:
            self._ticket = ticket

    def __call__(self, result: ItemResult) -> None:
        done, self._done, self._ticket = self._done, None, None
        if done is not None:
            done(result.body if result.error is None else ItemOutcome({}, result.error))


def outcome_of(future: concurrent.futures.Future[Any]) -> ItemOutcome:
    """The outcome in a future of `submit`, also if the item was rejected."""
    error = future.exception()
    if isinstance(error, PenstockError):
        return ItemOutcome({}, error)
    found: ItemOutcome = future.result()
    return found


class _WaitingItem(Struct, eq=False):
    """One item in the queue, later inside. A Ticket. `item` is None once it has left the queue."""

    backend: PipelineBackend
    item: NewItem | None
    done: Done | None
    end_s: float | None
    priority: int
    trace: Trace | None = None
    nbytes: int = 0
    timer: LaterCall | None = None
    traversal: Traversal | None = None

    def __post_init__(self) -> None:
        assert self.item is not None
        self.nbytes = _nbytes(self.item.fields)
        self.backend.waiting_bytes += self.nbytes

    def watch(self) -> None:
        """Sees to the deadline of an item that still waits."""
        if self.item is not None and self.end_s is not None:
            self.timer = self.backend.calls.at(self.end_s, self.expire)

    def leave(self) -> NewItem | None:
        """Leaves the queue. Returns the item, or None if it had left before."""
        item, self.item = self.item, None
        if item is not None:
            self.backend.waiting_bytes -= self.nbytes
            if self.timer is not None:
                self.timer.cancel()
        return item

    def expire(self) -> None:
        """Answers the item at its deadline if it still waits. Inside, the nodes do so."""
        if (item := self.leave()) is not None:
            self.ended(ItemOutcome(item.fields, DeadlineExceeded("the deadline passed before there was room inside")))

    def cancel(self) -> None:
        self.done = None
        self.leave()
        if self.traversal is not None:
            self.traversal.cancel()
            self.traversal = None
            self.backend.pump()

    def ended(self, outcome: ItemOutcome) -> None:
        """Reports the outcome, once, and lets the next item in."""
        self.traversal = None
        done, self.done = self.done, None
        if done is not None:
            done(outcome)
        self.backend.pump()


class _ManyItems:
    """The items of one call. Reports their outcomes in order when all have ended. A Ticket."""

    def __init__(self, count: int, sink: Sink) -> None:
        self._outcomes: list[ItemOutcome | None] = [None] * count
        self._left = count
        self._sink: Sink | None = sink
        self.tickets: list[_WaitingItem] = []

    def done(self, place: int) -> Done:

        def note(outcome: ItemOutcome) -> None:
            self._outcomes[place] = outcome
            self._left -= 1
            if not self._left and self._sink is not None:
                self.tickets = []
                self._sink(ItemResult(self._outcomes))

        return note

    def cancel(self) -> None:
        self._sink = None
        for ticket in self.tickets:
            ticket.cancel()


class PipelineBackend:
    """A PipelineRunner as a PortalBackend. It loads in the background, and queues items until there is room inside."""

    def __init__(self, graph: Graph) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls = LaterCalls(self.loop)
        self.runner = PipelineRunner(graph, on_room=lambda: self.calls.soon(self.pump))
        self.waiting_bytes = 0  # of the items in the queue
        self._queue: deque[_WaitingItem] = deque()
        self._error: PenstockError | None = None
        self._up = False
        self._pumping = False
        self._emptied: asyncio.Event | None = None  # close() waits for an empty queue
        self._loading = self.loop.create_task(self._load())

    async def _load(self) -> None:
        try:
            await self.runner.start()
            self._up = True
            self._route(self.runner.entry_driver)
        except Exception as e:
            self._error = _as_penstock_error(e)
        with self.calls.guard:
            self.pump()

    def _route(self, entry: StageDriver | None) -> None:
        """Lets items reach the entry's threads without the loop; None: no more."""
        inbox = self.calls.inbox
        assert inbox is not None, "a portal has an inbox"
        with inbox.guard:
            old = inbox.routes.pop(ENTRY, None)
            if entry is not None:
                entry.callers = True
                inbox.routes[ENTRY] = entry
            elif old is not None:
                old.woken()  # nobody else tells it any more that the answered threads have run

    async def loaded(self) -> None:
        """Returns when all nodes are up. Raises the error of loading."""
        await asyncio.shield(self._loading)
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def metadata(self) -> dict[str, ModelMetadata]:
        """The metadata of each node's model."""
        found = {name: self.runner.node(name).engine.handle.metadata for name in self.runner.graph.nodes}
        return {name: metadata for name, metadata in found.items() if metadata is not None}

    async def batch_sizes(self) -> dict[str, int]:
        """The most items of a batch, by the name of the node."""
        return {name: self.runner.node(name).engine.max_batch for name in self.runner.graph.nodes}

    async def width(self) -> int:
        """Most items inside at once."""
        return self.runner.width

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        """See `PortalBackend.submit`. The result's body is an ItemOutcome, or a list of them. Raises QueueFull."""
        if len(self._queue) >= MAX_WAITING or self.waiting_bytes >= MAX_WAITING_BYTES:
            found = f"{len(self._queue)} items ({self.waiting_bytes} bytes)"
            raise QueueFull(f"{found} wait for room in the pipeline: try again later")
        end_s = None if item.budget_s is None else self.loop.time() + item.budget_s
        sink = tracing.traced(f"pipeline {self.runner.graph.name}", 0, item, sink)
        rest = end_s, item.priority, item.trace
        many = _ManyItems(len(item.payload), sink) if item.many else None
        if many is None:
            tickets = [_WaitingItem(self, item.payload, lambda o: sink(ItemResult(o)), *rest)]
        else:
            new = enumerate(item.payload)
            tickets = many.tickets = [_WaitingItem(self, one, many.done(i), *rest) for i, one in new]
        self._queue.extend(tickets)
        self.pump()
        for ticket in tickets if end_s is not None else ():
            ticket.watch()
        return many or tickets[0]

    def pump(self) -> None:
        """Moves items from the queue into the graph while there is room. Does nothing during loading."""
        if self._pumping or not (self._up or self._error):
            return
        self._pumping = True
        runner, queue = self.runner, self._queue
        while queue and (self._error or runner.has_room):
            waiting = queue.popleft()
            if (item := waiting.leave()) is not None:
                self._begin(waiting, item)
        self._pumping = False
        if self._emptied is not None and not queue:
            self.loop.call_soon_threadsafe(self._emptied.set)

    def _begin(self, waiting: _WaitingItem, item: NewItem) -> None:
        budget_s = None if waiting.end_s is None else waiting.end_s - self.loop.time()
        try:
            if self._error is not None:
                raise self._error
            waiting.traversal = self.runner.submit(
                item.fields,
                waiting.ended,
                node=item.node,
                budget_s=budget_s,
                priority=waiting.priority,
                trace=waiting.trace,
            )
        except Exception as e:  # the other items go on
            # later, because `submit` has not returned the ticket yet
            self.calls.soon(partial(waiting.ended, ItemOutcome(item.fields, _as_penstock_error(e))))

    def statistics(self, model: str) -> dict[str, object]:
        return self.runner.statistics() | {"waiting": len(self._queue)}

    async def close(self, drain_s: float) -> None:
        end = self.loop.time() + drain_s
        self._route(None)
        with self.calls.guard:
            self._emptied = asyncio.Event() if self._queue and not self._error else None
        if self._emptied is not None:
            await within(self._emptied, drain_s)
        await self.runner.close(max(0.0, end - self.loop.time()))
        self._loading.cancel()
        with self.calls.guard:
            self._error = self._error or ModelNotReady("the pipeline is closed")
            self.pump()

    def forget(self) -> None:
        """See `PortalBackend.forget`."""
        self.runner.forget()


def _nbytes(fields: Fields) -> int:
    """The bytes of an item's `data`; 0 for an invalid item, which fails when it enters."""
    try:
        return nbytes_of(fields[DATA] if DATA in fields else list(fields.values()))
    except Exception:
        return 0


def _as_penstock_error(error: Exception) -> PenstockError:
    return error if isinstance(error, PenstockError) else PenstockError(f"internal error: {describe(error)}")
