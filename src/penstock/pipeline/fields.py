"""Fields of the items of a graph, and their kinds, before it runs. Pure."""

from collections.abc import Mapping

from msgspec import UNSET

from penstock.errors import ConfigError
from penstock.pipeline import filters
from penstock.pipeline.graph import Each, Graph, Node, NodeStep, chain_of, reached_by, subgraph_of
from penstock.pipeline.keys import TomlSource
from penstock.pipeline.lower import op_class
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
        return dict.fromkeys((*graph.takes, OPEN) if graph.compat else graph.takes, "any")  # a pipe takes any fields
    if not node.inputs:
        before = _after(graph, graph.nodes[producers[0]], left)
        # without a swap, the kind of the data depends on the op that gave no result
        return _swapped(before) if node.filter == "swap" else {**before, DATA: "any"}
    arriving: Kinds = {}
    for each in node.inputs:
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
    return arriving


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
