"""LocalPipeline: the sync face of a pipeline. Nodes run in threads of this process; any number of threads call it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

from penstock.core.contracts import Ticket
from penstock.core.engine.portal import Portal
from penstock.core.engine.waiters import Future
from penstock.errors import PenstockError
from penstock.pipeline.graph import Graph
from penstock.pipeline.journey import Done
from penstock.pipeline.line import Begin, Line
from penstock.pipeline.ops.base import Fields
from penstock.pipeline.outcome import Outcome
from penstock.pipeline.routes import check_runnable
from penstock.types import Item, ItemResult, ModelMetadata


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
