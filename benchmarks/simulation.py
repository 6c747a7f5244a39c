"""Does `penstock simulate` predict a server's throughput and p99 on the simulated accelerator within 10 %?

The model takes 5 ms + 0.2 ms per item, with at most 64 items per batch and one instance. The loads are open loops at
rates up to 83 % of the ceiling of 3,596/s, and a closed loop of 256 clients, which keeps the server busy. The simulator
receives the same arrivals and the figures that a user would measure: the in-process time of batches of 1 and of 64, and
the extra time of a lone request. The server is measured with the generator of `penstock bench`; figures are medians of
the rounds. "requests simulated per second" covers the open loops, on one core.
"""

import statistics
import sys
import time
from pathlib import Path

import harness
import models
import uvloop

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.perf.bench.figures import latency_of, summarise
from penstock.perf.bench.load import closed_loop
from penstock.perf.bench.measurement import Latency, Load, Slo
from penstock.perf.simulate.replay import DEPTH, PolicyChoice, replay
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.simulator import ClosedLoop, SimulationSettings, simulate

BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
WORKLOAD = harness.Workload("accelerator", BODY, {"id": 12345, "text": "a small request of 50 bytes"})
RATES = (200, 1000, 1800, 2500, 3000)
CLIENTS = (256,)
ROWS = 64
NEAR = 0.10
WANTED = 50_000  # requests simulated per second

Figures = dict[str, float]


def calibrated(server: harness.Server) -> tuple[ServiceTime, float]:
    """The simulator's input: the measured cost of batches, and the seconds of the handover."""
    one, full = (harness.timed(lambda n=n: models.accelerator([None] * n), 1.0)["p50_ms"] / 1e3 for n in (1, ROWS))
    b = (full - one) / (ROWS - 1)
    lone = measured(server, Load(mode="closed", concurrency=1), 0, 1)["p50_ms"] / 1e3
    return ServiceTime(one - b, b, jitter=0.01, tail=0.0), max(0.0, lone - one)


def in_ms(latency: Latency) -> Figures:
    """The median and p99. Raises if the run is too short to have them."""
    assert latency.p50_s is not None
    assert latency.p99_s is not None
    return {"p50_ms": latency.p50_s * 1e3, "p99_ms": latency.p99_s * 1e3}


def measured(server: harness.Server, load: Load, seed: int, seconds: float) -> Figures:
    """One run of the server."""
    w = server.workload
    with server.awake():
        if load.mode == "open":
            samples = harness.open_loop(server.url, w.body, w.content_type, harness.poisson(load.rate, seconds, seed))
        else:
            endpoint, request = harness.post(server.url, w.body, w.content_type)
            samples = uvloop.run(closed_loop(endpoint, [request], concurrency=load.concurrency, seconds=seconds))
    run = summarise(load, samples)
    return {"rate": run.throughput, **in_ms(run.latency), "invalid": float(bool(run.invalid))}


def predicted(service: ServiceTime, handover_s: float, load: Load, seed: int, seconds: float) -> Figures:
    """The simulator's prediction for the same arrivals, with the number of requests and the seconds it took."""
    start = time.process_time()
    if load.mode == "open":
        arrivals = harness.poisson(load.rate, seconds, seed)
        one = replay(OpenLoop(arrivals), service, Slo(), PolicyChoice("adaptive"), ROWS, 1, handover_s=handover_s)
        rate, latency, requests = one.throughput, one.latency, len(arrivals)
    else:
        settings = SimulationSettings(depth=DEPTH, handover_s=handover_s, seed=seed)
        found = simulate(service, Adaptive(), ClosedLoop(load.concurrency, seconds), settings)
        rate, latency, requests = found.throughput, latency_of(found.latencies_s), found.requests
    took = time.process_time() - start
    return {"rate": rate, **in_ms(latency), "requests": requests, "seconds": took}


def main() -> None:
    options = harness.options(__doc__)
    report = harness.Report(__file__, __doc__, options, {}, libraries=("hdrhistogram",))
    loads = [Load(mode="open", rate=rate) for rate in RATES]
    loads += [Load(mode="closed", concurrency=clients) for clients in CLIENTS]
    rows, simulated = [], [0.0, 0.0]
    with harness.serving({"penstock": ("penstock", WORKLOAD)}) as servers:
        server = servers["penstock"]
        measured(server, Load(mode="closed", concurrency=64), 0, 1)
        model = calibrated(server)
        runs = {
            load: [measured(server, load, seed, options.seconds) for seed in range(options.rounds)] for load in loads
        }
    for load, samples in runs.items():
        predictions = [predicted(*model, load, seed, options.seconds) for seed in range(options.rounds)]
        if load.mode == "open":
            simulated = [
                total + sum(one[key] for one in predictions)
                for total, key in zip(simulated, ("requests", "seconds"), strict=True)
            ]
        cells = []
        for key, what in (("rate", "throughput"), ("p50_ms", "p50"), ("p99_ms", "p99")):
            middle, prediction = (
                statistics.median(sample[key] for sample in found) for found in (samples, predictions)
            )
            cells += [f"{prediction:,.4g}", f"{middle:,.4g}", f"{prediction / middle - 1:+.1%}"]
            if what != "p50":
                off = abs(prediction / middle - 1)
                report.target(f"{load.label}: {what}, error of the prediction, as a share", [off], most=NEAR)
        rows.append([load.label, *cells, str(int(sum(sample["invalid"] for sample in samples)))])
    header = [
        "load",
        *(f"{what}{more}" for what in ("requests/s", "p50 ms", "p99 ms") for more in (" predicted", "", " error")),
    ]
    a, b, way = model.service.a, model.service.b, model.handover_s
    report.section(
        f"Input: a batch takes {a * 1e3:.3f} ms + {b * 1e3:.4f} ms per item, a request {way * 1e3:.2f} ms more."
    )
    report.table("Predicted and measured", [*header, "runs INVALID"], rows)
    report.target("requests simulated per second", [simulated[0] / simulated[1]], least=WANTED)
    report.save()


if __name__ == "__main__":
    main()
