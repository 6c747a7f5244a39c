"""Any graph of fan-outs, conditions, joins, aliases and failures gives each item what a pure evaluator gives it.

The nodes are threads, and in a part of the graphs some of them are processes.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace
from tests.support.pipelines import portal_inbox

from penstock.errors import DeadlineExceeded
from penstock.pipeline.graph import Each, Graph, Node, NodeInput, NodeStep, outside
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp
from penstock.pipeline.runner import PipelineRunner
from penstock.pipeline.traversal import ItemOutcome, Traversal
from support.forked import forking

GRAPHS = 8000 if os.environ.get("CHAOS") == "full" else 2000
IN_PROCESSES = 20  # one graph of so many
NAMES = "abcdefg"
ITEMS = 6
PARTS = 4  # for several processes
DEPTH = 2  # of fan-outs
MOST_ENDS = 2000

Fields = dict[str, Any]

CONDITIONS: dict[str | None, Callable[[Fields], bool]] = {
    None: lambda fields: True,
    "k < 3": lambda fields: fields["k"] < 3,
    "not k < 3": lambda fields: fields["k"] >= 3,
    "k in [1, 4]": lambda fields: fields["k"] in (1, 4),
    "present(by_a) and 'b' in data": lambda fields: "by_a" in fields and "b" in fields["data"],
    "len(data) > 3 or k == 0": lambda fields: len(fields["data"]) > 3 or fields["k"] == 0,
}


class Visited(ItemOp):
    """Adds its name to the data, or fails for the item or the element that names it. It gives elements to split."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, data: Any, fields: Fields) -> str:
        if fails(self.name, fields):
            raise ValueError(self.name)
        fields.update(visited(self.name, fields))
        return text(data) + self.name


def fails(name: str, fields: Fields) -> bool:
    return fields.get("fails") == name and fields.get("at", "") in ("", fields.get("parts"))


def visited(name: str, fields: Fields) -> Fields:
    place = fields.get("parts", "")
    parts = [f"{place if isinstance(place, str) else ''}{i}" for i in range(fields["n"])]
    return {f"by_{name}": len(fields["data"]), f"parts_{name}": parts}


def text(data: Any) -> str:
    """A text for a gathered value, too."""
    return data if isinstance(data, str) else "-" if data is None else f"({','.join(map(text, data))})"


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    catalog.register("Visited", Visited)
    monkeypatch.setattr("penstock.pipeline.node.log.disabled", True)
    yield
    catalog.unregister("Visited")


# ---- the evaluator


End = tuple[str, Any]  # ("failed", node) or ("ok", fields)
Left = dict[str, tuple[bool, Fields]]  # alive, and the fields after the node
Choose = Callable[[list[End]], End]


def evaluated(graph: Graph, item: Fields) -> Iterator[list[End]]:
    """How the item may end, for each way its children may. Of ends on parallel branches any may be the first."""
    names = [name for name in graph.order() if name not in frozenset[str]().union(*graph.bodies.values())]
    choices: list[tuple[int, int]] = []  # (taken, most) of each choice, in order
    while True:
        made: list[tuple[int, int]] = []
        yield ends_of(graph, names, item, {}, partial(_choose, choices, made))
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        choices = [*made[:-1], (made[-1][0] + 1, made[-1][1])]


def _choose(choices: list[tuple[int, int]], made: list[tuple[int, int]], ends: list[End]) -> End:
    taken = choices[len(made)][0] if len(made) < len(choices) else 0
    made.append((taken, len(ends)))
    return ends[taken]


