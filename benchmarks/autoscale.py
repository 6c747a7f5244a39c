"""Do the instances of a model follow its load, at what cost, and does a real server do what the simulation predicts?

16 rows take 0.25 s on an instance, which starts in 0.5 s; the SLO is 1 s. "late" is the share of requests that took
longer. "cost" is the seconds of all instances relative to a lower bound for every policy that keeps the SLO: one
instance always, and full batches without an idle moment on any other. The plan knows all arrivals. "too many" is the
most instances that a start made above the plan's, within a quiet window around it. The Zipf row has 100 models, with
one instance each at least. The second table has starts of 3 s, with a spare instance, headroom, or a schedule of the
steps. Three traces, shorter and with 0.4 of the load, run on worker processes too.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from report import spread

from penstock.config.schema import AutoscaleConfig, BatchingConfig, ModelConfig
from penstock.core.batching.autoscale import AutoscaleLimits
from penstock.core.engine.engine import Engine
from penstock.perf.simulate.simulator import (
    OpenLoop,
    ScalingResult,
    ServiceTime,
    SimulationSettings,
    simulate_scaling,
)
from penstock.types import Item, ItemResult

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.load_traces import CAPACITY, Clairvoyant, least_worker_s, too_many, trace, zipf

SLO_S, START_S, ROWS = 1.0, 0.5, 16
SERVICE = ServiceTime(0.05, 0.0125)
SIMULATED_S = 1200.0
TRACES = ("step", "daily wave", "ten-fold burst", "on-off")
SLOW_START_S = 3.0
SLOW: dict[str, dict[str, dict[str, Any]]] = {
    "steps of one": {"": {}, "spare = 1": {"spare": 1}, "headroom = 0.25": {"headroom": 0.25}},
    "step": {
        "": {},
        "spare = 1": {"spare": 1},
        "schedule": {"schedule": ((0.0, 4), (SIMULATED_S / 3, 13), (2 * SIMULATED_S / 3, 0))},
    },
}
REAL = ("step", "daily wave", "ten-fold burst")
SHARE = 0.4  # of the simulated load, with --real: as many sleeping processes as two cores can hold


class Sleeper:
    """Takes as long as an accelerator would, without its work."""

    def predict(self, items: list[int]) -> list[int]:
        time.sleep(SERVICE.t(len(items)))
        return items


def limits(quiet_s: float, **more: Any) -> AutoscaleLimits:
    return AutoscaleLimits(fewest=1, most=64, quiet_s=quiet_s, slo_s=SLO_S, **more)


def scaled(arrivals: Sequence[float], quiet_s: float, start_s: float, plan: bool = False, **more: Any) -> ScalingResult:
    settings = SimulationSettings(slots=1, depth=2, max_batch_size=ROWS, handover_s=0.0005)
    bounds = limits(quiet_s, **more)
    policy = Clairvoyant(arrivals, CAPACITY, bounds, start_s) if plan else None
    return simulate_scaling(SERVICE, OpenLoop(arrivals), settings, bounds, start_s=start_s, policy=policy)


def simulated(report: harness.Report, quiet_s: float) -> list[list[str]]:
    rows = []
    for name in TRACES:
        arrivals = trace(name, SIMULATED_S)
        least_s = least_worker_s(arrivals, CAPACITY, limits(quiet_s))
        found, best = scaled(arrivals, quiet_s, START_S), scaled(arrivals, quiet_s, START_S, plan=True)
        rows.append(row(report, name, [found], [best], least_s, too_many(found, best, quiet_s)))
    models = zipf(SIMULATED_S / 4, 40.0)
    both = [[scaled(arrivals, quiet_s, START_S, plan) for arrivals in models] for plan in (False, True)]
    least_s = sum(least_worker_s(arrivals, CAPACITY, limits(quiet_s)) for arrivals in models)
    extra = max(too_many(*pair, quiet_s) for pair in zip(*both, strict=True))
    rows.append(row(report, "Zipf, 100 models", *both, least_s, extra))
    return rows


def slow(report: harness.Report, quiet_s: float) -> list[list[str]]:
    rows = []
    for name, settings in SLOW.items():
        arrivals = trace(name, SIMULATED_S)
        least_s = least_worker_s(arrivals, CAPACITY, limits(quiet_s))
        for what, more in settings.items():
            found = scaled(arrivals, quiet_s, SLOW_START_S, **more)
            if more:
                report.target(f"{name}, {what}: late", [found.late(SLO_S)], most=0.03)
            rows.append([name, what, f"{found.late(SLO_S):.3%}", f"{found.worker_s / least_s:.3f}"])
    return rows


def row(
    report: harness.Report,
    name: str,
    found: Sequence[ScalingResult],
    best: Sequence[ScalingResult],
    least_s: float,
    extra: int,
) -> list[str]:
    requests = sum(len(one.latencies_s) for one in found)
    late, planned = (sum(one.late(SLO_S) * len(one.latencies_s) for one in each) / requests for each in (found, best))
    cost, plan_cost = (sum(one.worker_s for one in each) / least_s for each in (found, best))
    report.target(f"{name}: late", [late], most=0.01)
    report.target(f"{name}: cost / least", [cost], most=1.25)
    report.target(f"{name}: instances too many", [extra], most=1)
    changes = sum(len(one.numbers) - 1 for one in found)
    cells = [f"{late:.3%}", f"{planned:.3%}", f"{cost:.3f}", f"{plan_cost:.3f}", str(extra), str(changes)]
    return [name, f"{requests:,}", *cells]


async def real(arrivals: Sequence[float], quiet_s: float) -> tuple[ScalingResult, float]:
    """The arrivals on worker processes, after a warm-up from which the model's cost is learned, and the learned time
    of a start."""
    config = ModelConfig(
        target=f"{__file__}:Sleeper",
        batching=BatchingConfig(max_batch_size=ROWS),
        autoscale=AutoscaleConfig(max=64, slo_s=SLO_S, idle_s=quiet_s),
    )
    done: list[float] = []
    everything = asyncio.Event()
    async with Engine() as engine:
        await engine.load("m", config)
        await asyncio.gather(*(engine.infer("m", k) for k in range(64)))
        await asyncio.sleep(quiet_s + 2)
        handle, began = engine.handle("m", None), time.monotonic()
        numbers, worker_s, last = [(0.0, handle.instances.count)], 0.0, began
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, began + arrival - time.monotonic()))
            now = time.monotonic()
            worker_s, last = worker_s + handle.instances.count * (now - last), now
            if handle.instances.count != numbers[-1][1]:
                numbers.append((now - began, handle.instances.count))

            def sink(result: ItemResult, due: float = began + arrival) -> None:
                assert result.error is None, result.error
                done.append(time.monotonic() - due)
                if len(done) == len(arrivals):
                    everything.set()

            engine.submit("m", None, Item(0), sink)
        await everything.wait()
        assert handle.scaler is not None
        start_s = handle.scaler.autoscaler.start_s
    return ScalingResult(latencies_s=sorted(done), worker_s=worker_s, numbers=numbers), start_s


def compared(report: harness.Report, name: str, seconds: float, rounds: int, quiet_s: float) -> list[str]:
    costs, means, late = [], [], []
    for seed in range(1, rounds + 1):
        rng = random.Random(seed)
        arrivals = [t for t in trace(name, seconds, seed) if rng.random() < SHARE]
        found, start_s = asyncio.run(real(arrivals, quiet_s))
        same = scaled(arrivals, quiet_s, start_s)
        costs.append(found.worker_s / same.worker_s)
        means.append(statistics.mean(found.latencies_s) / statistics.mean(same.latencies_s))
        late.append(found.late(SLO_S) - same.late(SLO_S))
    for what, values in (("seconds of instances", costs), ("mean latency", means)):
        apart = [abs(x - 1) for x in values]
        report.target(f"{name}: {what}, real / simulated, distance from 1", apart, most=0.1)
    report.target(f"{name}: late, real - simulated", late, most=0.01)
    return [name, *(spread(values) for values in (costs, means)), f"{statistics.median(late):.3%}"]


def main() -> None:
    options = harness.options(__doc__, seconds=60)
    method = (
        f"Kept traces of {SIMULATED_S:g} s in virtual time, then {options.rounds} runs of {options.seconds} s each."
    )
    report = harness.Report(__file__, __doc__, options, {}, method=method)
    header = ["trace", "requests", "late", "late, plan", "cost", "cost, plan", "too many", "changes"]
    report.table("In virtual time, quiet window 10 s:", header, simulated(report, 10.0))
    header = ["trace", "with", "late", "cost"]
    report.table(f"In virtual time, starts of {SLOW_START_S:g} s:", header, slow(report, 10.0))
    header = ["trace", "seconds of instances", "mean latency", "late, difference"]
    rows = [compared(report, name, options.seconds, options.rounds, 5.0) for name in REAL]
    report.table("Real processes / simulation of the same arrivals, quiet window 5 s:", header, rows)
    report.save()


if __name__ == "__main__":
    main()
