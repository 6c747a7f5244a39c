"""Checks of a graph before it runs: its structure, its ops and parameters, and the fields on its edges."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

from msgspec import UNSET
from msgspec.structs import replace

from penstock.errors import ConfigError, nearest
from penstock.pipeline.conditions import exclusive
from penstock.pipeline.fields import fields_of
from penstock.pipeline.graph import Graph, Node, NodeInput, alternatives, cycle_in, reached_by, unknown_filters
from penstock.pipeline.keys import TomlSource
from penstock.pipeline.lower import checked, op_class
from penstock.pipeline.ops.base import RESULT


def check(graph: Graph, source: TomlSource | None = None) -> None:
    """Returns if the graph can run. Raises ConfigError: node, what was found, what was expected.

    With the `source` of its file, errors have lines.
    """
    source = source or TomlSource(graph.name)
    linked(graph.nodes, source)
    entry_of(graph.nodes, graph.entry, source, compat=graph.compat)
    check_structure(graph, source)
    for node in graph.nodes.values():
        _check_steps(node, source)
    fields_of(graph, source)
    _check_outputs(graph, source)
    if unknown := unknown_filters(list(graph.nodes.values())):
        raise ConfigError(f"{graph.name}: {'; '.join(unknown)}")


def _check_steps(node: Node, source: TomlSource) -> None:
    if not node.steps and node.alias_of is None:
        raise source.error(node.name, "ops", "found no step; expected one or more, such as Identity")
    for step in node.steps:
        try:
            checked(step.op, step.params)
        except ConfigError as e:
            raise source.error(node.name, "", e.message) from None


# ---- structure


def linked(nodes: Mapping[str, Node], source: TomlSource, *, compat: bool = False) -> dict[str, Node]:
    """The nodes with all edges in `next`, including those that only `inputs` imply, and a producer in each input.

    Raises ConfigError: a missing node, an input without a known producer.
    """
    for node in nodes.values():
        for target in node.next:
            if target not in nodes:
                raise source.error(node.name, "next", f"there is no node '{target}'{nearest(target, nodes)}")
        if len(set(node.next)) < len(node.next):
            raise source.error(node.name, "next", f"found {', '.join(node.next)}, expected each node once")
        if node.each is not None and (body := node.each.body) not in nodes:
            raise source.error(node.name, "body", f"there is no node '{body}'{nearest(body, nodes)}")
    found = {
        name: replace(node, inputs=tuple(_resolved(node, given, nodes, source, compat) for given in node.inputs))
        for name, node in nodes.items()
    }
    bodies = _bodies(found)
    for node in list(found.values()):
        for producer in dict.fromkeys(i.producer for i in node.inputs):
            enters = any(node.name in body and producer not in body for body in bodies)
            if node.name not in found[producer].next and not enters:
                found[producer] = replace(found[producer], next=(*found[producer].next, node.name))
    return found


def _bodies(nodes: Mapping[str, Node]) -> list[frozenset[str]]:
    """The nodes of each body, also those that only `inputs` put after others."""
    readers: dict[str, tuple[str, ...]] = {}
    for node in nodes.values():
        for i in node.inputs:
            readers[i.producer] = (*readers.get(i.producer, ()), node.name)
    wider = {name: replace(node, next=(*node.next, *readers.get(name, ()))) for name, node in nodes.items()}
    return [reached_by(wider, node.each.body) for node in nodes.values() if node.each is not None]


def _resolved(node: Node, given: NodeInput, nodes: Mapping[str, Node], source: TomlSource, compat: bool) -> NodeInput:
    """The input with the full name of its producer. TorchPipe takes the first by name of several."""
    if (whole := f"{given.producer}.{given.source}") in nodes:  # the name of an alias contains a dot
        return replace(given, producer=whole, source="result")
    if given.producer in nodes:
        return given
    if given.producer:
        hint = nearest(given.producer, nodes) or f"; there are {', '.join(nodes)}"
        raise source.error(node.name, "inputs", f"there is no node '{given.producer}'{hint}")
    before = [n for n, other in nodes.items() if node.name in other.next or _calls(other, node.name)]
    names = ", ".join(sorted(before)) or "none"
    if len(before) > 1 and compat:
        source.warn(node.name, "inputs", f"{given.source}: taken from '{min(before)}', the first by name of {names}")
    elif len(before) != 1:
        raise source.error(node.name, "inputs", f"{given.source}: which node gives it? Nodes before this one: {names}")
    return replace(given, producer=min(before))


def _calls(node: Node, body: str) -> bool:
    return node.each is not None and node.each.body == body


def entry_of(nodes: Mapping[str, Node], named: str | None, source: TomlSource, *, compat: bool) -> str:
    """The node where items begin by default. Raises ConfigError: there is no such node, or more than one."""
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


def check_structure(graph: Graph, source: TomlSource) -> None:
    """Raises ConfigError: a cycle, a join without named fields, a join that could wait forever."""
    if found := cycle_in(graph.nodes):
        raise source.error("", "", f"the nodes {found} are in a cycle; items would never end")
    _check_bodies(graph, source)
    reached = {graph.entry, *graph.downstream(graph.entry)}
    for node in graph.nodes.values():
        names = [each.name for each in node.inputs]
        if node.alias_of is not None and (
            node.alias_of not in graph.nodes or graph.nodes[node.alias_of].alias_of is not None
        ):
            raise source.error(node.name, "", f"is an alias of [{node.alias_of}], expected a node that is no alias")
        if node.inputs and "data" not in names:
            raise source.error(node.name, "inputs", f"found {', '.join(names)}, expected 'data' among them")
        producers = graph.producers(node.name)
        if len(producers) > 1 and not node.inputs:
            raise source.error(
                node.name,
                "",
                f"takes items from {', '.join(producers)}, but does not name the fields of each:"
                f' write inputs = {{data = "{producers[0]}.result", ...}}, or map',
            )
        if name := next((p for p in producers if node.name in reached and p not in reached), None):
            raise source.error(
                node.name, "", f"waits for items from {name}, which items that begin at [{graph.entry}] never reach"
            )
        _check_join(graph, node, source)


def _check_bodies(graph: Graph, source: TomlSource) -> None:
    """Raises ConfigError: a node in a body and outside of it, or that takes a field which its item does not have."""
    inner = {body: reached_by(graph.nodes, body) for body in graph.bodies}
    for body, members in graph.bodies.items():
        for caller in graph.callers(body):
            for node in (graph.nodes[name] for name in graph.nodes if name in members):
                if others := [name for name in graph.producers(node.name) if name not in members]:
                    raise source.error(
                        node.name,
                        "",
                        f"follows [{others[0]}], but belongs to the body of [{caller}], which begins at [{body}]: nodes"
                        f" after the fan-out take its gathered fields, such as {caller}.{_gathered(graph, caller)}",
                    )
            for i in (i for name in inner[body] for i in graph.nodes[name].inputs if i.producer not in inner[body]):
                here = all(caller in nodes for nodes in inner.values() if i.producer in nodes)
                if i.producer != caller and not (here and i.producer in graph.upstream(caller)):
                    reader = next(n for n in inner[body] if i in graph.nodes[n].inputs)
                    text = f"takes a field of [{i.producer}], which the items of [{caller}] do not pass before"
                    raise source.error(reader, "inputs", text)


def _gathered(graph: Graph, caller: str) -> str:
    each = graph.nodes[caller].each
    return next(iter(each.gather if each is not None else ()), RESULT)


def _check_join(graph: Graph, node: Node, source: TomlSource) -> None:
    """Raises ConfigError for a join of branches whose conditions exclude each other: it would never run."""
    if node.require == "any" or not node.inputs:
        return
    needed = {
        gate.name: (producer, gate) for producer in _needed(graph, node) for gate in _gates(graph, producer)
    }.values()
    for (one, a), (other, b) in combinations(needed, 2):
        same_place = graph.producers(a.name) == graph.producers(b.name) and not a.inputs and not b.inputs
        if same_place and a.filter == b.filter and exclusive(a.when or "", b.when or ""):
            raise source.error(
                node.name,
                "",
                f"waits for [{one}] and [{other}], but no item reaches both: '{a.when}' and '{b.when}' exclude each"
                f' other; name alternatives, as in {{data = ["{one}.result", "{other}.result"]}}, set defaults, or'
                ' require = "any"',
            )


def _needed(graph: Graph, node: Node) -> list[str]:
    """The sources without which a join cannot run."""
    named = {i.producer for i in node.inputs}
    single = [choices[0] for choices in alternatives(node).values() if len({i.producer for i in choices}) == 1]
    required = [i.producer for i in single if i.default is UNSET]
    return list(dict.fromkeys([*required, *(p for p in graph.producers(node.name) if p not in named)]))


def _gates(graph: Graph, name: str) -> Iterator[Node]:
    """The nodes up to the last join whose conditions an item meets if it comes through `name`."""
    while True:
        node = graph.nodes[name]
        if node.when is not None and node.otherwise == "skip_branch":
            yield node
        before = graph.producers(name)
        if node.inputs or len(before) != 1:
            return
        name = before[0]


def _check_outputs(graph: Graph, source: TomlSource) -> None:
    """Raises ConfigError if an item reaches two outputs that give the same field of the response."""
    for start in (name for name in graph.nodes if name == graph.entry or not graph.producers(name)):
        reached = {start, *graph.downstream(start)}
        returned = _returned(graph, start)
        ends = [name for name in graph.nodes if name in reached and not graph.nodes[name].next]
        for one, other in combinations(ends, 2):
            paths = {one: graph.upstream(one) | {one}, other: graph.upstream(other) | {other}}
            own = paths[one] - paths[other], paths[other] - paths[one]
            if all(any(graph.nodes[name].otherwise == "skip_branch" for name in names) for names in own):
                continue  # conditions select one of them
            given = [_written(graph, names) for names in own]
            if both := [name for name in sorted(returned) if name in given[0] & given[1]]:
                raise source.error(
                    other,
                    "",
                    f"is an output with the field '{both[0]}', and so is [{one}], but an item has one '{both[0]}': join"
                    " them in a node with inputs, or name their fields with outputs in [pipeline]",
                )


def _returned(graph: Graph, start: str) -> set[str]:
    """The fields of a response to items that begin at a node, or those that fan-outs gather from them."""
    calls = [graph.nodes[name].each for name in graph.callers(start)]
    return {name for each in calls if each is not None for name in each.gather or (RESULT,)} or {*graph.gives}


def _written(graph: Graph, names: Iterable[str]) -> set[str]:
    """The fields that these nodes are known to write."""
    steps = [step for name in names for step in graph.nodes[name].steps]
    return {RESULT, *(field for step in steps for field in op_class(step.op, step.params).writes or ())}
