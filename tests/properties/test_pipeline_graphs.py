"""Any graph of conditions, joins, aliases and failures gives each item what a pure evaluator gives it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.graph import Graph, Node, NodeInput, NodeStep
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp
from penstock.pipeline.runner import PipelineRunner
from penstock.pipeline.traversal import ItemOutcome

GRAPHS = 8000 if os.environ.get("CHAOS") == "full" else 2000
NAMES = "abcdefg"
ITEMS = 6
PARTS = 4

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
    """Adds its name to the data, or fails for the item that names it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, data: str, fields: Fields) -> str:
        if fields.get("fails") == self.name:
            raise ValueError(self.name)
        fields[f"by_{self.name}"] = len(data)
        return data + self.name


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog._registered, "Visited", Visited)
    monkeypatch.setattr("penstock.pipeline.node.log.disabled", True)


# ---- the evaluator


def evaluated(graph: Graph, item: Fields) -> list[tuple[str, Any]]:
    """How the item may end: ("failed", node) or ("ok", fields). Of ends on parallel branches any may be the first."""
    left: dict[str, tuple[bool, Fields]] = {}  # alive, and the fields after the node
    ends: list[tuple[str, Any]] = []
    for name in graph.order():
        node = graph.nodes[name]
        if (found := arriving(graph, node, left, item)) is None:
            continue  # an item that has ended before does not get here
        alive, fields, swap = found
        if not alive:
            left[name] = False, fields
            continue
        seen = {**fields, "data": fields["result"]} if swap else fields
        passed = fields if "result" in fields else {**fields, "result": fields["data"]}
        fails = fields.get("fails") == node.steps[0].params["name"]
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
        elif not fails:
            op = node.steps[0].params["name"]
            left[name] = True, {**seen, f"by_{op}": len(seen["data"]), "result": seen["data"] + op}
        elif node.on_error == "skip":
            left[name] = True, passed
        else:
            ends.append(("failed", name))
    if ends:
        return ends
    outputs = [left[name] for name in graph.outputs]
    chosen = [fields for alive, fields in outputs if alive] or [fields for _, fields in outputs]
    return [("ok", {name: value for fields in chosen for name, value in fields.items()})]


def arriving(
    graph: Graph, node: Node, left: dict[str, tuple[bool, Fields]], item: Fields
) -> tuple[bool, Fields, bool] | None:
    """(alive, the fields, whether the result becomes the data) of an item before a node."""
    before = graph.producers(node.name)
    if not all(name in left for name in before):
        return None
    if not before:
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
    if all(not left[name][0] for name in before) if node.require == "any" else lacking:
        return False, left[node.inputs[0].producer][1], False
    return True, taken, False


# ---- graphs and items


@st.composite
def nodes_of(draw: st.DrawFn, name: str, before: list[str]) -> Node:
    """A node after others, of which it takes the results if there are several."""
    inputs: list[NodeInput] = []
    if len(before) > 1:
        named = draw(st.booleans())
        default = st.one_of(st.just(UNSET), st.just("-"))
        rest = ["data" if draw(st.booleans()) else f"from_{p}" for p in before[1:]]
        names = ["data", *rest] if named else ["data"]
        chosen = {field: "-" if draw(st.integers(0, 2)) == 0 else draw(default) for field in names}
        # without a default, data is None if only other sources are alive, and the conditions compare texts
        if names.count("data") < len(before):
            chosen["data"] = "-"
        inputs = [NodeInput(p, "result", f, chosen[f]) for p, f in zip(before, names, strict=False)]
        inputs += [NodeInput(before[0], "k", "k", 2), NodeInput(before[0], "fails", "fails", "")]
    otherwise: Any = draw(st.sampled_from(["skip", "skip_branch", "skip_branch", "stop", "fail"]))
    when = draw(st.sampled_from([None, None, *CONDITIONS]))
    return Node(
        name,
        (NodeStep("Visited", {"name": name}),),
        inputs=tuple(sorted(inputs, key=lambda i: i.name != "data")),
        instances=draw(st.integers(1, 2)),
        max_batch=draw(st.integers(1, 4)),
        queue=draw(st.one_of(st.none(), st.integers(1, 3))),
        when=when,
        otherwise=otherwise,
        on_error=draw(st.sampled_from(["fail", "fail", "skip"])),
        require=draw(st.sampled_from(["all", "any"])),
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """One entry, any number of outputs, and nodes that are aliases of others."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    nodes: dict[str, Node] = {}
    for i, name in enumerate(names):
        before = sorted(draw(st.sets(st.sampled_from(names[:i]), min_size=1, max_size=3))) if i else []
        made = draw(nodes_of(name, before))
        of = nodes[draw(st.sampled_from(names[:i]))] if i and draw(st.integers(0, 4)) == 0 else None
        if of is not None and of.alias_of is None:
            own = {key: getattr(made, key) for key in ("name", "inputs", "when", "otherwise", "require")}
            made = replace(of, alias_of=of.name, next=(), **own)
        nodes[name] = made
        for producer in before:
            nodes[producer] = replace(nodes[producer], next=(*nodes[producer].next, name))
    return Graph("any", nodes, names[0])


ITEM = st.fixed_dictionaries(
    {"k": st.integers(0, 5), "fails": st.one_of(st.just(""), st.just(""), st.sampled_from(NAMES))}
)


async def run(graph: Graph, items: list[Fields]) -> list[list[ItemOutcome]]:
    runner = PipelineRunner(graph)
    await runner.start()
    outcomes: list[list[ItemOutcome]] = [[] for _ in items]
    ended = asyncio.Event()

    def note(found: list[ItemOutcome], outcome: ItemOutcome) -> None:
        found.append(outcome)
        ended.set()

    for item, found in zip(items, outcomes, strict=True):
        if runner.in_flight >= runner.width:
            ended.clear()
            await ended.wait()
        runner.submit(item, partial(note, found))
    while not all(outcomes):
        ended.clear()
        await ended.wait()
    assert runner.in_flight == 0
    await runner.close(5.0)
    return outcomes


@pytest.mark.parametrize("part", range(PARTS))  # several processes share the work
@settings(max_examples=GRAPHS // PARTS)
@given(graph=graphs(), keys=st.lists(ITEM, min_size=1, max_size=ITEMS))
def test_each_item_ends_as_a_pure_evaluator_says(part: int, graph: Graph, keys: list[Fields]) -> None:
    items = [{"data": f"{i}:", **item} for i, item in enumerate(keys)]
    for item, found in zip(items, asyncio.run(asyncio.wait_for(run(graph, items), 60.0)), strict=True):
        (outcome,) = found
        end = ("failed", outcome.node) if outcome.error else ("ok", outcome.fields)
        assert end in evaluated(graph, item), outcome.error