def ends_of(graph: Graph, names: list[str], item: Fields, left: Left, choose: Choose) -> list[End]:
    """How an item may end that begins at the first of some nodes and has `left` others."""
    ends: list[End] = []
    for name in names:
        node = graph.nodes[name]
        if (found := arriving(graph, node, left, item)) is None:
            continue  # an item that has ended before does not get here
        alive, fields, swap = found
        if not alive:
            left[name] = False, fields
            continue
        seen = {**fields, "data": fields["result"]} if swap else fields
        passed = fields if "result" in fields else {**fields, "result": fields["data"]}
        op = node.steps[0].params["name"]
        if not CONDITIONS[node.when](seen):
            match node.otherwise:
                case "skip":
                    left[name] = True, passed
                case "skip_branch":
                    left[name] = False, passed
                case "stop":
                    ends.append(("ok", passed))
                case "fail" if node.on_error == "skip":
                    left[name] = True, passed
                case "fail":
                    ends.append(("failed", name))
        elif fails(op, seen):
            if node.on_error == "skip":
                left[name] = True, passed
            else:
                ends.append(("failed", name))
        else:
            after = {**seen, **visited(op, seen), "result": text(seen["data"]) + op}
            gathered = after if node.each is None else children(graph, node, node.each, after, left, choose)
            if gathered is not None or node.on_error == "skip":
                left[name] = True, after if gathered is None else gathered
            else:
                ends.append(("failed", name))
    if ends:
        return ends
    outputs = [left[name] for name, node in graph.nodes.items() if name in names and not node.next]
    chosen = [fields for alive, fields in outputs if alive] or [fields for _, fields in outputs]
    return [("ok", {name: value for fields in chosen for name, value in fields.items()})]


def children(graph: Graph, node: Node, each: Each, fields: Fields, left: Left, choose: Choose) -> Fields | None:
    """The fields of an item after a fan-out. None: a child failed it."""
    names = [name for name in graph.order() if name in graph.bodies[each.body]]
    start = {**fields, "data": fields["result"]}
    del start["result"]
    ends = []
    for element in fields[each.split] if each.split else [None]:
        child = {**start, each.split: element} if each.split else start
        ends.append(choose(ends_of(graph, names, child, {**left, node.name: (True, child)}, choose)))
    if each.split is None:
        return ends[0][1] if ends[0][0] == "ok" else None
    given = [fields if end == "ok" and fields.keys() >= {*each.gather} else None for end, fields in ends]
    values = [one and [one[name] for name in each.gather] for one in given]
    if None in values and each.on_item_error == "fail_parent":
        return None
    kept = [value for value in values if value is not None or each.on_item_error == "null"]
    return fields | {name: [v and v[i] for v in kept] for i, name in enumerate(each.gather)}


def arriving(graph: Graph, node: Node, left: Left, item: Fields) -> tuple[bool, Fields, bool] | None:
    """(alive, the fields, whether the result becomes the data) of an item before a node."""
    before = graph.producers(node.name)
    if not all(name in left for name in before):
        return None
    if not before and not node.inputs:
        return True, item, False
    if not node.inputs:
        return *left[before[0]], True
    taken: Fields = {}
    lacking = False
    for name in dict.fromkeys(i.name for i in node.inputs):
        choices = [i for i in node.inputs if i.name == name]
        alive = [left[i.producer][1] for i in choices if left[i.producer][0]]
        sources = [i.source for i in choices if left[i.producer][0]]
        values = [fields[source] for fields, source in zip(alive, sources, strict=True) if source in fields]
        default = choices[-1].default
        lacking = lacking or (not alive and default is UNSET)
        taken[name] = values[0] if values else None if default is UNSET else default
    unnamed = set(before) - {i.producer for i in node.inputs}
    lacking = lacking or any(not left[name][0] for name in unnamed)
    if before and all(not left[name][0] for name in before) if node.require == "any" else lacking:
        return False, left[node.inputs[0].producer][1], False
    return True, taken, False


# ---- graphs and items


OF_ITEM = {"k": 2, "n": 1, "fails": "", "at": "", "parts": ""}


