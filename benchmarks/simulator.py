"""Does the simulator, driving the real Scheduler, agree with an independent one within 3 %, and how fast is it?

Each cell is the mean over the seeds. `simulator_reference.json` holds what an independent simulator, which shares no
code with ours, gave for the same arrivals and draws of service times: title -> policy -> for each column a list of one
value a seed, from seed 1 on. t(n) = a + b*n ms: acc a=5, b=0.2; cpu a=0.5, b=4. 64 rows at most.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import Fixed
from penstock.perf.simulate.simulate import Service, SimResult, best_closed, poisson, simulate

SEEDS = 3
REFERENCE = harness.HERE / "simulator_reference.json"
NOTHING = 0.005  # ms, or of a share: closer than that is the same, also beside 0
ROWS = 64
SERVICES = {"acc": Service(0.005, 0.0002), "cpu": Service(0.0005, 0.004)}
POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "greedy": lambda: Fixed(0.0),
    "window 5 ms": lambda: Fixed(0.005),
    "adaptive": Adaptive,
}
simulated = [0, 0.0]  # requests, seconds


def ours(policy: str, service: Service, seed: int, **kwargs: Any) -> SimResult:
    start = time.perf_counter()
    result = simulate(service, POLICIES[policy](), max_batch_size=ROWS, seed=seed, **kwargs)
    simulated[0] += result.requests
    simulated[1] += time.perf_counter() - start
    return result


class Tables:
    """Each cell: the mean over the seeds, and how far it is from that of the independent simulator."""

    def __init__(self, report: harness.Report, seeds: int) -> None:
        self.report = report
        self.seeds = range(1, seeds + 1)
        self.apart: list[float] = []
        self._theirs = json.loads(REFERENCE.read_text())

    def add(self, title: str, columns: Sequence[float], digits: int, value: Callable[[str, Any, int], float]) -> None:
        """`value(policy, column, seed)` is one run of ours."""
        rows = []
        for policy in POLICIES:
            cells = []
            for column, theirs in zip(columns, self._theirs[title][policy], strict=True):
                mine = statistics.mean(value(policy, column, seed) for seed in self.seeds)
                other = statistics.mean(theirs[: len(self.seeds)])
                apart = 0.0 if abs(mine - other) < NOTHING else abs(mine / other - 1) if other else 1.0
                self.apart.append(apart)
                by = f", {apart:.1%}" if apart > 0.001 else ""
                cells.append(f"{mine:.{digits}f} ({other:.{digits}f}{by})")
            rows.append([policy, *cells])
        self.report.table(title, ["policy", *(f"{c:g}" for c in columns)], rows)


def open_loop(tables: Tables, model: str, slots: int) -> None:
    service = SERVICES[model]

    def value(policy: str, load: float, seed: int) -> float:
        arrivals = poisson(load * service.capacity(slots, ROWS), 6000, random.Random(2 + seed))
        return ours(policy, service, seed, slots=slots, arrivals=arrivals).mean_s * 1e3

    tables.add(f"open loop, {model}, {slots} slots: mean ms by load", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9], 2, value)


def closed_loop(tables: Tables, model: str, slots: int) -> None:
    service, horizon = SERVICES[model], 1.5 if model == "acc" else 8.0

    def value(policy: str, clients: int, seed: int) -> float:
        best = best_closed(service, slots, ROWS, clients, 0.0006)
        return ours(policy, service, seed, slots=slots, clients=clients, horizon_s=horizon).throughput / best

    title = f"closed loop, {model}, {slots} slots: throughput / best schedule by clients"
    tables.add(title, [2, 8, 32, 64, 96, 256], 2, value)


def goodput(tables: Tables, model: str, slots: int, slo_ms: float) -> None:
    service, n = SERVICES[model], 12000 if model == "acc" else 4000
    capacity = service.capacity(slots, ROWS)

    def value(policy: str, load: float, seed: int) -> float:
        arrivals = poisson(load * capacity, n, random.Random(2 + seed))
        told = policy == "adaptive"  # the reference's greedy and window know of no deadline
        result = ours(policy, service, seed, slots=slots, arrivals=arrivals, slo_s=slo_ms / 1e3, deadlines=told)
        return result.goodput / capacity

    title = f"SLO {slo_ms:g} ms, {model}, {slots} slots: goodput / capacity by load"
    tables.add(title, [0.5, 0.9, 1.0, 1.2, 2.0], 3, value)


def main() -> None:
    options = harness.options(__doc__, seconds=None)
    seeds = min(options.rounds, SEEDS)
    method = f"Mean of {seeds} seeds; in brackets that of the independent simulator, and how far apart if over 0.1 %."
    report = harness.Report(__file__, __doc__, options, {}, method=method)
    tables = Tables(report, seeds)
    for model in SERVICES:
        for slots in (1, 2, 4):
            open_loop(tables, model, slots)
    for model, slots in (("acc", 1), ("acc", 2), ("acc", 4), ("cpu", 1)):
        closed_loop(tables, model, slots)
    for model, slots, slo_ms in (
        ("acc", 1, 25),
        ("acc", 4, 25),
        ("acc", 1, 50),
        ("acc", 4, 50),
        ("cpu", 1, 50),
        ("cpu", 4, 100),
    ):
        goodput(tables, model, slots, slo_ms)
    report.target("the cell that is farthest apart, in percent", [max(tables.apart) * 100], most=3)
    report.target("requests simulated, a second", [simulated[0] / simulated[1]], least=50_000)
    report.save()


if __name__ == "__main__":
    main()
