"""How busy do the three phases of a batch keep a device?

The device is simulated: a copy takes 1 ms in each direction, the kernels 2 ms + 0.05 ms a row, and a launch costs its
thread 0.1 ms. A batch has 64 rows at most. The ceiling is the kernels alone, one full batch after the other.

In a loop, "step by step" calls the program as a server with one thread per model does, and "three phases" stages,
launches and fetches in three threads. In a program, 64 tasks ask an `Engine` for 8 rows each, or 64 threads a `Portal`;
the model is in a thread or a process. On a server, 256 connections ask for one row each, by `wrk`. A lone request has
one row.
"""

import functools
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import uvloop
from device_models import COPY_S, LAUNCH_S, MOST_ROWS, WIDTH, doubling, kernels_s, simulated
from inprocess import WARM_S, crowd, crowd_of_threads

import penstock
from penstock.config.schema import BatchingConfig, ModelConfig

CEILING = MOST_ROWS / kernels_s(MOST_ROWS)  # rows/s
LEAST = 0.97  # of the ceiling
LONE_MS = (2 * COPY_S + LAUNCH_S + kernels_s(1)) * 1e3
MORE_MS = 0.35
CALLERS, ROWS = 64, 8
CONNECTIONS = 256
FILE = "device_models.py"
ROW = np.arange(WIDTH, dtype=np.float32)
WORKLOAD = harness.Workload(
    "device", json.dumps(ROW.tolist()).encode(), (2 * ROW).tolist(), max_batch=MOST_ROWS, file=FILE
)


def rows_of(program: Any) -> dict[str, Any]:
    x = program.empty((MOST_ROWS, WIDTH), np.dtype(np.float32))
    x[...] = 1
    return {"x": x}


def step_by_step(seconds: float) -> harness.Sample:
    device = simulated()
    program = doubling(device)
    sample = harness.timed(lambda: program.run(rows_of(program)), seconds)
    return measured(device, sample["rate"] * MOST_ROWS)


def three_phases(seconds: float) -> harness.Sample:
    device = simulated()
    program = doubling(device)
    staged: queue.Queue[Any] = queue.Queue(1)
    launched: queue.Queue[Any] = queue.Queue(1)
    start = time.perf_counter()
    batches = 0

    def stage() -> None:
        while time.perf_counter() - start < seconds:
            staged.put(program.stage(rows_of(program)))
        staged.put(None)

    def launch() -> None:
        while (batch := staged.get()) is not None:
            launched.put(program.launch(batch))
        launched.put(None)

    crew = [threading.Thread(target=phase) for phase in (stage, launch)]
    for thread in crew:
        thread.start()
    while (batch := launched.get()) is not None:
        program.fetch(batch)
        batches += 1
    rate = batches * MOST_ROWS / (time.perf_counter() - start)
    for thread in crew:
        thread.join()
    return measured(device, rate)


def config(transport: str) -> ModelConfig:
    target = f"{harness.HERE}/{FILE}:device"
    return ModelConfig(target=target, transport=transport, batching=BatchingConfig(max_batch_size=MOST_ROWS))


def threads(count: int, rows: int, seconds: float) -> harness.Sample:
    with penstock.Portal() as portal:
        portal.load("device", config("thread"))

        def call() -> None:
            portal.predict("device", [ROW] * rows)

        crowd_of_threads(call, count, WARM_S)
        return shared(crowd_of_threads(call, count, seconds), rows)


def tasks(transport: str, count: int, rows: int, seconds: float) -> harness.Sample:
    async def run() -> harness.Sample:
        async with penstock.Engine() as engine:
            await engine.load("device", config(transport))
            call = functools.partial(engine.infer_many, "device", [ROW] * rows)
            await crowd(call, count, WARM_S)
            return shared(await crowd(call, count, seconds), rows)

    return uvloop.run(run())


def shared(sample: harness.Sample, rows: int = 1) -> harness.Sample:
    """The sample in rows/s, with their share of the ceiling."""
    return {**sample, "rate": sample["rate"] * rows, "share": sample["rate"] * rows / CEILING}


def measured(device: Any, rate: float) -> harness.Sample:
    """Rows/s, their share of the ceiling, and the share of the time in which queues of the device overlap."""
    spans = device.spans
    whole = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    return {"rate": rate, "share": rate / CEILING, "overlap": device.overlap_s() / whole}


def main() -> None:
    options = harness.options(__doc__)
    columns = {"rate": "rows/s", "share": "share of the kernels alone", "overlap": "share with overlap"}
    columns |= {"p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("torch",))
    s = options.seconds
    with harness.serving({"server": ("penstock", WORKLOAD)}) as servers:
        server = servers["server"]
        many: dict[str, Callable[[], harness.Sample]] = {
            "loop, step by step": lambda: step_by_step(s),
            "loop, three phases": lambda: three_phases(s),
            "portal, thread": lambda: threads(CALLERS, ROWS, s),
            "engine, thread": lambda: tasks("thread", CALLERS, ROWS, s),
            "engine, process": lambda: tasks("process", CALLERS, ROWS, s),
            "server": lambda: shared(server.closed_loop(CONNECTIONS, s)),
        }
        lone: dict[str, Callable[[], harness.Sample]] = {
            "portal, thread": lambda: threads(1, 1, s),
            "engine, thread": lambda: tasks("thread", 1, 1, s),
            "engine, process": lambda: tasks("process", 1, 1, s),
            "server": lambda: shared(server.closed_loop(1, s)),
        }
        runs = harness.interleave(options.rounds, many)
        report.add({"requests": "many"}, runs)
        for name in (name for name in many if name != "loop, step by step"):
            report.target(f"{name}: share of the kernels alone", [x["share"] for x in runs[name]], least=LEAST)
        runs = harness.interleave(options.rounds, lone)
        report.add({"requests": "one at a time"}, runs)
        for name in lone:
            more = [x["p50_ms"] - LONE_MS for x in runs[name]]
            report.target(f"{name}: ms more than launch, kernels and copies", more, most=MORE_MS)
    report.save()


if __name__ == "__main__":
    main()
