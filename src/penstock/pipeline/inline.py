"""Which nodes run in the call of the node before them: what prepares an image on the CPU."""

from __future__ import annotations

from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp, Op
from penstock.pipeline.runtimes import cores

_HOMES = tuple(f"penstock.pipeline.ops.{name}" for name in ("bridge", "color", "crop", "decode", "resize", "tensor"))
"""Where ops are that do nothing but compute on one image: none waits, none is a user's."""


def chain(graph: Graph, name: str) -> tuple[str, ...]:
    """The nodes that the instances of a node run as well, in their order."""
    found = [name]
    while (after := _inlined(graph, found[-1])) is not None and after not in found:
        found.append(after)
    return tuple(found[1:])


def _inlined(graph: Graph, name: str) -> str | None:
    """The node behind `name` that its instances run as well, in the same call; None if it is to have its own.

    A hand-over to another thread costs as much as a small image's resizing. It is saved where it gains nothing: both
    nodes only compute, the first has an instance for each core, and nothing between them waits, merges or is kept.
    """
    node = graph.nodes[name]
    if len(node.next) != 1 or node.instances < cores() or not _computes(node):
        return None
    after = graph.nodes[node.next[0]]
    plain = Node(
        after.name, after.steps, after.next, instances=after.instances, max_batch=after.max_batch,
        min_batch=after.min_batch, wait_s=after.wait_s, run_timeout_s=node.run_timeout_s,
        retry_split=after.retry_split, idempotent=after.idempotent,
    )  # fmt: skip
    kept = any(i.producer == name for n in graph.nodes.values() for i in n.inputs)
    if after != plain or kept or node.on_error != "fail" or graph.producers(after.name) != (name,):
        return None
    return after.name if _computes(after) else None


def _computes(node: Node) -> bool:
    return node.device == "cpu" and all(computes(catalog.find(step.op)) for step in node.steps)


def computes(op: type[Op]) -> bool:
    """Whether an op does nothing but compute on one image, on the CPU."""
    return issubclass(op, ItemOp) and op.__module__ in _HOMES
