"""What does a pipeline itself cost, does a wait for full batches delay few clients, and does its memory stay flat?

First, three empty nodes with 64 items in flight, through callbacks, through calling threads, and in calls of 1,000
items: items/s and CPU time of the process for each. Second, two to four nodes that leave the interpreter for 0.6 ms, as
long as a JPEG takes: the CPU time is then that of the interpreter and of hand-overs. Third, decode - prepare - model,
which sleep as long as such nodes compute, with 2 clients and batches of up to 4: waits of 0 and 10 ms. Fourth, images
of 100 kB, produced by the first of three nodes as fast as it may, before a last node that takes 5 ms: the peak memory
above the start.
"""

import argparse
import asyncio
import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np

from penstock.pipeline.graph import Graph, Node, NodeStep
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import BatchOp, ItemOp

IN_FLIGHT = 64
IMAGE_BYTES = 100_000
FLOOD = 2_000
WORK_S = 0.0006
MIB = 2**20


class Nap(ItemOp):
    """Sleeps as long as an item takes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        time.sleep(self._seconds)
        return data


class BatchNap(BatchOp):
    """Sleeps as long as a model computes: 4 ms plus 0.5 ms per row."""

    def __call__(self, data: list[Any], fields: list[dict[str, Any]]) -> Sequence[Any]:
        time.sleep(0.004 + 0.0005 * len(data))
        return data


class Image(ItemOp):
    """Produces an image."""

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        return np.full(IMAGE_BYTES, data % 256, np.uint8)


for op in (Nap, BatchNap, Image):
    catalog.register(op.__name__, op)


def chain(*nodes: tuple[NodeStep, dict[str, Any]]) -> Graph:
    names = [f"n{i}" for i in range(len(nodes))]
    made = {
        name: Node(name, (step,), next=tuple(names[i + 1 : i + 2]), **keys)
        for i, (name, (step, keys)) in enumerate(zip(names, nodes, strict=True))
    }
    return Graph("measured", made, names[0])


EMPTY = chain(*[(NodeStep("Identity"), {})] * 3)


# ---- what an empty one costs


def by_callbacks(pipeline: LocalPipeline, seconds: float) -> list[float]:
    """Latencies of items that each start the next one when they end."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    over = threading.Semaphore(0)

    def begin() -> None:
        start = time.perf_counter()

        def done(outcome: Any) -> None:
            now = time.perf_counter()
            latencies.append(now - start)
            if now < end:
                begin()
            else:
                over.release()

        pipeline.start({"data": 1}, done)

    for _ in range(IN_FLIGHT):
        begin()
    for _ in range(IN_FLIGHT):
        over.acquire()
    return latencies


def by_threads(pipeline: LocalPipeline, seconds: float, clients: int = IN_FLIGHT) -> list[float]:
    """Latencies of a number of threads that call one after the other."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    def loop() -> None:
        last = time.perf_counter()
        while last < end:
            assert pipeline.infer({"data": 1}).error is None
            now = time.perf_counter()
            latencies.append(now - last)
            last = now

    crew = [threading.Thread(target=loop) for _ in range(clients)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return latencies


def by_coroutines(pipeline: LocalPipeline, seconds: float, clients: int = IN_FLIGHT) -> list[float]:
    """Latencies of a number of coroutines that call one after the other."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def loop() -> None:
        last = time.perf_counter()
        while last < end:
            assert (await pipeline.submit({"data": 1})).error is None
            now = time.perf_counter()
            latencies.append(now - last)
            last = now

    async def all_loops() -> None:
        await asyncio.gather(*(loop() for _ in range(clients)))

    asyncio.run(all_loops())
    return latencies


def by_lists(pipeline: LocalPipeline, seconds: float) -> list[float]:
    """For each item the latency of its call."""
    latencies: list[float] = []
    end = last = time.perf_counter()
    end += seconds
    while last < end:
        pipeline.infer_many([{"data": i} for i in range(1000)])
        now = time.perf_counter()
        latencies += [now - last] * 1000
        last = now
    return latencies


def measured(graph: Graph, load: Callable[[LocalPipeline, float], list[float]], seconds: float) -> harness.Sample:
    with LocalPipeline(graph) as pipeline:
        load(pipeline, 0.3)
        wall, cpu = time.perf_counter(), time.process_time()
        latencies = load(pipeline, seconds)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    n = len(latencies)
    mean_ms = 1e3 * sum(latencies) / n
    return {"rate": n / wall, "cpu_us": cpu / n * 1e6, "mean_ms": mean_ms, **harness.percentiles(latencies)}


