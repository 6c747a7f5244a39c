"""What does a child of a fan-out cost, and what does an item with 20,000 children do to memory and to other clients?

First, calls of 1,000 rows through a node that only passes batches on: as 1,000 items, and as one item with 1,000
children, us a row. Second, the memory above the payload while one item has 20,000 children of 4 KiB. Third, decode -
detect - each of 3 boxes - recognise, which sleep as long as such nodes compute (3, 8, and 4 ms plus 0.02 ms per row
for up to 32): one client alone, beside a client whose items have 20,000 boxes, and one that needs no recogniser.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import harness
import numpy as np
from pipeline_overhead import MIB, Nap, resident

from penstock.pipeline.graph import Each, Graph, Node, NodeStep
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp

ROWS = 1_000
CHILDREN, CHILD_BYTES = 20_000, 4096


class Pass(BatchOp):
    """Returns its batch."""

    def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> Sequence[Any]:
        return data


class Recognise(BatchOp):
    """Sleeps as long as a model computes."""

    def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> Sequence[Any]:
        time.sleep(0.004 + 0.00002 * len(data))
        return data


class Boxes(ItemOp):
    """As many boxes as the data says, after a nap."""

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        time.sleep(0.008)
        return list(range(data))


for op in (Nap, Pass, Recognise, Boxes):
    catalog.register(op.__name__, op)


def graph(first: Sequence[Node], body: str) -> Graph:
    nodes = [*first, Node("read", (NodeStep(body),), max_batch=32)]
    return Graph("measured", {node.name: node for node in nodes}, first[0].name)


def per_row(items: bool, seconds: float) -> harness.Sample:
    """Processor and wall time of a row that is an item, or a child."""
    split = Node("split", (NodeStep("Identity"),), each=Each("read", "data", ("result",)))
    with LocalPipeline(graph([split], "Pass")) as pipeline:
        rows = list(range(ROWS))
        many = [({"data": row}, "read") for row in rows]
        calls, wall, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < wall + seconds:
            if items:
                assert pipeline.infer_many(many)[-1].fields["result"] == ROWS - 1
            else:
                assert pipeline.infer({"data": rows}).fields["result"] == rows
            calls += 1
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"us": 1e6 * wall / calls / ROWS, "cpu_us": 1e6 * cpu / calls / ROWS}


def memory(seconds: float) -> harness.Sample:
    """The most memory above the payload and its results. The time is not used."""
    split = Node("split", (NodeStep("Identity"),), each=Each("read", "data", ("result",)))
    with LocalPipeline(graph([split], "Pass")) as pipeline:
        payload = [np.full(CHILD_BYTES, i % 256, np.uint8) for i in range(CHILDREN)]
        pipeline.infer({"data": payload[:100]})
        before, most = resident(), 0.0
        over = threading.Event()
        pipeline.start({"data": payload}, lambda outcome: over.set())
        while not over.wait(0.002):
            most = max(most, resident() - before)
    return {"mib": most, "payload_mib": CHILDREN * CHILD_BYTES / MIB}


def client(boxes: int, other: bool, seconds: float) -> harness.Sample:
    """Latencies of a client with few boxes; with `other`, beside one with many."""
    read = Each("read", "result", ("result",))
    first = [
        Node("decode", (NodeStep("Nap", {"seconds": 0.003}),), ("detect",), instances=2),
        Node("detect", (NodeStep("Boxes"),), ("split",), instances=2),
        Node("split", (NodeStep("Identity"),), each=read),
    ]
    with LocalPipeline(graph(first, "Recognise")) as pipeline:
        for _ in range(5):
            pipeline.infer({"data": boxes})
        over = threading.Event()

        def flood() -> None:
            while not over.is_set():
                done = threading.Event()
                items = pipeline.start({"data": CHILDREN}, lambda outcome, done=done: done.set())
                while not done.wait(0.01):
                    if over.is_set():
                        items.cancel()
                        return

        flooding = threading.Thread(target=flood)
        if other:
            flooding.start()
            time.sleep(0.1)
        latencies: list[float] = []
        end = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < end:
            assert pipeline.infer({"data": boxes}).error is None
            latencies.append(time.perf_counter() - begun)
        over.set()
        if other:
            flooding.join()
    return harness.percentiles(latencies)


def main() -> None:
    options = harness.options(__doc__, seconds=2)
    columns = {"us": "us a row", "cpu_us": "processor us a row", "mib": "MiB above the payload", "payload_mib": "MiB"}
    columns |= {"p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    s = options.seconds
    calls = {
        "items": lambda: per_row(True, s),
        "children": lambda: per_row(False, s),
        "20,000 children": lambda: memory(s),
        "3 boxes alone": lambda: client(3, False, s),
        "3 boxes beside 20,000": lambda: client(3, True, s),
        "no box alone": lambda: client(0, False, s),
        "no box beside 20,000": lambda: client(0, True, s),
    }
    runs = harness.interleave(options.rounds, calls)
    report.add({"pipeline": "fan-out"}, runs)
    pairs = zip(runs["children"], runs["items"], strict=True)
    report.target("a child above an item, us", [child["us"] - item["us"] for child, item in pairs], most=25)
    report.target("20,000 children: MiB above the payload", [x["mib"] for x in runs["20,000 children"]], most=64)
    for who in ("3 boxes", "no box"):
        ratios = report.ratios(runs, f"{who} beside 20,000", f"{who} alone", "p99_ms")
        report.target(f"{who}, beside 20,000 / alone, p99", ratios, most=1.3)
    report.save()


if __name__ == "__main__":
    main()
