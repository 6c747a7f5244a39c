"""Ops for tests, graphs of them, and a stage that runs a graph and records every outcome."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.pipeline.graph import Graph, Node, NodeInput, NodeStep
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp
from penstock.pipeline.runner import PipelineRunner
from penstock.pipeline.traversal import ItemOutcome


class Gates:
    """Named doors: an op waits at its door until the test opens it. `met` has the arrived batches, in order."""

    def __init__(self) -> None:
        self._doors: dict[str, threading.Event] = {}
        self.met: dict[str, list[list[Any]]] = {}
        self.came = threading.Condition()
        self._opened = False

    def door(self, name: str) -> threading.Event:
        with self.came:
            door = self._doors.setdefault(name, threading.Event())
            if self._opened:
                door.set()
            return door

    def meet(self, name: str, batch: list[Any]) -> None:
        with self.came:
            self.met.setdefault(name, []).append(batch)
            self.came.notify_all()

    async def until(self, name: str, batches: int) -> list[list[Any]]:
        """The batches at a door, when there are enough."""

        def wait() -> bool:
            with self.came:
                return self.came.wait_for(lambda: len(self.met.get(name, ())) >= batches, 20.0)

        assert await asyncio.to_thread(wait), f"only {self.met.get(name)} came to '{name}'"
        return self.met[name]

    def open_all(self) -> None:
        """Opens all doors, including those that no batch has reached yet."""
        with self.came:
            self._opened = True
            for door in self._doors.values():
                door.set()


class Words(ItemOp):
    """Adds a word to the data, which records the item's path."""

    def __init__(self, word: str = "") -> None:
        self.word = word

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        return f"{data}{self.word}"


class Picky(ItemOp):
    """Raises for data with an "x", and has no result for data with a "-"."""

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        if "x" in data:
            raise ValueError("this has an x")
        return None if "-" in data else data


class BatchWords(BatchOp):
    """Adds a word to each item of a batch. Raises for the whole batch if an item has an "x"."""

    def __init__(self, word: str = "", gate: str = "", rows: int = 0) -> None:
        self.word, self.gate = word, gate
        self.max_rows = rows or None

    def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> Sequence[Any]:
        if self.gate:
            gates.meet(self.gate, list(data))
            gates.door(self.gate).wait(30.0)
        if any("x" in d for d in data):
            raise ValueError("one has an x")
        return [f"{d}{self.word}" for d in data]


class Door(ItemOp):
    """Waits until the test opens it."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        gates.meet(self.gate, [data])
        gates.door(self.gate).wait(30.0)
        return data


class TooFew(BatchOp):
    """Loses the last row."""

    def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> Sequence[Any]:
        return data[:-1]


class Own(ItemOp):
    """Sets another field besides the result."""

    def __init__(self, key: str, value: str) -> None:
        self.key, self.value = key, value

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        fields[self.key] = self.value
        return data


OPS = (Words, Picky, BatchWords, Door, TooFew, Own)
gates = Gates()


@pytest.fixture(autouse=True)
def no_ops_of_others() -> Iterator[None]:
    """Removes the ops that a test registers."""
    before = {*catalog.names()}
    yield
    for name in {*catalog.names()} - before:
        catalog.unregister(name)


@pytest.fixture
def known(no_ops_of_others: None) -> None:
    """The ops of this file are in the catalog."""
    for op in OPS:
        catalog.register(op.__name__, op)


@pytest.fixture
def doors(known: None) -> Iterator[Gates]:
    gates.__init__()  # type: ignore[misc]
    yield gates
    gates.open_all()


Steps = str | tuple[str | NodeStep, ...]


def _step(given: str | NodeStep) -> NodeStep:
    return given if isinstance(given, NodeStep) else NodeStep(given)


def graph_of(nodes: dict[str, Any], **keys: Any) -> Graph:
    """`nodes`: name -> (steps, next, keys of Node), or only the first of these; all steps but a node's first swap."""
    made = {}
    for name, given in nodes.items():
        steps, *keys_of_node = given if isinstance(given, tuple) else (given,)
        after = next((each for each in keys_of_node if isinstance(each, str)), "")
        more = next((each for each in keys_of_node if isinstance(each, dict)), {})
        first, *rest = [_step(s) for s in ((steps,) if isinstance(steps, (str, NodeStep)) else steps)]
        chain = (first, *(NodeStep(s.op, s.params, "swap" if s.filter == "run" else s.filter) for s in rest))
        inputs = tuple(NodeInput(*i) for i in more.get("inputs", ()))
        made[name] = Node(name, chain, tuple(after.split()), **{**more, "inputs": inputs})
    return Graph("test", made, keys.pop("entry", next(iter(made))), **keys)


@pytest.fixture
def make_graph() -> Callable[..., Graph]:
    return graph_of


class Stage:
    """A runner with helpers for the outcomes of its items."""

    def __init__(self, runner: PipelineRunner) -> None:
        self.runner = runner

    def send(self, fields: dict[str, Any], **keys: Any) -> asyncio.Future[ItemOutcome]:
        """A future of one item's outcome; a second outcome would raise."""
        future: asyncio.Future[ItemOutcome] = asyncio.get_running_loop().create_future()
        self.last = self.runner.submit(fields, future.set_result, **keys)
        return future

    def put(self, data: Any, **keys: Any) -> asyncio.Future[ItemOutcome]:
        """A future of the outcome of an item that has only data."""
        return self.send({"data": data}, **keys)

    async def results(self, *data: Any, **keys: Any) -> list[Any]:
        """The results of items submitted together, or the error codes of failed ones."""
        outcomes = await asyncio.wait_for(asyncio.gather(*[self.put(d, **keys) for d in data]), 20.0)
        return [o.error.code if o.error else o.fields.get("result") for o in outcomes]


@pytest.fixture
async def stage(known: None) -> AsyncIterator[Callable[[Graph], Awaitable[Stage]]]:
    made: list[PipelineRunner] = []

    async def begin(graph: Graph | dict[str, Any], **keys: Any) -> Stage:
        runner = PipelineRunner(graph_of(graph) if isinstance(graph, dict) else graph, **keys)
        made.append(runner)
        await runner.start()
        return Stage(runner)

    yield begin
    gates.open_all()
    for runner in made:
        await runner.close(5.0)
        assert runner.in_flight == 0
