"""The shape of a graph: edges that `inputs` imply, the entry, and what no graph may be."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from penstock.errors import nearest
from penstock.pipeline.graph import Graph, Input, Node
from penstock.pipeline.source import Source


def linked(nodes: Mapping[str, Node], source: Source) -> dict[str, Node]:
    """The nodes with all edges in `next`, also those that only `inputs` tell, and with a producer in each input.

    Raises ConfigError: a node that is not there, an input of which it is not known where it comes from.
    """
    for node in nodes.values():
        for target in node.next:
            if target not in nodes:
                raise source.error(node.name, "next", f"there is no node '{target}'{nearest(target, nodes)}")
        if len(set(node.next)) < len(node.next):
            raise source.error(node.name, "next", f"found {', '.join(node.next)}, expected each node once")
    found = {name: replace(node, inputs=_resolved(node, nodes, source)) for name, node in nodes.items()}
    for node in list(found.values()):
        for producer in dict.fromkeys(i.producer for i in node.inputs):
            if node.name not in found[producer].next:
                found[producer] = replace(found[producer], next=(*found[producer].next, node.name))
    return found


def _resolved(node: Node, nodes: Mapping[str, Node], source: Source) -> tuple[Input, ...]:
    return tuple(_producer(node, each, nodes, source) for each in node.inputs)


def _producer(node: Node, given: Input, nodes: Mapping[str, Node], source: Source) -> Input:
    if (whole := f"{given.producer}.{given.source}") in nodes:  # an alias: its name has a dot
        return replace(given, producer=whole, source="result")
    if given.producer in nodes:
        return given
    if given.producer:
        there = nearest(given.producer, nodes) or f"; there are {', '.join(nodes)}"
        raise source.error(node.name, "inputs", f"there is no node '{given.producer}'{there}")
    before = [name for name, other in nodes.items() if node.name in other.next]
    if len(before) != 1:
        names = ", ".join(before) or "none"
        raise source.error(node.name, "inputs", f"{given.source}: of which node? Those before it: {names}")
    return replace(given, producer=before[0])


def entry_of(nodes: Mapping[str, Node], named: str | None, source: Source, *, compat: bool) -> str:
    """The node where items begin that name none. Raises ConfigError: there is no such node, or more than one."""
    if named is not None:
        if named not in nodes:
            raise source.error("pipeline", "entry", f"there is no node '{named}'{nearest(named, nodes)}")
        return named
    followed = {target for node in nodes.values() for target in node.next}
    bodies = {node.each.body for node in nodes.values() if node.each is not None}
    roots = [name for name in nodes if name not in followed | bodies]
    if not roots:
        raise source.error("", "", f"the nodes {cycle_in(nodes)} are in a cycle; items would never end")
    if len(roots) > 1:
        listed = ", ".join(f"[{name}]" for name in roots)
        message = f"found {len(roots)} entries, {listed}: no next names them"
        if not compat:
            raise source.error("", "", f"{message}; name one with entry in [pipeline], or in the next of another node")
        source.warn("", "", f"{message}; items that name no node begin at [{roots[0]}]")
    return roots[0]


def check_structure(graph: Graph, source: Source) -> None:
    """Raises ConfigError: a cycle, a join that does not say what it takes, one that could wait for ever."""
    if found := cycle_in(graph.nodes):
        raise source.error("", "", f"the nodes {found} are in a cycle; items would never end")
    reached = {graph.entry, *graph.downstream(graph.entry)}
    for node in graph.nodes.values():
        names = [each.name for each in node.inputs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise source.error(node.name, "inputs", f"found the field '{twice}' twice; each may come from one place")
        if node.inputs and "data" not in names:
            raise source.error(node.name, "inputs", f"found {', '.join(names)}, expected 'data' among them")
        producers = graph.producers(node.name)
        if len(producers) > 1 and not node.inputs:
            raise source.error(
                node.name,
                "",
                f"takes items of {', '.join(producers)}, but does not say which fields of each:"
                f' write inputs = {{data = "{producers[0]}.result", ...}}, or map',
            )
        if name := next((p for p in producers if node.name in reached and p not in reached), None):
            raise source.error(
                node.name, "", f"takes items of {name}, where none comes that began at [{graph.entry}]: it would wait"
            )


def cycle_in(nodes: Mapping[str, Node]) -> str:
    """A cycle as "a -> b -> a", or an empty text."""
    done: set[str] = set()
    for start in nodes:
        way: list[str] = [start]
        rest = [iter(nodes[start].next)]
        while rest and start not in done:
            following = next(rest[-1], None)
            if following is None:
                done.add(way.pop())
                rest.pop()
            elif following in way:
                return " -> ".join([*way[way.index(following) :], following])
            elif following not in done and following in nodes:
                way.append(following)
                rest.append(iter(nodes[following].next))
    return ""
