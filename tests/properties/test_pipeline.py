"""For any graph, batches, failures and cancellations, each item has one outcome, and queues keep their limits."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pipelines import portal_inbox

from penstock.pipeline.graph import Graph, Node, NodeInput, NodeStep
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp
from penstock.pipeline.runner import PipelineRunner
from penstock.pipeline.traversal import ItemOutcome, RunningNode


class Marks(ItemOp):
    """Fails or ends an item at this node, or adds the node's name to its path. Data: id,fails,ends:path"""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        _, fails, ends = data.partition(":")[0].split(",")
        if fails == self.name:
            raise ValueError(self.name)
        return None if ends == self.name else f"{data}{self.name}"


class BatchMarks(BatchOp):
    """The same for a batch, which fails as a whole with any item."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> Sequence[Any]:
        one = Marks(self.name)
        return [one(d, f) for d, f in zip(data, fields, strict=True)]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    catalog.register("Marks", Marks)
    catalog.register("BatchMarks", BatchMarks)
    monkeypatch.setattr("penstock.pipeline.node.log.disabled", True)
    yield
    catalog.unregister("Marks")
    catalog.unregister("BatchMarks")


NAMES = "abcdef"


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """One entry, any number of outputs, joins that take the result of each producer."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    after: dict[str, set[str]] = {name: set() for name in names}
    for i, name in enumerate(names[1:], 1):
        for producer in draw(st.sets(st.sampled_from(names[:i]), min_size=1, max_size=2)):
            after[producer].add(name)
    nodes = {}
    for name in names:
        before = [p for p in names if name in after[p]]
        inputs = (
            tuple(NodeInput(p, "result", p if k else "data") for k, p in enumerate(before)) if len(before) > 1 else ()
        )
        nodes[name] = Node(
            name,
            (NodeStep(draw(st.sampled_from(("Marks", "BatchMarks"))), {"name": name}),),
            next=tuple(sorted(after[name])),
            inputs=inputs,
            instances=draw(st.integers(1, 2)),
            max_batch=draw(st.integers(1, 4)),
            queue=draw(st.one_of(st.none(), st.integers(1, 3))),
            wait_s=draw(st.sampled_from((0.0, 0.001, 5.0))),
        )
    return Graph("any", nodes, names[0], in_flight=draw(st.one_of(st.none(), st.integers(1, 40))))


@st.composite
def items(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Items that pass, fail at a node, or end there. Some are cancelled after a number of turns of the loop."""
    node = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(NAMES))
    count = draw(st.integers(1, 40))
    return [
        {
            "data": f"{i},{draw(node)},{draw(node)}:",
            "leaves": draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12))),
        }
        for i in range(count)
    ]


def expected(graph: Graph, item: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """(how an item may end: "ok", "failed" or "ended", the result of each output when it is ok)."""
    found: dict[str, Any] = {}
    for name in graph.order():
        before = graph.producers(name)
        node = graph.nodes[name]
        data = item["data"] if not before else found[node.inputs[0].producer if node.inputs else before[0]]
        found[name] = f"{data}{name}"
    ways = set()
    _, fails, ends = item["data"][:-1].split(",")
    if fails in graph.nodes:
        ways.add("failed")
    if ends in graph.nodes and ends != fails:
        ways.add("ended")  # one of a failure and an end on two branches may be first, or hide the other
    return ways or {"ok"}, {name: found[name] for name in graph.outputs}


def way(outcome: ItemOutcome) -> str:
    return "failed" if outcome.error else "ok" if outcome.fields.get("result") is not None else "ended"


async def run(graph: Graph, given: list[dict[str, Any]], direct: bool) -> tuple[dict[int, list[ItemOutcome]], set[int]]:
    """(the outcomes of each item, the items that were cancelled before they had one).

    `direct`: the nodes' own threads pass the items on, as they do for the callers of a portal."""
    inbox = portal_inbox() if direct else None
    guard = inbox.guard if inbox else nullcontext()
    runner = PipelineRunner(graph)
    await runner.start()
    outcomes: dict[int, list[ItemOutcome]] = {i: [] for i in range(len(given))}
    journeys: dict[int, Any] = {}
    cancelled: set[int] = set()
    waiting, turn = list(range(len(given))), 0
    while waiting or len(cancelled) + sum(map(bool, outcomes.values())) < len(given):
        with guard:
            while waiting and runner.in_flight < runner.width:
                i = waiting.pop(0)
                journeys[i] = runner.submit(given[i], outcomes[i].append)
            for i, journey in list(journeys.items()):
                if given[i]["leaves"] == turn and not outcomes[i]:
                    journey.cancel()
                    cancelled.add(i)
        turn += 1
        await asyncio.sleep(0 if turn < 20 else 0.001)
    assert runner.in_flight == 0
    await runner.close(5.0)
    return outcomes, cancelled


@settings(max_examples=80)
@given(graphs(), items(), st.booleans())
def test_each_item_has_one_outcome_and_its_own(graph: Graph, given: list[dict[str, Any]], direct: bool) -> None:
    most: dict[str, int] = {}
    enter = RunningNode.enter

    def watched(self: RunningNode, *arguments: Any, **keys: Any) -> None:
        enter(self, *arguments, **keys)
        assert self.engine.batcher is not None
        if self.name != graph.entry:
            queued = self.engine.batcher.scheduler.queued_rows
            most[self.name] = max(most.get(self.name, 0), queued - self.engine.capacity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningNode, "enter", watched)
        outcomes, cancelled = asyncio.run(asyncio.wait_for(run(graph, given, direct), 60.0))
    for i, item in enumerate(given):
        assert len(outcomes[i]) == (0 if i in cancelled else 1)
        for outcome in outcomes[i]:
            ways, results = expected(graph, item)
            assert way(outcome) in ways or (way(outcome) == "ok" and "ended" in ways)  # it ended at one of two outputs
            if ways == {"ok"}:
                assert outcome.fields["result"] == results[graph.outputs[-1]]
    assert all(over <= 0 for over in most.values()), most
