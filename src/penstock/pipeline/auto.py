"""Threads or processes for nodes with `processes = "auto"`: measured with a warm-up item on the machine that runs them.

A thread that only counts runs beside the node's ops. It always wants the interpreter, so what it counts less than
beside native code is the time in which the ops hold the interpreter: all of it for Python code, little of it for
OpenCV's. On a machine without a free core the two look alike, and processes would gain nothing either. They pay for
themselves where the ops hold the interpreter for most of their time, and longer than a hand-over takes. They also do
before a GPU node, whose launches wait for the interpreter too, if there are cores for them.
"""

import hashlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from penstock.pipeline.graph import AUTO, REQUEST, Graph, Join, Node, reached_by
from penstock.pipeline.handover import Visit
from penstock.pipeline.lower import op_class
from penstock.pipeline.node import NodeModel, SharedState
from penstock.pipeline.ops.base import DATA, RESULT, Fields
from penstock.pipeline.runtimes import cores
from penstock.types import DTYPES

# choices
SHARE = 0.5  # of the time of an item, from which on processes are worth their memory
LEAST_S = 0.0005  # that an item holds the interpreter: a hand-over to a process takes about 0.2 ms
ROUNDS, ROUND_S = 3, 0.02
SWITCH_S = 0.0001  # so that ops which only call native code seldom wait for the counting thread
IMAGE = (375, 500, 3)  # of a warm-up item
_BYTES = bytes(2**21)  # whose digest takes about 2 ms of native code


class Choice(Struct, frozen=True):
    """The number of processes of a node, 0 for threads, and the reason."""

    processes: int
    why: str


def chosen(graph: Graph) -> dict[str, Choice]:
    """The choice for each node with `processes = "auto"` of a graph whose devices are known."""
    nodes = [graph.nodes[name] for name in graph.order()]
    asked = [node for node in nodes if node.processes == AUTO and node.alias_of is None]
    needed = {node.name for node in asked}.union(*(graph.upstream(node.name) for node in asked))
    item = _item(graph)
    kept: dict[str, Fields] = {} if item is None else {REQUEST: item}
    found: dict[str, Choice] = {}
    for node in (node for node in nodes if node.name in needed):
        held = _run(graph, node, kept, measures=node in asked)
        if node in asked:
            found[node.name] = _choice(graph, node, held)
    return found


def _choice(graph: Graph, node: Node, held: tuple[float, float] | None) -> Choice:
    on_gpu = [n for n in graph.order() if n in reached_by(graph.nodes, node.name) and graph.nodes[n].device != "cpu"]
    most = cores()
    if node.device != "cpu":
        return Choice(0, f"it runs on {node.device}")
    if on_gpu and most > 2:
        return Choice(node.instances if node.instances > 1 else most - 1, f"[{on_gpu[0]}] after it launches on a GPU")
    if held is None:
        return Choice(0, "no warm-up item reaches it, so it was not measured")
    item_s, held_s = held
    text = f"an item takes {item_s * 1000:.2f} ms and holds the interpreter for {held_s * 1000:.2f} ms of it"
    if held_s < LEAST_S or held_s < SHARE * item_s:
        return Choice(0, text)
    return Choice(node.instances if node.instances > 1 else most, text)


def _item(graph: Graph) -> Fields | None:
    """A warm-up item: zeros in declared tensors, or an image; None if nothing is known."""
    if graph.tensors:
        arrays = [np.zeros([max(n, 1) for n in t.shape], DTYPES[t.datatype]) for t in graph.tensors]
        return graph.begun({t.name: array for t, array in zip(graph.tensors, arrays, strict=True)})
    first = graph.nodes[graph.entry].steps[0]
    takes = op_class(first.op, first.params).takes
    if takes not in ("bytes", "mat"):
        return None
    image = np.random.default_rng(0).integers(0, 256, IMAGE, np.uint8)
    if takes == "mat":
        return {DATA: image}
    import cv2  # as the ops that take bytes do

    return {DATA: cv2.imencode(".jpg", cv2.blur(image, (9, 9)))[1].tobytes()}


def _run(graph: Graph, node: Node, kept: dict[str, Fields], *, measures: bool) -> tuple[float, float] | None:
    """Takes the warm-up item through a node, and keeps its fields. (seconds of an item, of which it holds the
    interpreter) if it is measured; None if the item does not get through."""
    try:
        fields = _arriving(graph, node, kept)
        if fields is None or node.device != "cpu":
            return None
        model = NodeModel(replace(node, processes=0), SharedState(graph.compat))
        model.load("cpu")
        try:
            visit = Visit(fields, swap=not node.inputs and RESULT in fields)
            (found,) = model.predict([visit])
            if not isinstance(found, tuple):
                return None
            kept[node.name] = found[0]
            return measure(lambda: model.predict([visit])) if measures else None
        finally:
            model.unload()
    except Exception:  # loading or running the node reports it
        return None


def _arriving(graph: Graph, node: Node, kept: dict[str, Fields]) -> Fields | None:
    if node.inputs:
        return Join(graph, node).fields(kept)
    for caller in graph.callers(node.name):
        each = graph.nodes[caller].each
        if each is not None and caller in kept:
            given = {**kept[caller]}
            given[DATA] = given.pop(RESULT)
            name = DATA if each.split in (None, RESULT) else each.split
            return given if each.split is None else given | {name: given[name][0]}
    return kept.get(next(iter(graph.producers(node.name)), REQUEST))


def measure(run: Callable[[], Any]) -> tuple[float, float]:
    """(seconds of a run alone, seconds of it that hold the interpreter); medians of a few rounds."""
    began_s, runs = time.perf_counter(), 0
    while not runs or time.perf_counter() - began_s < ROUND_S:
        run()
        runs += 1
    alone_s = (time.perf_counter() - began_s) / runs
    counts, stopped = [0], threading.Event()

    def count() -> None:
        while not stopped.is_set():
            for _ in range(100):
                counts[0] += 1

    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    counting = threading.Thread(target=count, name="penstock-count", daemon=True)
    counting.start()
    try:
        held = [_held_s(run, runs, counts) for _ in range(ROUNDS)]
    finally:
        stopped.set()
        counting.join()
        sys.setswitchinterval(usual)
    return alone_s, min(alone_s, max(0.0, statistics.median(held)))


def _held_s(run: Callable[[], Any], runs: int, counts: list[int]) -> float:
    """Seconds of a run in which the counting thread counts less than beside native code."""
    native_s, native = _counted(lambda: hashlib.sha256(_BYTES), 1 + int(ROUND_S / 0.002), counts)
    beside_s, beside = _counted(run, runs, counts)
    return (beside_s - beside * native_s / max(1, native)) / runs


def _counted(run: Callable[[], Any], runs: int, counts: list[int]) -> tuple[float, int]:
    began_s, before = time.perf_counter(), counts[0]
    for _ in range(runs):
        run()
    return time.perf_counter() - began_s, counts[0] - before
