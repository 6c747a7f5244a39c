"""What do metrics cost: counting and recording a batch of 64, and rendering a page of 50 models?

CPU time of this process per call.
"""

import time
from collections.abc import Callable

import harness

from penstock.core.contracts import BatchRecord, HttpSnapshot, ModelSnapshot, Observer, ServerSnapshot
from penstock.core.engine.calls import notify
from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.serving.observe.recorders import BatchRecords
from penstock.types import ModelStatus

BATCHES = 1280  # so many that the counting into buckets is in it


def cost(run: Callable[[], object], calls: int, seconds: float) -> harness.Sample:
    """CPU microseconds per call; a run makes `calls` calls."""
    runs, end, start = 0, time.perf_counter() + seconds, time.thread_time()
    while time.perf_counter() < end:
        run()
        runs += 1
    return {"cpu_us": (time.thread_time() - start) / (runs * calls) * 1e6}


def record(model: str) -> BatchRecord:
    return BatchRecord(model, "1", 0, 64, 64, "full", False, 0.018, 0.019, [0.001] * 64, 0)


def reading() -> ServerSnapshot:
    models = [ModelSnapshot(ModelStatus(f"m{i}", "1", "READY", 1, 1, 64, ("cpu",))) for i in range(50)]
    return ServerSnapshot(models, 1, 2, HttpSnapshot(1, 0, {2: 5}))


def main() -> None:
    options = harness.options(__doc__, seconds=1)
    report = harness.Report(__file__, __doc__, options, {"cpu_us": "CPU us"}, libraries=("prometheus-client",))
    observers: list[Observer] = [PrometheusObserver(), BatchRecords()]
    one, latencies = record("m"), [0.02] * 64
    page = PrometheusObserver(reading)
    for i in range(50):
        page.on_answer(f"m{i}", "1", latencies, 0)
        page.on_complete(record(f"m{i}"))

    def batches() -> None:
        for _ in range(BATCHES):
            notify(observers, "on_answer", "m", "1", latencies, 0)
            notify(observers, "on_complete", one)

    contenders = {
        "a batch of 64": lambda: cost(batches, BATCHES, options.seconds),
        "a page of 50 models": lambda: cost(page.render, 1, options.seconds),
    }
    runs = harness.interleave(options.rounds, contenders)
    report.add({}, runs)
    for (what, samples), most in zip(runs.items(), (10, 20_000), strict=True):
        report.target(f"{what}: CPU us", [s["cpu_us"] for s in samples], most=most)
    report.save()


if __name__ == "__main__":
    main()
