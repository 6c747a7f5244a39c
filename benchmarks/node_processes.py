"""What does a pipeline node gain, and lose, in worker processes?

A node whose op is 10 ms of pure Python, in as many threads and in as many processes as there are cores, with 16 items
in flight. And the hand-over: a node in one process or one thread makes an array of 150 KB, or a small one in the same
time, and the next node takes it, as a thread or as another process. The difference is what the array costs.
"""

import os
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import harness

from penstock.pipeline.load import parse_graph
from penstock.pipeline.local import LocalPipeline

OPS = """
import numpy as np

kept = np.zeros((224, 224, 3), np.uint8)
small = kept[:1, :1].copy()


def spin(data):
    total = 0
    for i in range(data):
        total += i
    return total


def large(data):
    return kept


def little(data):
    return small


def take(data):
    return int(data[0, 0, 0])
"""
IN_FLIGHT = 16
SPIN_S = 0.01
COLUMNS = {"per_s": "items/s", "us": "us an item"}


def rounds_of_spin() -> int:
    """Rounds of `spin` that take 10 ms alone."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        total = 0
        for i in range(100_000):
            total += i
        took.append(time.perf_counter() - began)
    return int(100_000 * SPIN_S / min(took))


def run(pipeline: LocalPipeline, data: Any, seconds: float) -> dict[str, float]:
    """The rate with some items in flight."""
    flying = deque(pipeline.submit({"data": data}) for _ in range(IN_FLIGHT))
    ended, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        flying.popleft().result()
        flying.append(pipeline.submit({"data": data}))
        ended += 1
    took = time.perf_counter() - began
    for future in flying:
        future.result()
    return {"per_s": ended / took, "us": took / ended * 1e6}


def main() -> None:
    options = harness.options(__doc__, seconds=1)
    method = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind."
    report = harness.Report(__file__, __doc__, options, COLUMNS, ("numpy",), method)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, "ops.py").write_text(OPS)

        def running(**nodes: dict[str, Any]) -> LocalPipeline:
            tables = {n: {"backend": f"Python[ops.py:{n}]", **keys} for n, keys in nodes.items()}
            return stack.enter_context(LocalPipeline(parse_graph(tables, name="b", folder=folder)))

        spin = rounds_of_spin()
        runs = harness.interleave(
            options.rounds,
            {
                "threads": partial(run, running(spin={"instances": cores}), spin, options.seconds),
                "processes": partial(run, running(spin={"processes": cores}), spin, options.seconds),
            },
        )
        report.add({"op": "10 ms of Python", "copies": cores}, runs, "processes")
        report.target("10 ms of Python: processes / threads", report.ratios(runs, "processes", "threads"), least=1.9)
        for name, first, then in (
            ("thread -> thread", {"instances": 1}, {"instances": 1}),
            ("process -> thread", {"processes": 1}, {"instances": 1}),
            ("process -> process", {"processes": 1}, {"processes": 1}),
        ):
            contenders = {
                size: partial(run, running(**{size: {**first, "next": "take"}}, take=then), 0, options.seconds)
                for size in ("little", "large")
            }
            runs = harness.interleave(options.rounds, contenders)
            report.add({"op": name, "copies": 1}, runs, "large")
            more = [a["us"] - b["us"] for a, b in zip(runs["large"], runs["little"], strict=True)]
            report.target(f"{name}: us an item that 150 KB add", more, most=60)
    report.save()


if __name__ == "__main__":
    main()
