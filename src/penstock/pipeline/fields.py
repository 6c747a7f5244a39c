"""What travels over each edge of a graph: names of fields with their kinds, as the ops declare them."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.pipeline.graph import Graph, Node, Step
from penstock.pipeline.lower import op_class
from penstock.pipeline.ops.base import DATA, RESULT

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
