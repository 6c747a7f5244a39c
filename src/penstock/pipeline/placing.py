"""Where nodes run that leave it open: on a GPU, if this machine has one that the model's runtime can use."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from penstock.errors import LoadFailed
from penstock.models.onnx import CUDA, TENSORRT, import_onnxruntime
from penstock.models.torch import import_torch
from penstock.pipeline.graph import Graph, Node
from penstock.worker.devices import visible_gpus

log = logging.getLogger("penstock.pipeline")

AUTO = "auto"


def placed(graph: Graph) -> Graph:
    """The graph with a device of this machine for each node that is to run on any."""
    nodes = {name: replace(n, device=_device(n)) if n.device == AUTO else n for name, n in graph.nodes.items()}
    return replace(graph, nodes=nodes)


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
