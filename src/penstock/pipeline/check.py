"""Checks of a graph before it runs: its structure, its ops and parameters, and the fields on its edges."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from msgspec import UNSET
from msgspec.structs import replace

from penstock.errors import ConfigError, nearest
from penstock.pipeline import filters
from penstock.pipeline.filters import exclusive
from penstock.pipeline.graph import (
    REQUEST,
    Each,
    Graph,
    Node,
    NodeInput,
    NodeStep,
    alternatives,
    chain_of,
    cycle_in,
    part_name,
    reached_by,
    starts_item,
    subgraph_of,
    unknown_filters,
)
from penstock.pipeline.lower import checked, op_class
from penstock.pipeline.notation import TomlSource
from penstock.pipeline.ops.base import DATA, RESULT
from penstock.pipeline.ops.catalog import registered


def check(graph: Graph, source: TomlSource | None = None) -> None:
    """Returns if the graph can run. Raises ConfigError: node, what was found, what was expected.

    With the `source` of its file, errors have lines.
    """
    source = source or TomlSource(graph.name)
    linked(graph.nodes, source, takes=graph.begins_with)
    entry_of(graph.nodes, graph.entry, source, compat=graph.compat)
    check_structure(graph, source)
    for node in graph.nodes.values():
        _check_steps(node, source)
    _check_sources(graph, fields_of(graph, source), source)
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
        if node.processes and (why := _unknown_elsewhere(step)):
            text = f"{why}, which other processes do not have; set instances instead"
            raise source.error(node.name, "processes", text)


def _unknown_elsewhere(step: NodeStep) -> str:
    """What a step needs of this program; "" if nothing."""
    if any("<locals>" in op.__qualname__ for op in registered([step.op]).values()):
        return f"the op {step.op} is a class in a function"
    return f"the filter {step.filter} is registered in this program" if filters.may_skip_others(step.filter) else ""


# ---- structure


def linked(
    nodes: Mapping[str, Node], source: TomlSource, *, compat: bool = False, takes: Sequence[str] = ()
) -> dict[str, Node]:
    """The nodes with all edges in `next`, including those that only `inputs` imply, and a producer in each input. The
    request has the fields `takes`.

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
        name: replace(node, inputs=tuple(resolved(node, given, nodes, source, compat, takes) for given in node.inputs))
        for name, node in nodes.items()
    }
    bodies = _bodies(found)
    for node in list(found.values()):
        for producer in dict.fromkeys(i.producer for i in node.inputs if i.producer != REQUEST):
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


def resolved(
    node: Node, given: NodeInput, nodes: Mapping[str, Node], source: TomlSource, compat: bool, takes: Sequence[str]
) -> NodeInput:
    """The input with the full name of its producer. TorchPipe takes the first by name of several."""
    if (whole := f"{given.producer}.{given.source}") in nodes:  # the name of an alias contains a dot
        return replace(given, producer=whole, source="result")
    if given.producer in nodes:
        return given
    known = (whole.removeprefix(f"{REQUEST}."), *((given.producer,) if given.source == RESULT else ()))
    if taken := next((name for name in known if name in takes), None):
        return replace(given, producer=REQUEST, source=taken)
    if given.producer:
        key = "outputs" if node.name == REQUEST else "inputs"
        hint = nearest(given.producer, [*nodes, *takes]) or f"; there are {', '.join(nodes)}"
        raise source.error(node.name, key, f"there is no node '{given.producer}'{hint}")
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
    roots = [name for name in roots if not starts_item(nodes[name])] or roots[:1]
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
    reached = _reached(graph, graph.entry)
    for node in graph.nodes.values():
        names = [each.name for each in node.inputs]
        if node.alias_of is not None and (
            node.alias_of not in graph.nodes or graph.nodes[node.alias_of].alias_of is not None
        ):
            raise source.error(node.name, "", f"is an alias of [{node.alias_of}], expected a node that is no alias")
        if node.inputs and DATA not in names and part_name(0) not in names:
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


def _reached(graph: Graph, start: str) -> set[str]:
    """The nodes that an item reaches which begins at a node, or at the entry and the nodes that begin with it."""
    starts = graph.starts if start == graph.entry else (start,)
    return {*starts}.union(*map(graph.downstream, starts))


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
            known = inner[body] | {REQUEST}
            for i in (i for name in inner[body] for i in graph.nodes[name].inputs if i.producer not in known):
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
    named = {i.producer for i in node.inputs} | {REQUEST}
    single = [choices[0] for choices in alternatives(node).values() if len({i.producer for i in choices}) == 1]
    required = [i.producer for i in single if i.default is UNSET and i.producer != REQUEST]
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
        reached = _reached(graph, start)
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
    gathered = {name for each in calls if each is not None for name in each.gather or (RESULT,)}
    own = {*graph.gives} - {i.name for i in graph.sources}  # they may be parts of the result, if they are declared
    return gathered or own | ({RESULT} if own and graph.results else set())


