"""Does a server with the settings of `penstock plan` have the capacity and the p99 that the plan promises?

12 settings: three models that sleep (10 ms + 2 ms per item, 20 + 2, 40 + 0.5), arrivals from 150 to 1,200 per second
(Poisson, and bursts with a coefficient of variation of 2), SLOs from tight to loose. The planner receives arrivals of
each kind, and what a user would measure: the in-process time of batches of several sizes, and the extra time of a lone
request. A server then runs with the instances and the batch ceiling of the plan. Its p99 is measured under arrivals
that the planner has not seen, others in each round, over the requests of all rounds; its capacity, the median of the
rounds, with 3 clients for each row of a full batch. A run in which the load generator was late is disturbed by other
work on the machine: it does not count, and is repeated up to twice.
`--first` and `--second` run half of the settings each. `--scale` answers another question: how long 1,000,000 requests
on 1,000 instances take, from nearly idle to nearly full.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import harness
import models
import uvloop

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.perf.bench.figures import percentile, summarise
from penstock.perf.bench.load import Samples, closed_loop
from penstock.perf.bench.measurement import Load, parse_slo
from penstock.perf.bench.workload import parse_arrival, times
from penstock.perf.simulate.costs import CostCurve, checked
from penstock.perf.simulate.planner import PEAK, CapacityPlan, Planner, PlanOptions, useful
from penstock.perf.simulate.simulator import WARM, OpenLoop, ServiceTime, SimulationSettings, simulate

ANSWER = {"id": 12345, "text": "a small request of 50 bytes"}
BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
SIZES = (1, 4, 16, 64)
SETTINGS = (  # model, arrivals, requests/s, SLO
    ("heavy", "poisson", 200, "p99<=80ms"),
    ("heavy", "poisson", 600, "p99<=100ms"),
    ("heavy", "gamma:2", 600, "p99<=60ms"),
    ("heavy", "poisson", 900, "p99<=60ms"),
    ("slow", "poisson", 150, "p99<=120ms"),
    ("slow", "poisson", 500, "p99<=120ms"),
    ("slow", "gamma:2", 400, "p99<=150ms"),
    ("slow", "poisson", 800, "p99<=90ms"),
    ("wide", "poisson", 400, "p99<=130ms"),
    ("wide", "poisson", 1200, "p99<=150ms"),
    ("wide", "gamma:2", 800, "p99<=110ms"),
    ("wide", "poisson", 300, "p99<=95ms"),
)
JITTER = 0.01  # a sleep is punctual
LONE_S = 10.0  # of a lone client: the server first has to forget that there were more
CAPACITY_S = 2.0
REPEATS = 2  # of an INVALID run
LATE = 0.01  # of the sends: more come from other work on the machine, which the server suffers from as well
CAPACITY_OFF, TAIL_OFF = 0.05, 0.08
UNSEEN = 1000  # the first seed of arrivals that the planner has not seen
INSTANCES, REQUESTS, LOADS, MOST_S = 1000, 1_000_000, (0.05, 0.3, 0.7, 0.9), 60


def workload(model: str, instances: int, batch: int) -> harness.Workload:
    return harness.Workload(model, BODY, ANSWER, max_batch=batch, instances=instances)


def measured_cost(model: str) -> tuple[CostCurve, float]:
    """The cost of batches of the model in process, and the seconds that a lone request takes more."""
    call = getattr(models, model)
    points = [(n, harness.timed(lambda n=n: call([None] * n), 0.6)["p50_ms"] / 1e3) for n in SIZES]
    with harness.serving({"penstock": ("penstock", workload(model, 1, 64))}) as servers:
        lone = saturated(servers["penstock"], 1, LONE_S)
    lone_s = percentile(sorted(lone.latency_s[-len(lone.latency_s) // 3 :]), 0.5)
    return checked(points, source=model), max(0.0, lone_s - points[0][1])


def saturated(server: harness.Server, clients: int, seconds: float) -> Samples:
    """A closed loop."""
    w = server.workload
    endpoint, request = harness.post(server.url, w.body, w.content_type)
    with server.awake():
        return uvloop.run(closed_loop(endpoint, [request], concurrency=clients, seconds=seconds))


def measured(server: harness.Server, arrivals: Sequence[float]) -> tuple[list[float], bool]:
    """(latencies of the requests that a simulation counts, whether nothing else took the cores meanwhile)."""
    w = server.workload
    with server.awake():
        samples = harness.open_loop(server.url, w.body, w.content_type, arrivals, connections=1024)
    run = summarise(Load(mode="open", rate=len(arrivals) / arrivals[-1]), samples)
    start = WARM * arrivals[-1]
    took = [s for t, s in zip(samples.intended_s, samples.latency_s, strict=True) if t >= start]
    quiet = run.generator.late_share <= LATE and not run.errors
    return took, quiet and not run.invalid


def planned(curve: CostCurve, handover_s: float, kind: str, rate: float, slo_text: str, seed: int) -> CapacityPlan:
    """As `penstock plan --arrivals KIND:RATE`."""
    slo = parse_slo(slo_text)
    load, others = (OpenLoop(times(parse_arrival(kind), rate, PEAK / rate, each)) for each in (seed, seed + 1))
    batches = useful((4, 8, 16, 32, 64), curve, slo, handover_s)
    options = PlanOptions(slo=slo, batches=batches, handover_s=handover_s, jitter=JITTER)
    return Planner(load, curve, options, others).plan()


def truth(options: argparse.Namespace, part: str) -> None:
    """Plans and measures all settings, or half of them."""
    report = harness.Report(__file__, __doc__, options, {}, libraries=("hdrhistogram",), part=part)
    half = len(SETTINGS) // 2
    settings = {"first": SETTINGS[:half], "second": SETTINGS[half:]}.get(part, SETTINGS)
    costs = {model: measured_cost(model) for model in dict.fromkeys(model for model, *_ in settings)}
    lines = []
    for model, (curve, way_s) in costs.items():
        each = ", ".join(f"{n:g}: {seconds * 1e3:.2f}" for n, seconds in curve.points)
        lines.append(f"{model}: {each} ms, a request {way_s * 1e3:.2f} ms more")
    report.section(f"Cost of batches by rows: {'; '.join(lines)}.")
    rows, off = [], {"capacity": list[float](), "p99": list[float]()}
    for number, (model, kind, rate, slo) in enumerate(settings):
        plan = planned(*costs[model], kind, rate, slo, 2 * number)
        with harness.serving({"penstock": ("penstock", workload(model, plan.instances, plan.batch))}) as servers:
            server, clients = servers["penstock"], 3 * plan.instances * plan.batch
            saturated(server, clients, 1.0)
            rates, tails = [], []
            for round_ in range(options.rounds):
                arrivals = times(parse_arrival(kind), rate, options.seconds, UNSEEN + round_)
                tails.append(measured(server, arrivals))
                for _ in range(REPEATS):
                    if not tails[-1][1]:
                        tails.append(measured(server, arrivals))
                rates.append(summarise(Load(mode="closed", concurrency=clients, seconds=CAPACITY_S),
                                       saturated(server, clients, CAPACITY_S)).throughput)  # fmt: skip
        valid = [took for took, ok in tails if ok]
        pooled = sorted(itertools.chain(*(valid or [took for took, _ in tails])))
        found = (statistics.median(rates), percentile(pooled, 0.99))
        promised = (plan.full_rate, plan.chosen.latency.p99_s or 0.0)
        cells = [f"{model}, {kind}, {rate}/s", slo, f"{plan.instances} x {plan.batch}"]
        for name, a, b, unit in zip(off, promised, found, (1, 1e3), strict=True):
            off[name].append(abs(a / b - 1))
            cells += [f"{a * unit:,.4g}", f"{b * unit:,.4g}", f"{a / b - 1:+.1%}"]
        rows.append([*cells, str(len(tails) - len(valid))])
        print(
            rows[-1],
            [round(percentile(sorted(took), 0.99) * 1e3, 1) for took, _ in tails],
            [round(r) for r in rates],
            flush=True,
        )
    header = ["setting", "SLO", "plan"]
    header += [word for what in ("capacity/s", "p99 ms") for word in (f"{what} planned", "measured", "error")]
    report.table("Planned and measured", [*header, "runs disturbed"], rows)
    for name, most in (("capacity", CAPACITY_OFF), ("p99", TAIL_OFF)):
        within = sum(value <= most for value in off[name])
        report.target(f"settings with the {name} within {most:.0%}, of {len(rows)}", [within], least=len(rows))
        report.target(f"largest error of the {name}, as a share", [max(off[name])], most=most)
    report.save()


def scale(options: argparse.Namespace) -> None:
    """Simulates many requests on many instances."""
    method = f"{REQUESTS:,} Poisson arrivals on {INSTANCES:,} instances, in one process; seconds of its CPU."
    report = harness.Report(__file__, __doc__, options, {}, method=method, part="scale")
    service, rows = ServiceTime(0.02, 0.002, tail=0.0), []
    for load in LOADS:
        rate = load * service.capacity(INSTANCES, 16)
        arrivals = times(parse_arrival("poisson"), rate, REQUESTS / rate, 1)
        start = time.process_time()
        settings = SimulationSettings(slots=INSTANCES, depth=2, max_batch_size=16, handover_s=0.0005)
        found = simulate(service, Adaptive(), OpenLoop(arrivals), settings)
        took = time.process_time() - start
        p99_ms = percentile(found.latencies_s, 0.99) * 1e3
        rows.append([f"{load:.0%}", f"{rate:,.0f}", f"{found.mean_batch:.2f}", f"{p99_ms:.1f}", f"{took:.1f}"])
        print(rows[-1], flush=True)
        report.target(f"seconds at a load of {load:.0%}", [took], most=MOST_S)
    report.table("By load", ["load", "requests/s", "mean batch", "p99 ms", "seconds"], rows)
    report.save(whole=True)


def main() -> None:
    parts = ("first", "second", "scale")
    further = {part: {"dest": "part", "action": "store_const", "const": part, "default": ""} for part in parts}
    options = harness.options(__doc__, seconds=6, **further)
    if options.part == "scale":
        options.seconds = None
        scale(options)
    else:
        truth(options, options.part)


if __name__ == "__main__":
    main()