# ---- what nodes that work cost


def working(nodes: int) -> Graph:
    return chain(*[(NodeStep("Nap", {"seconds": WORK_S}), {"instances": 2})] * nodes)


def interpreter_time(options: argparse.Namespace, report: harness.Report) -> None:
    """The tables of nodes that work, and their target."""
    for nodes in (2, 3, 4):
        for clients in (10, 32):
            calls = {"threads": by_threads, "coroutines": by_coroutines}
            runs = harness.interleave(
                options.rounds,
                {
                    name: functools.partial(
                        measured, working(nodes), functools.partial(call, clients=clients), options.seconds
                    )
                    for name, call in calls.items()
                },
            )
            report.add({"pipeline": f"{nodes} nodes that work, {clients} clients"}, runs, base="threads")
            if (nodes, clients) == (3, 10):
                for name, samples in runs.items():
                    report.target(f"3 nodes, 10 {name}: processor us an item", [x["cpu_us"] for x in samples], most=200)


# ---- few clients and a wait


def decode_and_run(wait_s: float) -> Graph:
    decode, prepare = NodeStep("Nap", {"seconds": 0.003}), NodeStep("Nap", {"seconds": 0.001})
    last = {"max_batch": 4, "wait_s": wait_s}
    return chain((decode, {"instances": 2}), (prepare, {"instances": 2}), (NodeStep("BatchNap"), last))


# ---- a slow last node


def flood(seconds: float) -> harness.Sample:
    """The peak memory above the start. The time is not used: a second more or less changes nothing."""
    graph = chain(
        (NodeStep("Image"), {}), (NodeStep("Identity"), {}), (NodeStep("Nap", {"seconds": 0.005}), {"max_batch": 1})
    )
    with LocalPipeline(graph) as pipeline:
        pipeline.infer_many([{"data": i} for i in range(50)])
        before, most = resident(), 0.0
        over = threading.Event()
        left = threading.Semaphore(0)
        for i in range(FLOOD):
            pipeline.start({"data": i}, lambda outcome: left.release())
        while not over.is_set():
            most = max(most, resident() - before)
            if left.acquire(timeout=0.02):
                for _ in range(FLOOD - 1):
                    left.acquire()
                    most = max(most, resident() - before)
                over.set()
    return {"mib": most}


def resident() -> float:
    """MiB of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


def main() -> None:
    options = harness.options(__doc__, seconds=2)
    columns = {"rate": "items/s", "cpu_us": "processor us an item", "mean_ms": "mean ms", "p50_ms": "p50 ms"}
    columns |= {"p99_ms": "p99 ms", "mib": "MiB more than before"}
    report = harness.Report(__file__, __doc__, options, columns)
    s = options.seconds
    loads = {"callbacks": by_callbacks, "lists of 1,000": by_lists, "64 threads": by_threads}
    runs = harness.interleave(
        options.rounds, {name: lambda load=load: measured(EMPTY, load, s) for name, load in loads.items()}
    )
    report.add({"pipeline": "three empty nodes"}, runs, base="callbacks")
    report.target("callbacks: processor us an item", [x["cpu_us"] for x in runs["callbacks"]], most=60)
    report.target("callbacks: items/s", [x["rate"] for x in runs["callbacks"]], least=15_000)

    interpreter_time(options, report)

    def two(pipeline: LocalPipeline, seconds: float) -> list[float]:
        return by_threads(pipeline, seconds, clients=2)

    waits = {"wait 0": 0.0, "wait 10 ms": 0.010}
    runs = harness.interleave(
        options.rounds, {name: lambda w=wait: measured(decode_and_run(w), two, s) for name, wait in waits.items()}
    )
    report.add({"pipeline": "decode - prepare - model, 2 clients"}, runs, base="wait 0")
    more = [b["mean_ms"] - a["mean_ms"] for a, b in zip(runs["wait 0"], runs["wait 10 ms"], strict=True)]
    report.target("2 clients: mean ms more with the wait", more, most=1.0)

    runs = harness.interleave(options.rounds, {"slow last node": lambda: flood(s)})
    report.add({"pipeline": "a slow last node"}, runs, base="slow last node")
    held = 3 * (2 * 32 + 32) * IMAGE_BYTES / MIB  # what three nodes and their queues may hold, were they all full
    report.target("slow last node: MiB", [x["mib"] for x in runs["slow last node"]], most=held)
    report.save()


if __name__ == "__main__":
    main()