def _written(graph: Graph, names: Iterable[str]) -> set[str]:
    """The fields that these nodes are known to write."""
    steps = [step for name in names for step in graph.nodes[name].steps]
    return {RESULT, *(field for step in steps for field in op_class(step.op, step.params).writes or ())}


# ---- fields and their kinds

Kinds = dict[str, str]
"""Kinds by field, as in `ops.base.Op`. The field OPEN means that there may be more fields."""

OPEN = "..."

_BETWEEN = {
    ("bytes", "mat"): "DecodeMat converts one to the other",
    ("bytes", "tensor"): "S[DecodeMat,Mat2Tensor] converts one to the other",
    ("mat", "tensor"): "Mat2Tensor converts one to the other",
    ("tensor", "mat"): "Tensor2Mat converts one to the other",
}


def fields_of(graph: Graph, source: TomlSource | None = None) -> dict[str, Kinds]:
    """The fields of an item after each node. The graph must have no cycle and only known ops.

    Raises ConfigError: an input that no node gives, an op that takes another kind than the previous op gives, a
    fan-out over a field that does not exist, or whose body leaves a gathered field out.
    """
    left = _before_fan_outs(graph, source)
    return {name: _after(graph, graph.nodes[name], left) for name in left}


def _before_fan_outs(graph: Graph, source: TomlSource | None = None) -> dict[str, Kinds]:
    """As `fields_of`, but for a fan-out the fields before it splits an item."""
    source = source or TomlSource(graph.name)
    left: dict[str, Kinds] = {}
    skipped = {
        other
        for node in graph.nodes.values()
        if filters.may_skip_others(node.filter)
        for other in (*chain_of(graph, node.name), *subgraph_of(graph, node.name))
    }
    for name in graph.order():
        node = graph.nodes[name]
        try:
            left[name] = _through(node, _arriving(graph, node, left))
            if name in skipped:
                left[name][RESULT] = left[name][OPEN] = "any"
        except ConfigError as e:
            raise ConfigError(f"{source.name}: {e.message}") from None
        if node.each is not None and (problem := _split_problem(node.each, left[name])):
            raise source.error(name, "each", problem)
    for name in graph.order():
        if problem := _gather_problem(graph, graph.nodes[name], left):
            raise source.error(name, "gather", problem)
    return left


def _split_problem(each: Each, fields: Kinds) -> str:
    """Why no item can be split, or ""."""
    if each.split is None or (each.split not in fields and OPEN in fields):
        return ""
    if each.split not in fields:
        return f"there is no field '{each.split}'; there are {', '.join(fields)}"
    if fields[each.split] == "bytes":
        return f"the field '{each.split}' is bytes, expected a list or an array"
    return ""


def _gather_problem(graph: Graph, node: Node, left: Mapping[str, Kinds]) -> str:
    """The gathered field that no end of the body has, or ""."""
    if node.each is None:
        return ""
    ended = _ended(graph, node.each.body, left)
    missing = [] if OPEN in ended else [name for name in node.each.gather if name not in ended]
    if not missing:
        return ""
    where = f"the body, which begins at [{node.each.body}], leaves the field '{missing[0]}' out"
    return f"{where}; it gives {', '.join(ended)}"


def _ended(graph: Graph, body: str, left: Mapping[str, Kinds]) -> Kinds:
    """The fields of a child at the ends of its body. Those of a body that comes later are not known."""
    if not graph.bodies[body] <= left.keys():
        return dict.fromkeys((DATA, RESULT, OPEN), "any")
    ends = [_after(graph, graph.nodes[n], left) for n in graph.bodies[body] if not graph.nodes[n].next]
    found = {name: kind for fields in ends for name, kind in fields.items()}
    return found if len(ends) == 1 else dict.fromkeys(found, "any")


def _after(graph: Graph, node: Node, left: Mapping[str, Kinds]) -> Kinds:
    """The fields of an item after a node, and after its fan-out."""
    if node.each is None:
        return left[node.name]
    if node.each.split is None:
        return _ended(graph, node.each.body, left)
    return left[node.name] | dict.fromkeys(node.each.gather, "any")


