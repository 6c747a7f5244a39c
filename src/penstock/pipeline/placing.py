"""Where nodes run, and how many of each at once, on this machine: what a graph leaves open, or cannot know."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from penstock.core.worker.devices import visible_gpus
from penstock.errors import LoadFailed
from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.inline import computes
from penstock.pipeline.model_op import ModelOp
from penstock.pipeline.ops import catalog
from penstock.pipeline.runtimes import cores
from penstock.runtimes.onnx import CUDA, TENSORRT, import_onnxruntime
from penstock.runtimes.torch import import_torch

log = logging.getLogger("penstock.pipeline")

AUTO = "auto"


def placed(graph: Graph) -> Graph:
    """The graph with a device of this machine for each node that is to run on any, and no more instances of a node than
    can run: those that only compute, on the CPU, have a core each at most."""
    nodes = {name: replace(n, device=_device(n)) if n.device == AUTO else n for name, n in graph.nodes.items()}
    return replace(graph, nodes={name: _at_once(n) for name, n in nodes.items()})


def _at_once(node: Node) -> Node:
    """More threads than cores would only take turns: seen on 2 cores, 8 and 4 of them gave 690 images a second where
    2 and 2 gave 820."""
    most = cores()
    if node.device != "cpu" or node.instances <= most:
        return node
    ops = [catalog.find(step.op) for step in node.steps]
    if not all(computes(op) or issubclass(op, ModelOp) for op in ops):
        return node
    log.info("node=%s instances=%d of=%d hint=the CPU has no more cores", node.name, most, node.instances)
    return replace(node, instances=most)


def _device(node: Node) -> str:
    params = next((step.params for step in node.steps if "model" in step.params), {})
    if params.get("runtime") in ("cpu", "openvino") or not visible_gpus():
        return "cpu"
    try:
        if not str(params.get("model")).lower().endswith(".onnx"):
            usable, needed = import_torch().cuda.is_available(), "a PyTorch for CUDA"
        else:
            known = import_onnxruntime().get_available_providers()
            usable, needed = bool({CUDA, TENSORRT} & set(known)), "onnxruntime-gpu"
    except LoadFailed:  # the node will say so
        return "cpu"
    if not usable:
        log.warning("node=%s device=cpu hint=the GPU is used where %s is installed", node.name, needed)
    return "cuda:0" if usable else "cpu"
