"""Does the simulator, driving the real Scheduler, agree with an independent one within 3 %, and how fast is it?

`python benchmarks/simulator.py [--reference PATH]`: without the path of the reference simulator only our own rows are
printed. Every cell is the mean of three seeds; both sides use the same arrivals and service draws. Cells over 3 % are
marked. t(n) = a + b*n ms: acc a=5, b=0.2; cpu a=0.5, b=4. 64 rows at most.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from penstock.batching.policies.adaptive import Adaptive
from penstock.batching.policies.base import BatchPolicy
from penstock.batching.policies.fixed import Fixed
from penstock.tune.simulate import Service, SimResult, best_closed, poisson, simulate

SEEDS = 3
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


class Reference:
    """The reference simulator (milliseconds), or nothing."""

    def __init__(self, path: str | None) -> None:
        self.module: Any = None
        if path is not None:
            spec = importlib.util.spec_from_file_location("reference", path)
            assert spec is not None
            assert spec.loader is not None
            self.module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.module)

    def run(self, policy: str, model: str, slots: int, seed: int, arrivals: Any = None, **kwargs: Any) -> Any:
        if self.module is None:
            return None
        m = self.module
        make = {"greedy": m.Greedy, "window 5 ms": lambda: m.Window(5), "adaptive": m.Adaptive}[policy]
        times = None if arrivals is None else m.poisson(arrivals[0] / 1e3, arrivals[1], random.Random(2 + seed))
        return m.run(make(), m.Service(**m.MODELS[model]), slots, ROWS, arrivals=times, seed=seed, **kwargs)


def cell(values: list[float], theirs: list[float | None], digits: int) -> str:
    mine = sum(values) / SEEDS
    known = [x for x in theirs if x is not None]
    if not known:
        return f"{mine:.{digits}f}"
    other = sum(known) / SEEDS
    apart = mine / other - 1 if other else 0.0 if abs(mine) < 1e-9 else 1.0
    return f"{mine:.{digits}f} {apart:+.1%}" + ("!" if abs(apart) > 0.03 and abs(mine - other) > 0.005 else "")


def table(title: str, columns: list[object], row: Callable[[str, Any], str]) -> None:
    print(f"\n## {title}")
    print("".join(str(c).ljust(16) for c in ["policy", *columns]).rstrip())
    for policy in POLICIES:
        print("".join(c.ljust(16) for c in [policy, *(row(policy, c) for c in columns)]).rstrip(), flush=True)


def open_loop(ref: Reference, model: str, slots: int) -> None:
    service = SERVICES[model]

    def row(policy: str, load: float) -> str:
        mine, theirs = [], []
        for seed in range(1, SEEDS + 1):
            rate = load * service.capacity(slots, ROWS)
            arrivals = poisson(rate, 6000, random.Random(2 + seed))
            mine.append(ours(policy, service, seed, slots=slots, arrivals=arrivals).mean_s * 1e3)
            r = ref.run(policy, model, slots, seed, arrivals=(rate, 6000))
            theirs.append(r and r.mean)
        return cell(mine, theirs, 2)

    table(f"open loop, {model}, {slots} slots: mean ms by load", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9], row)


def closed_loop(ref: Reference, model: str, slots: int) -> None:
    service, horizon = SERVICES[model], 1.5 if model == "acc" else 8.0

    def row(policy: str, clients: int) -> str:
        best = best_closed(service, slots, ROWS, clients, 0.0006)
        mine, theirs = [], []
        for seed in range(1, SEEDS + 1):
            result = ours(policy, service, seed, slots=slots, clients=clients, horizon_s=horizon)
            mine.append(result.throughput / best)
            r = ref.run(policy, model, slots, seed, clients=clients, horizon=horizon * 1e3)
            theirs.append(r and r.thr * 1e3 / best)
        return cell(mine, theirs, 2)

    table(f"closed loop, {model}, {slots} slots: throughput / best schedule by clients", [2, 8, 32, 64, 96, 256], row)


def goodput(ref: Reference, model: str, slots: int, slo_ms: float) -> None:
    service, n = SERVICES[model], 12000 if model == "acc" else 4000

    def row(policy: str, load: float) -> str:
        capacity = service.capacity(slots, ROWS)
        mine, theirs = [], []
        for seed in range(1, SEEDS + 1):
            arrivals = poisson(load * capacity, n, random.Random(2 + seed))
            told = policy == "adaptive"  # the reference's greedy and window know of no deadline
            result = ours(policy, service, seed, slots=slots, arrivals=arrivals, slo_s=slo_ms / 1e3, deadlines=told)
            mine.append(result.goodput / capacity)
            r = ref.run(policy, model, slots, seed, arrivals=(load * capacity, n), slo=slo_ms)
            theirs.append(r and r.good * 1e3 / capacity)
        return cell(mine, theirs, 3)

    table(f"SLO {slo_ms:g} ms, {model}, {slots} slots: goodput / capacity by load", [0.5, 0.9, 1.0, 1.2, 2.0], row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", help="path of the reference simulator")
    ref = Reference(parser.parse_args().reference)
    print(
        f"# {platform.machine()}, Python {sys.version.split()[0]}; mean of {SEEDS} seeds, difference to the reference"
    )
    for model in SERVICES:
        for slots in (1, 2, 4):
            open_loop(ref, model, slots)
    for model, slots in (("acc", 1), ("acc", 2), ("acc", 4), ("cpu", 1)):
        closed_loop(ref, model, slots)
    for model, slots, slo_ms in (
        ("acc", 1, 25),
        ("acc", 4, 25),
        ("acc", 1, 50),
        ("acc", 4, 50),
        ("cpu", 1, 50),
        ("cpu", 4, 100),
    ):
        goodput(ref, model, slots, slo_ms)
    print(f"\n{simulated[0]} requests simulated, {simulated[0] / simulated[1]:.0f} a second")


if __name__ == "__main__":
    main()
