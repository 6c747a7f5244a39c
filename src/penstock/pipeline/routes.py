"""Where items go that begin at a node: which nodes they reach, which outputs, and what each join waits for. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.graph import Graph, Node

FILTERS = ("run", "swap", "or")
STEP_FILTERS = (*FILTERS, "then")


class Route(Struct, frozen=True):
    """`waits`: for each join on the way, how many nodes must have ended before it. `outputs`, in the graph's order."""

    start: str
    outputs: tuple[str, ...]
    waits: Mapping[str, int]


def needs(graph: Graph, name: str) -> frozenset[str]:
    """The nodes that must have ended before a join: its producers, and whose fields it takes. Empty: it is no join."""
    node = graph.nodes[name]
    producers = graph.producers(name)
    if not node.inputs and len(producers) < 2:
        return frozenset()
    return frozenset(producers) | {i.producer for i in node.inputs}


def route(graph: Graph, start: str) -> Route:
    """The way of items that begin at `start`. Raises BadRequest if a join on it takes fields of a node that is not."""
    reach = {start, *graph.downstream(start)}
    waits = {}
    for name in graph.nodes:
        if name in reach and name != start and (wanted := needs(graph, name)):
            missing = sorted(wanted - reach)
            if missing:
                raise BadRequest(
                    f"an item cannot begin at node '{start}': node '{name}' takes what node '{missing[0]}' gives,"
                    " which is not on the way"
                )
            waits[name] = len(wanted)
    return Route(start, tuple(name for name in graph.outputs if name in reach), waits)


def check_runnable(graph: Graph) -> None:
    """Raises ConfigError for what a graph may hold and the runner does not do."""
    for node in graph.nodes.values():
        for found in held(node):
            raise ConfigError(f"node '{node.name}': not supported yet: {found}")
        for step in node.steps:
            if step.filter not in STEP_FILTERS:
                raise ConfigError(f"node '{node.name}', op '{step.op}': not supported yet: filter '{step.filter}'")
        wanted = needs(graph, node.name)
        if wanted and not node.inputs:
            named = ", ".join(sorted(wanted))
            raise ConfigError(
                f"node '{node.name}' follows {named} and says not what it takes of each: set inputs (map)"
            )
        for i in node.inputs:
            if i.producer not in graph.upstream(node.name):
                raise ConfigError(f"node '{node.name}': inputs name '{i.producer}', which does not come before it")
    graph.order()


def held(node: Node) -> list[str]:
    """What a node has that is not run yet, in words."""
    return [
        *([f"alias of '{node.alias_of}'"] if node.alias_of is not None else ()),
        *(["a fan-out (each, MapReduce)"] if node.each is not None else ()),
        *(["when"] if node.when is not None else ()),
        *(['require = "any"'] if node.require == "any" else ()),
        *([f"filter '{node.filter}'"] if node.filter not in FILTERS else ()),
    ]
