"""Whether a graph can run: its shape, its ops and their parameters, the fields of its edges, what is only held."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from penstock.errors import ConfigError, nearest
from penstock.pipeline.graph import Graph, Input, Node, Step
from penstock.pipeline.keys import Source
from penstock.pipeline.lower import checked, op_class
from penstock.pipeline.ops.base import DATA, RESULT
from penstock.pipeline.routes import FILTERS as FILTERS
from penstock.pipeline.routes import STEP_FILTERS, held


def check(graph: Graph) -> None:
    """Returns if the graph can run. Raises ConfigError: node, what was found, what was expected."""
    source = Source(graph.name)
    linked(graph.nodes, source)
    entry_of(graph.nodes, graph.entry, source, compat=graph.compat)
    check_structure(graph, source)
    for node in graph.nodes.values():
        _check_steps(node, source)
    fields_of(graph)
    if held := cannot_run(graph):
        raise ConfigError(f"{graph.name}: {'; '.join(held)}")


def cannot_run(graph: Graph) -> tuple[str, ...]:
    """What a graph holds that no runner runs yet, in words; empty for most."""
    found = [(node, text) for node in graph.nodes.values() for text in (*held(node), *_filters(node))]
    return tuple(f"[{node.name}] {text} cannot be run yet" for node, text in found)


def _filters(node: Node) -> list[str]:
    return [f"filter '{step.filter}'" for step in node.steps if step.filter not in STEP_FILTERS]


def _check_steps(node: Node, source: Source) -> None:
    if not node.steps and node.alias_of is None and node.each is None:
        raise source.error(node.name, "ops", "found no step; expected one or more, such as Identity")
    for step in node.steps:
        try:
            checked(step.op, step.params)
        except ConfigError as e:
            raise source.error(node.name, "", e.message) from None


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


Kinds = dict[str, str]
"""Kinds by field: those of `ops.base.Op`. The field OPEN says that there may be others, too."""

OPEN = "..."

_BETWEEN = {
    ("bytes", "mat"): "DecodeMat makes one of the other",
    ("bytes", "tensor"): "S[DecodeMat,Mat2Tensor] makes one of the other",
    ("mat", "tensor"): "Mat2Tensor makes one of the other",
    ("tensor", "mat"): "Tensor2Mat makes one of the other",
}


def fields_of(graph: Graph) -> dict[str, Kinds]:
    """The fields that each node leaves an item with. The graph has no cycle, and its ops are known.

    Raises ConfigError: an input that nobody gives, an op that takes another kind than the one before it gives.
    """
    left: dict[str, Kinds] = {}
    for name in graph.order():
        node = graph.nodes[name]
        try:
            left[name] = _through(node, _arriving(graph, node, left))
        except ConfigError as e:
            raise ConfigError(f"{graph.name}: {e.message}") from None
    return left


def edges_of(graph: Graph) -> list[tuple[str, str, Kinds]]:
    """Producer, consumer, and the fields that the consumer has of it, edge by edge. Raises as `fields_of` does."""
    left = fields_of(graph)
    edges = []
    for name in graph.order():
        for target in graph.nodes[name].next:
            taken = [i for i in graph.nodes[target].inputs if i.producer == name]
            fields = {i.name: left[name].get(i.source, "any") for i in taken}
            edges.append((name, target, fields if graph.nodes[target].inputs else _swapped(left[name])))
    return edges


def _arriving(graph: Graph, node: Node, left: dict[str, Kinds]) -> Kinds:
    producers = graph.producers(node.name)
    if not producers:
        return dict.fromkeys(graph.takes, "any")
    if not node.inputs:
        before = left[producers[0]]
        # what an item without a result has as data, nobody knows: it depends on the op that gave none
        return _swapped(before) if node.filter == "swap" else {**before, DATA: "any"}
    arriving: Kinds = {}
    for each in node.inputs:
        there = left[each.producer]
        if each.source not in there and OPEN not in there:
            listed = ", ".join(there)
            raise ConfigError(
                f"[{node.name}] inputs: [{each.producer}] has no field '{each.source}' for '{each.name}'; it has"
                f" {listed} (fields that callers give beside data are told by inputs in [pipeline])"
            )
        arriving[each.name] = there.get(each.source, "any")
    return arriving


def _swapped(fields: Kinds) -> Kinds:
    """The result of one node is the data of the next."""
    return {name: kind for name, kind in fields.items() if name != RESULT} | {DATA: fields[RESULT]}


def _through(node: Node, fields: Kinds) -> Kinds:
    left = {name: kind for name, kind in fields.items() if name != RESULT}
    left.setdefault(DATA, "any")
    given = ""
    for step in node.steps:
        guarded = step.filter == "or"
        if guarded or (given and step.filter == "run"):
            left[DATA] = "any"
        elif given:
            left[DATA] = given
        given = _step(node, step, left, given if guarded else "")
    given = given or left[DATA]
    left[RESULT] = given if fields.get(RESULT, given) == given else "any"
    return left


def _step(node: Node, step: Step, left: Kinds, other: str) -> str:
    """The kind that a step gives, or the `other` that is there already. Adds what it writes."""
    op = op_class(step.op, step.params)
    if "any" not in (op.takes, left[DATA]) and op.takes != left[DATA]:
        hint = _BETWEEN.get((left[DATA], op.takes), "another op belongs before it")
        raise ConfigError(f"[{node.name}] {step.op} takes '{op.takes}' as data, but gets '{left[DATA]}': {hint}")
    for name in op.writes if op.writes is not None else (OPEN,):
        left[name] = "any"
    gives = left[DATA] if step.op == "Identity" else op.gives
    return gives if other in ("", gives) else "any"