def _split(node: Node, fields: Kinds) -> Kinds:
    """The fields of a child at the begin of its body."""
    split = node.each.split if node.each is not None else None
    return _swapped(fields) | ({} if split is None else {DATA if split == RESULT else split: "any"})


def _check_sources(graph: Graph, left: Mapping[str, Kinds], source: TomlSource) -> None:
    """Raises ConfigError for an output that is a field of a node which does not give it to the item."""
    for i in (i for i in graph.sources if i.producer != REQUEST):
        if any(i.producer in nodes for nodes in graph.bodies.values()):
            message = f"{i.name}: [{i.producer}] is in the body of a fan-out, whose node has the gathered fields"
            raise source.error(REQUEST, "outputs", message)
        if i.source not in left[i.producer] and OPEN not in left[i.producer]:
            message = f"{i.name}: [{i.producer}] has no field '{i.source}'; it has {', '.join(left[i.producer])}"
            raise source.error(REQUEST, "outputs", message)


def edges_of(graph: Graph) -> list[tuple[str, str, Kinds]]:
    """Producer, consumer, and the fields that the consumer takes, for each edge. Raises as `fields_of` does."""
    left = _before_fan_outs(graph)
    edges = []
    for node in (graph.nodes[name] for name in graph.order()):
        after = _after(graph, node, left)
        for target in node.next:
            taken = [i for i in graph.nodes[target].inputs if i.producer == node.name]
            fields = {i.name: after.get(i.source, "any") for i in taken}
            edges.append((node.name, target, fields if graph.nodes[target].inputs else _swapped(after)))
        if node.each is not None:
            edges.append((node.name, node.each.body, _split(node, left[node.name])))
    return edges


def _arriving(graph: Graph, node: Node, left: dict[str, Kinds]) -> Kinds:
    producers, callers = graph.producers(node.name), graph.callers(node.name)
    if not node.inputs and callers:
        begun = [_split(graph.nodes[caller], left[caller]) for caller in callers]
        return begun[0] if len(begun) == 1 else {name: "any" for fields in begun for name in fields}
    if not producers and not node.inputs:
        further = (OPEN,) if graph.compat else ()  # a pipe takes any fields
        return dict.fromkeys((*graph.begins_with, DATA, *further), "any")
    if not node.inputs:
        before = _after(graph, graph.nodes[producers[0]], left)
        # without a swap, the kind of the data depends on the op that gave no result
        return _swapped(before) if node.filter == "swap" else {**before, DATA: "any"}
    arriving: Kinds = {}
    for each in node.inputs:
        if each.producer == REQUEST:
            arriving[each.name] = "any"
            continue
        source = graph.nodes[each.producer]
        splits = source.each is not None and node.name in reached_by(graph.nodes, source.each.body)
        given = _split(source, left[source.name]) if splits else _after(graph, source, left)
        known = arriving.get(each.name)
        if each.source not in given and OPEN not in given:
            raise ConfigError(
                f"[{node.name}] inputs: [{each.producer}] has no field '{each.source}' for '{each.name}'; it has"
                f" {', '.join(given)} (list further fields that callers send as inputs in [pipeline])"
            )
        kind = given.get(each.source, "any")
        arriving[each.name] = kind if known in (None, kind) and each.default is UNSET else "any"
    return arriving if part_name(0) not in arriving else {DATA: "any"}


def _swapped(fields: Kinds) -> Kinds:
    """The fields with the result of one node as the data of the next."""
    return {name: kind for name, kind in fields.items() if name != RESULT} | {DATA: fields[RESULT]}


def _through(node: Node, fields: Kinds) -> Kinds:
    left = {name: kind for name, kind in fields.items() if name != RESULT}
    left.setdefault(DATA, "any")
    given = ""
    for step in node.steps:
        guarded = step.filter not in ("run", "swap", "then")
        if guarded or (given and step.filter == "run"):
            left[DATA] = "any"
        elif given:
            left[DATA] = given
        if filters.is_known(step.filter):
            left[OPEN] = "any"  # a filter may write fields
        given = _step(node, step, left, given if guarded else "")
    given = given or left[DATA]
    skipped = fields[DATA] if DATA in fields and "skip" in (node.on_error, node.when and node.otherwise) else given
    left[RESULT] = given if fields.get(RESULT, given) == given == skipped else "any"
    if filters.is_known(node.filter):
        left[RESULT] = left[OPEN] = "any"
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