@cache
def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of the values. Hypothesis takes long to prepare a strategy, so each is made once."""
    return st.sampled_from(values)


@st.composite
def nodes_of(draw: st.DrawFn, name: str, before: list[str], around: list[str]) -> Node:
    """A node after others, of which it takes the results if there are several, and those of nodes around its body."""
    inputs: list[NodeInput] = []
    if len(before) > 1:
        named = draw(st.booleans())
        rest = ["data" if draw(st.booleans()) else f"from_{p}" for p in before[1:]]
        names = ["data", *rest] if named else ["data"]
        chosen = {field: "-" if draw(st.integers(0, 2)) == 0 else draw(_one_of(UNSET, "-")) for field in names}
        # without a default, data is None if only other sources are alive, and the conditions compare texts
        if names.count("data") < len(before):
            chosen["data"] = "-"
        inputs = [NodeInput(p, "result", f, chosen[f]) for p, f in zip(before, names, strict=False)]
        inputs += [NodeInput(before[0], key, key, default) for key, default in OF_ITEM.items()]
    if around and not inputs and draw(st.booleans()):
        source = before[0] if before else around[-1]
        inputs = [NodeInput(source, "result" if before else "data", "data", "-")]
        inputs += [NodeInput(source, key, key, default) for key, default in OF_ITEM.items()]
    if around and inputs and draw(st.booleans()):
        producer = draw(_one_of(*around))
        source = f"parts_{producer}" if producer == around[-1] else "result"
        inputs.append(NodeInput(producer, source, "around", draw(_one_of("-", 3))))
    otherwise: Any = draw(_one_of("skip", "skip_branch", "skip_branch", "stop", "fail"))
    when = draw(_one_of(None, None, *CONDITIONS))
    return Node(
        name,
        (NodeStep("Visited", {"name": name}),),
        inputs=tuple(sorted(inputs, key=lambda i: i.name != "data")),
        instances=draw(st.integers(1, 2)),
        max_batch=draw(st.integers(1, 4)),
        queue=draw(_one_of(None, None, None, 1, 2, 3)),
        when=when,
        otherwise=otherwise,
        on_error=draw(_one_of("fail", "fail", "skip")),
        require=draw(_one_of("all", "any")),
    )


@st.composite
def levels(draw: st.DrawFn, names: str, prefix: str, around: list[str]) -> dict[str, Node]:
    """The nodes of a graph or a body, and those of bodies in it: one entry, any number of outputs, and aliases."""
    nodes: dict[str, Node] = {}
    inner: dict[str, Node] = {}
    for i, letter in enumerate(names):
        name = prefix + letter
        others = [prefix + other for other in names[:i]]
        before = sorted(draw(st.sets(_one_of(*others), min_size=1, max_size=3))) if i else []
        made = draw(nodes_of(name, before, around))
        of = nodes[draw(_one_of(*others))] if i and draw(st.integers(0, 4)) == 0 else None
        if (
            of is not None
            and of.alias_of is None
            and (of.each is None or not outside(Graph("inner", inner, of.each.body), of.each.body))
        ):
            own = {key: getattr(made, key) for key in ("name", "inputs", "when", "otherwise", "require")}
            made = replace(of, alias_of=of.name, next=(), **own)
        elif len(prefix) < DEPTH and draw(st.integers(0, 3)) == 0:
            upstream = _upstream(nodes, before)
            inner |= draw(levels(NAMES[: draw(st.integers(1, 3))], name, [*around, *upstream, name]))
            split = draw(_one_of(*[f"parts_{name}"] * 4, None))
            gather = draw(_one_of(("result",), (f"by_{name}a",), (f"by_{name}a", "result"), ("parts_a",)))
            mode: Any = draw(_one_of("fail_parent", "null", "drop"))
            each = Each(f"{name}a", split, gather if split else (), on_item_error=mode if split else "fail_parent")
            made = replace(made, each=each)
        nodes[name] = made
        for producer in before:
            nodes[producer] = replace(nodes[producer], next=(*nodes[producer].next, name))
    return nodes | inner


def _upstream(nodes: dict[str, Node], before: list[str]) -> list[str]:
    found = [*before]
    for name in found:
        found += [n for n, node in nodes.items() if name in node.next and n not in found]
    return found


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    nodes = draw(levels(NAMES[: draw(st.integers(1, len(NAMES)))], "", []))
    if draw(st.integers(1, IN_PROCESSES)) == IN_PROCESSES:
        owners = sorted({node.alias_of or name for name, node in nodes.items()})
        chosen = draw(st.sets(_one_of(*owners), min_size=1, max_size=4))
        for name, node in nodes.items():
            nodes[name] = replace(node, processes=node.instances if (node.alias_of or name) in chosen else 0)
    return Graph("any", nodes, NAMES[0])


ITEM = st.fixed_dictionaries(
    {
        "k": st.integers(0, 5),
        "n": st.integers(0, 3),
        "fails": st.one_of(st.just(""), st.text(NAMES, max_size=1), st.text(NAMES[:3], max_size=3)),
        "at": st.one_of(st.just(""), st.text("012", max_size=2)),
    }
)


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forking(["penstock.pipeline.node", __name__]):
        yield


async def run(graph: Graph, items: list[Fields], direct: bool) -> list[list[ItemOutcome]]:
    """`direct`: the nodes' own threads pass the items on, as they do for the callers of a portal."""
    loop = asyncio.get_running_loop()
    inbox = portal_inbox() if direct else None
    runner = PipelineRunner(graph)
    await runner.start()
    outcomes: list[list[ItemOutcome]] = [[] for _ in items]
    ended = asyncio.Event()

    def note(found: list[ItemOutcome], outcome: ItemOutcome) -> None:
        found.append(outcome)
        loop.call_soon_threadsafe(ended.set)

    for item, found in zip(items, outcomes, strict=True):
        while runner.in_flight >= runner.width:  # an end that came before the look at it sets the event, too
            ended.clear()
            await ended.wait()
        with inbox.guard if inbox else nullcontext():
            runner.submit(item, partial(note, found))
    while not all(outcomes):
        ended.clear()
        await ended.wait()
    assert runner.in_flight == 0
    await runner.close(5.0)
    return outcomes


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, PARTS))])
@settings(max_examples=GRAPHS // PARTS)
@given(graph=graphs(), keys=st.lists(ITEM, min_size=1, max_size=ITEMS))
def test_each_item_ends_as_a_pure_evaluator_says(part: int, graph: Graph, keys: list[Fields]) -> None:
    items = [{"data": f"{i}:", **item} for i, item in enumerate(keys)]
    outcomes = asyncio.run(asyncio.wait_for(run(graph, items, direct=part % 2 > 0), 60.0))
    for item, found in zip(items, outcomes, strict=True):
        (outcome,) = found
        end = ("failed", outcome.node) if outcome.error else ("ok", outcome.fields)
        ways = islice(evaluated(graph, item), MOST_ENDS)
        assert any(end in ends for ends in ways), (outcome.error, end, next(evaluated(graph, item)))


async def leave(graph: Graph, items: list[tuple[Fields, int, float | None]], direct: bool) -> None:
    """Submits items with deadlines, and drops each after some turns of the loop, if it has not ended before."""
    inbox = portal_inbox() if direct else None
    guard = inbox.guard if inbox else nullcontext()
    runner = PipelineRunner(graph)
    await runner.start()
    tickets: list[tuple[int, Traversal]] = []
    for item, turns, budget_s in items:
        if runner.in_flight < runner.width:
            with suppress(DeadlineExceeded), guard:  # 1 ms may pass before its first node is reached
                tickets.append((turns, runner.submit(item, lambda outcome: None, budget_s=budget_s)))
    for turn in range(max(turns for _, turns, _ in items) + 1):
        for turns, ticket in tickets:
            if turns == turn:
                with guard:
                    ticket.cancel()
        await asyncio.sleep(0.0005)
    assert runner.in_flight == 0
    engines = {id(node.engine): node.engine for node in map(runner.node, graph.nodes)}.values()
    assert [(e.parents, e.parent_bytes, e.queued_rows) for e in engines] == [(0, 0, 0)] * len(engines)
    await runner.close(5.0)


@settings(max_examples=GRAPHS // 10)
@given(
    graph=graphs(),
    items=st.lists(st.tuples(ITEM, st.integers(0, 12), _one_of(None, 0.001, 0.004)), min_size=1, max_size=6),
    direct=st.booleans(),
)
def test_items_that_leave_take_their_children_along(
    graph: Graph, items: list[tuple[Fields, int, float | None]], direct: bool
) -> None:
    given = [({"data": f"{i}:", **item}, *rest) for i, (item, *rest) in enumerate(items)]
    asyncio.run(asyncio.wait_for(leave(graph, given, direct), 60.0))
