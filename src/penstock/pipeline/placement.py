"""Placement of nodes on this machine: their devices, how many instances run, and which share one thread hand-over."""

import logging

from msgspec.structs import replace

from penstock.core.worker.devices import visible_gpus
from penstock.errors import LoadFailed
from penstock.pipeline.graph import AUTO, Graph, Node
from penstock.pipeline.lower import files_of
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import ItemOp, Op
from penstock.pipeline.runtimes import cores
from penstock.runtimes.onnx import CUDA, TENSORRT, import_onnxruntime
from penstock.runtimes.torch import import_torch

log = logging.getLogger("penstock.pipeline")

_COMPUTING = tuple(f"penstock.pipeline.ops.{name}" for name in ("crop", "decode", "mat", "resize", "tensor"))
"""Modules of built-in ops that only compute on one image and never wait."""


def placed(graph: Graph) -> Graph:
    """The graph with a device of this machine for each "auto" node, and no more instances than can run at once."""
    nodes = {name: replace(n, device=_device(n)) if n.device == AUTO else n for name, n in graph.nodes.items()}
    return replace(graph, nodes={name: _limited(n) for name, n in nodes.items()})


def _limited(node: Node) -> Node:
    """The node with at most one instance per core if it only computes on the CPU.

    More threads only take turns: on 2 cores, 8 and 4 instances gave 690 images a second, 2 and 2 gave 820.
    """
    most = cores()
    if node.device != "cpu" or node.instances <= most:
        return node
    ops = [catalog.find(step.op) for step in node.steps]
    if not all(computes(op) or op.model_file for op in ops):
        return node
    log.info("node=%s instances=%d of=%d hint=the CPU has no more cores", node.name, most, node.instances)
    return replace(node, instances=most)


def _device(node: Node) -> str:
    params = next((step.params for step in node.steps if "model" in step.params), {})
    if params.get("runtime") in ("cpu", "openvino") or not visible_gpus():
        return "cpu"
    try:
        if not all(file.lower().endswith(".onnx") for file in files_of(params)):
            usable, needed = import_torch().cuda.is_available(), "a PyTorch for CUDA"
        else:
            known = import_onnxruntime().get_available_providers()
            usable, needed = bool({CUDA, TENSORRT} & set(known)), "onnxruntime-gpu"
    except LoadFailed:  # loading the node reports it
        return "cpu"
    if not usable:
        log.warning("node=%s device=cpu hint=install %s to use the GPU", node.name, needed)
    return "cuda:0" if usable else "cpu"


def chain(graph: Graph, name: str) -> tuple[str, ...]:
    """The nodes that the instances of a node also run, in order: none if aliases share them."""
    if any(name in (node.name, node.alias_of) for node in graph.nodes.values() if node.alias_of is not None):
        return ()
    found = [name]
    while (after := _inlined(graph, found[-1])) is not None and after not in found:
        found.append(after)
    return tuple(found[1:])


def _inlined(graph: Graph, name: str) -> str | None:
    """The next node if the instances of `name` run it in the same call; None if it needs its own.

    A hand-over to another thread costs as much as resizing a small image. It gains nothing if both nodes only compute,
    the first has an instance for each core, and nothing between them waits, merges or is kept.
    """
    node = graph.nodes[name]
    if len(node.next) != 1 or node.each is not None or node.instances < cores() or not _node_computes(node):
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
    return after.name if _node_computes(after) else None


def _node_computes(node: Node) -> bool:
    return node.device == "cpu" and all(computes(catalog.find(step.op)) for step in node.steps)


def computes(op: type[Op]) -> bool:
    """Whether an op only computes on one image, on the CPU."""
    return issubclass(op, ItemOp) and op.__module__ in _COMPUTING
