"""Checks of a graph before it runs: its structure, its ops and parameters, and the fields on its edges."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

from msgspec import UNSET
from msgspec.structs import replace

from penstock.errors import ConfigError, nearest
from penstock.pipeline.conditions import exclusive
from penstock.pipeline.graph import Graph, Node, NodeInput, NodeStep, cycle_in, unsupported
from penstock.pipeline.joins import alternatives
from penstock.pipeline.keys import TomlSource
from penstock.pipeline.lower import checked, op_class
from penstock.pipeline.ops.base import DATA, RESULT

Kinds = dict[str, str]
"""Kinds by field, as in `ops.base.Op`. The field OPEN means that there may be more fields."""

OPEN = "..."

_BETWEEN = {
    ("bytes", "mat"): "DecodeMat converts one to the other",
    ("bytes", "tensor"): "S[DecodeMat,Mat2Tensor] converts one to the other",
    ("mat", "tensor"): "Mat2Tensor converts one to the other",
    ("tensor", "mat"): "Tensor2Mat converts one to the other",
}


def check(graph: Graph) -> None:
    """Returns if the graph can run. Raises ConfigError: node, what was found, what was expected."""
    source = TomlSource(graph.name)
    linked(graph.nodes, source)
    entry_of(graph.nodes, graph.entry, source, compat=graph.compat)
    check_structure(graph, source)
    for node in graph.nodes.values():
        _check_steps(node, source)
    fields_of(graph)
    _check_outputs(graph, source)
    if reasons := cannot_run(graph):
        raise ConfigError(f"{graph.name}: {'; '.join(reasons)}")


def cannot_run(graph: Graph) -> tuple[str, ...]:
    """The features of a graph that no runner supports yet, in words."""
    return tuple(
        f"[{node.name}] {feature} cannot be run yet" for node in graph.nodes.values() for feature in unsupported(node)
    )


def _check_steps(node: Node, source: TomlSource) -> None:
    if not node.steps and node.alias_of is None and node.each is None:
        raise source.error(node.name, "ops", "found no step; expected one or more, such as Identity")
    for step in node.steps:
        try:
            checked(step.op, step.params)
        except ConfigError as e:
            raise source.error(node.name, "", e.message) from None


# ---- structure


def linked(nodes: Mapping[str, Node], source: TomlSource) -> dict[str, Node]:
    """The nodes with all edges in `next`, including those that only `inputs` imply, and a producer in each input.

    Raises ConfigError: a missing node, an input without a known producer.
    """
    for node in nodes.values():
        for target in node.next:
            if target not in nodes:
                raise source.error(node.name, "next", f"there is no node '{target}'{nearest(target, nodes)}")
        if len(set(node.next)) < len(node.next):
            raise source.error(node.name, "next", f"found {', '.join(node.next)}, expected each node once")
    found = {
        name: replace(node, inputs=tuple(_resolved(node, given, nodes, source) for given in node.inputs))
        for name, node in nodes.items()
    }
    for node in list(found.values()):
        for producer in dict.fromkeys(i.producer for i in node.inputs):
            if node.name not in found[producer].next:
                found[producer] = replace(found[producer], next=(*found[producer].next, node.name))
    return found


def _resolved(node: Node, given: NodeInput, nodes: Mapping[str, Node], source: TomlSource) -> NodeInput:
    """The input with the full name of its producer."""
    if (whole := f"{given.producer}.{given.source}") in nodes:  # the name of an alias contains a dot
        return replace(given, producer=whole, source="result")
    if given.producer in nodes:
        return given
    if given.producer:
        hint = nearest(given.producer, nodes) or f"; there are {', '.join(nodes)}"
        raise source.error(node.name, "inputs", f"there is no node '{given.producer}'{hint}")
    before = [name for name, other in nodes.items() if node.name in other.next]
    if len(before) != 1:
        names = ", ".join(before) or "none"
        raise source.error(node.name, "inputs", f"{given.source}: which node gives it? Nodes before this one: {names}")
    return replace(given, producer=before[0])


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
    """Raises ConfigError if an item reaches two outputs that give the same field of the answer."""
    for start in (name for name in graph.nodes if name == graph.entry or not graph.producers(name)):
        reached = {start, *graph.downstream(start)}
        ends = [name for name in graph.outputs if name in reached]
        for one, other in combinations(ends, 2):
            paths = {one: graph.upstream(one) | {one}, other: graph.upstream(other) | {other}}
            own = paths[one] - paths[other], paths[other] - paths[one]
            if all(any(graph.nodes[name].otherwise == "skip_branch" for name in names) for names in own):
                continue  # conditions select one of them
            given = [_written(graph, names) for names in own]
            if both := [name for name in graph.answers if name in given[0] & given[1]]:
                raise source.error(
                    other,
                    "",
                    f"is an output with the field '{both[0]}', and so is [{one}], but an item has one '{both[0]}': join"
                    " them in a node with inputs, or name their fields with outputs in [pipeline]",
                )


def _written(graph: Graph, names: Iterable[str]) -> set[str]:
    """The fields that these nodes are known to write."""
    steps = [step for name in names for step in graph.nodes[name].steps]
    return {RESULT, *(field for step in steps for field in op_class(step.op, step.params).writes or ())}


# ---- fields


def fields_of(graph: Graph) -> dict[str, Kinds]:
    """The fields of an item after each node. The graph must have no cycle and only known ops.

    Raises ConfigError: an input that no node gives, an op that takes another kind than the previous op gives.
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
    """Producer, consumer, and the fields that the consumer takes, for each edge. Raises as `fields_of` does."""
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
        # without a swap, the kind of the data depends on the op that gave no result
        return _swapped(before) if node.filter == "swap" else {**before, DATA: "any"}
    arriving: Kinds = {}
    for each in node.inputs:
        given = left[each.producer]
        known = arriving.get(each.name)
        if each.source not in given and OPEN not in given:
            raise ConfigError(
                f"[{node.name}] inputs: [{each.producer}] has no field '{each.source}' for '{each.name}'; it has"
                f" {', '.join(given)} (list further fields that callers send as inputs in [pipeline])"
            )
        kind = given.get(each.source, "any")
        arriving[each.name] = kind if known in (None, kind) and each.default is UNSET else "any"
    return arriving


def _swapped(fields: Kinds) -> Kinds:
    """The fields with the result of one node as the data of the next."""
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
    skipped = fields[DATA] if DATA in fields and "skip" in (node.on_error, node.when and node.otherwise) else given
    left[RESULT] = given if fields.get(RESULT, given) == given == skipped else "any"
    return left


def _step(node: Node, step: NodeStep, left: Kinds, other: str) -> str:
    """The kind that a step gives, or the `other` that already exists. Adds the fields that the step writes."""
    op = op_class(step.op, step.params)
    if "any" not in (op.takes, left[DATA]) and op.takes != left[DATA]:
        hint = _BETWEEN.get((left[DATA], op.takes), "put another op before it")
        raise ConfigError(f"[{node.name}] {step.op} takes '{op.takes}' as data, but gets '{left[DATA]}': {hint}")
    for name in op.writes if op.writes is not None else (OPEN,):
        left[name] = "any"
    gives = left[DATA] if step.op == "Identity" else op.gives
    return gives if other in ("", gives) else "any"
