"""Does the simulator, driving the real Scheduler, agree with an independent one within 3 %, and how fast is it?

Each cell is the mean over the seeds. `simulator_reference.json` holds the results of an independent simulator, which
shares no code with ours, for the same arrivals and service times: title -> policy -> for each column a list of one
value per seed, from seed 1 on. t(n) = a + b*n ms: acc a=5, b=0.2; cpu a=0.5, b=4. A batch has at most 64 rows.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy, SlotBatch, View
from penstock.core.batching.policies.fixed import Fixed
from penstock.core.batching.policies.trials import HoldTrials
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.simulator import ClosedLoop, FrontEnd, SimulationResult, SimulationSettings, ThinkTime, poisson, simulate

SEEDS = 3
REFERENCE = harness.HERE / "simulator_reference.json"
NOTHING = 0.005  # ms, or a share: a smaller difference counts as none, also next to 0
ROWS = 64
SERVICES = {"acc": ServiceTime(0.005, 0.0002), "cpu": ServiceTime(0.0005, 0.004)}
POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "greedy": lambda: Fixed(0.0),
    "window 5 ms": lambda: Fixed(0.005),
    "adaptive": Adaptive,
}
simulated = [0, 0.0]  # requests, seconds


def ours(
    policy: str, service: ServiceTime, load: OpenLoop | ClosedLoop, seed: int, **settings: Any
) -> SimulationResult:
    start = time.perf_counter()
    result = simulate(service, POLICIES[policy](), load, SimulationSettings(max_batch_size=ROWS, seed=seed, **settings))
    simulated[0] += result.requests
    simulated[1] += time.perf_counter() - start
    return result


def best_closed(service: ServiceTime, slots: int, clients: int, think_s: float) -> float:
    """Rows per second of the best steady schedule of the clients in equal groups over the slots."""
    best = 0.0
    for groups in range(-(-clients // ROWS), clients + 1):
        n = clients / groups
        t = service.t(n)
        best = max(best, min(min(slots, groups) * n / t, clients / (think_s + t)))
    return best


class Tables:
    """Each cell: the mean over the seeds and its distance from the independent simulator."""

    def __init__(self, report: harness.Report, seeds: int) -> None:
        self.report = report
        self.seeds = range(1, seeds + 1)
        self.apart: list[float] = []
        self._theirs = json.loads(REFERENCE.read_text())

    def add(
        self, title: str, columns: Sequence[float], digits: int, value: Callable[[str, Any, int], float], gains: bool
    ) -> None:
        """Adds a table; `value(policy, column, seed)` is one simulation. With `gains`, the adaptive policy may have
        more."""
        rows = []
        for policy in POLICIES:
            cells = []
            for column, theirs in zip(columns, self._theirs[title][policy], strict=True):
                mine = statistics.mean(value(policy, column, seed) for seed in self.seeds)
                other = statistics.mean(theirs[: len(self.seeds)])
                apart = 0.0 if abs(mine - other) < NOTHING else abs(mine / other - 1) if other else 1.0
                if not (gains and policy == "adaptive" and mine > other):  # the reference does not share the clients
                    self.apart.append(apart)
                by = f", {apart:.1%}" if apart > 0.001 else ""
                cells.append(f"{mine:.{digits}f} ({other:.{digits}f}{by})")
            rows.append([policy, *cells])
        self.report.table(title, ["policy", *(f"{c:g}" for c in columns)], rows)


def open_loop(tables: Tables, model: str, slots: int) -> None:
    service = SERVICES[model]

    def value(policy: str, load: float, seed: int) -> float:
        arrivals = poisson(load * service.capacity(slots, ROWS), 6000, random.Random(2 + seed))
        return ours(policy, service, OpenLoop(arrivals), seed, slots=slots).mean_s * 1e3

    tables.add(f"open loop, {model}, {slots} slots: mean ms by load", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9], 2, value, False)


def closed_loop(tables: Tables, model: str, slots: int) -> None:
    service, horizon = SERVICES[model], 1.5 if model == "acc" else 8.0

    def value(policy: str, clients: int, seed: int) -> float:
        best = best_closed(service, slots, clients, 0.0006)
        return ours(policy, service, ClosedLoop(clients, horizon), seed, slots=slots).throughput / best

    title = f"closed loop, {model}, {slots} slots: throughput / best schedule by clients"
    tables.add(title, [2, 8, 32, 64, 96, 256], 2, value, slots > 1)


def goodput(tables: Tables, model: str, slots: int, slo_ms: float) -> None:
    service, n = SERVICES[model], 12000 if model == "acc" else 4000
    capacity = service.capacity(slots, ROWS)

    def value(policy: str, load: float, seed: int) -> float:
        arrivals = poisson(load * capacity, n, random.Random(2 + seed))
        deadlines = policy == "adaptive"  # the reference's greedy and window policies ignore deadlines
        slo_s = slo_ms / 1e3
        result = ours(policy, service, OpenLoop(arrivals), seed, slots=slots, slo_s=slo_s, deadlines=deadlines)
        return result.goodput / capacity

    title = f"SLO {slo_ms:g} ms, {model}, {slots} slots: goodput / capacity by load"
    tables.add(title, [0.5, 0.9, 1.0, 1.2, 2.0], 3, value, False)


class Untried(Adaptive):
    """The adaptive policy without trials of a longer hold."""

    def on_complete(self, batch: SlotBatch, seconds: float, view: View, now: float) -> None:
        super().on_complete(batch, seconds, view, now)
        self._trials = HoldTrials()


def shared_cores(report: harness.Report, seeds: int) -> None:
    """Clients behind a web server that slows down while a batch runs: what the trials gain."""
    service, front_end = ServiceTime(0.004, 0.0002), FrontEnd(0.00092, 0.7)
    waits = {f"wait of {ms} ms": (lambda ms=ms: Fixed(ms / 1e3)) for ms in (20, 100)}
    policies: dict[str, Callable[[], BatchPolicy]] = {"without trials": Untried, "with trials": Adaptive, **waits}
    rates: dict[str, list[float]] = {name: [] for name in policies}
    for name, make in policies.items():
        for clients in (32, 64, 128, 256):
            load = ClosedLoop(clients, 5.0, front_end=front_end)
            runs = (simulate(service, make(), load, SimulationSettings(seed=seed)) for seed in range(1, seeds + 1))
            rates[name].append(statistics.mean(run.throughput for run in runs))
    rows = [[name, *(f"{rate:,.0f}" for rate in found)] for name, found in rates.items()]
    report.table("shared cores: requests/s by clients", ["policy", "32", "64", "128", "256"], rows)
    gains = [a / b for a, b in zip(rates["with trials"], rates["without trials"], strict=True)]
    report.target("shared cores: with trials x without", [min(gains)], least=1.15)


def harm(report: harness.Report, seeds: int) -> None:
    """Loads where no hold gains: how much longer the mean latency is with trials."""
    found: dict[str, float] = {}
    for a_ms, b_ms, slots, rows in (
        (5, 0.2, 1, 64),
        (5, 0.2, 2, 64),
        (5, 0.2, 4, 64),
        (0.8, 0.05, 1, 64),
        (30, 0.05, 1, 100),
    ):
        service = ServiceTime(a_ms / 1e3, b_ms / 1e3)
        loads: dict[str, Callable[[int], OpenLoop | ClosedLoop]] = {}
        for share in (0.1, 0.3, 0.5, 0.6, 0.7, 0.9):
            rate = share * service.capacity(slots, rows)
            loads[f"open {share}"] = lambda seed, rate=rate: OpenLoop(poisson(rate, 6000, random.Random(2 + seed)))
        for clients in (16, 64, 256):
            for think_s in (0.0003, 0.005, 0.02):
                load = ClosedLoop(clients, 150 * service.t(rows), ThinkTime(0.0003, think_s))
                loads[f"{clients} clients, {think_s * 1e3:g} ms"] = lambda seed, load=load: load
        for name, make_load in loads.items():
            means = []
            for make in (Untried, Adaptive):
                settings = [SimulationSettings(max_batch_size=rows, slots=slots, seed=s) for s in range(1, seeds + 1)]
                means.append(statistics.mean(simulate(service, make(), make_load(s.seed), s).mean_s for s in settings))
            found[f"{name}, {a_ms} + {b_ms} ms, {slots} slots"] = (means[1] / means[0] - 1) * 100
    worst = sorted(found, key=found.__getitem__, reverse=True)[:8]
    report.table("trials: the most additional mean latency", ["load", "%"], [[n, f"{found[n]:.1f}"] for n in worst])
    report.target("trials: additional mean latency of a load, in percent", [max(found.values())], most=3)


def main() -> None:
    options = harness.options(__doc__, seconds=None)
    seeds = min(options.rounds, SEEDS)
    method = f"Mean of {seeds} seeds; in brackets the independent simulator's and the difference if over 0.1 %."
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
    shared_cores(report, seeds)
    harm(report, seeds)
    report.target("largest difference of a cell, in percent", [max(tables.apart) * 100], most=3)
    report.target("requests simulated per second", [simulated[0] / simulated[1]], least=50_000)
    report.save()


if __name__ == "__main__":
    main()
