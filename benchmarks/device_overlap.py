"""How busy do the three phases of a batch keep a device?

The device is simulated: a copy takes 1 ms in each direction, the kernels 2 ms + 0.05 ms a row, and a launch costs its
thread 0.1 ms. A batch has 64 rows at most. The ceiling is the kernels alone, one full batch after the other. "step by
step" calls the program in a loop, as a server with one thread per model does. "three phases" is a loop in which three
threads stage, launch and fetch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from device_models import MOST_ROWS, WIDTH, doubling, kernels_s, simulated

CEILING = MOST_ROWS / kernels_s(MOST_ROWS)  # rows/s
LEAST = 0.97  # of the ceiling


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


def measured(device: Any, rate: float) -> harness.Sample:
    """Rows/s, their share of the ceiling, and the share of the time in which queues of the device overlap."""
    spans = device.spans
    whole = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    return {"rate": rate, "share": rate / CEILING, "overlap": device.overlap_s() / whole}


def main() -> None:
    options = harness.options(__doc__)
    columns = {"rate": "rows/s", "share": "share of the kernels alone", "overlap": "share with overlap"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("torch",))
    loops: dict[str, Callable[[], harness.Sample]] = {
        "step by step": lambda: step_by_step(options.seconds),
        "three phases": lambda: three_phases(options.seconds),
    }
    runs = harness.interleave(options.rounds, loops)
    report.add({"where": "a loop"}, runs, base="three phases")
    shares = [s["share"] for s in runs["three phases"]]
    report.target("a loop, three phases: share of the kernels alone", shares, least=LEAST)
    report.save()


if __name__ == "__main__":
    main()
