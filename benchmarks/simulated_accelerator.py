"""How close does a batching server come to the ceiling of an accelerator that takes 5 ms + 0.2 ms per item?

The model sleeps, with at most 64 items per batch, one and two instances, and 16, 64 and 256 connections of `wrk`. "in
process" is the ceiling: the same model called repeatedly with 64 items, by one thread per instance. Each peer has
several batch delays and is measured with the best one for each number of connections; with two instances only mosec
runs. At 16 connections mosec also runs with batches of at most 16, the setting of a user who knows the number of
clients.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable

import harness
import models

BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
WORKLOAD = harness.Workload("accelerator", BODY, {"id": 12345, "text": "a small request of 50 bytes"})
WAITS_MS = {"mosec": (1, 2, 5, 10), "litserve": (1, 5), "service_streamer": (1, 5)}
SHARES = {256: 0.96, 64: 0.83}
TOLD = "told of 16: mosec"


def ceiling(instances: int, seconds: float) -> harness.Sample:
    """Items/s of the model itself in full batches."""
    batch = list(range(WORKLOAD.max_batch))
    rates: list[float] = []

    def loop() -> None:
        rates.append(harness.timed(lambda: models.accelerator(batch), seconds)["rate"] * len(batch))

    threads = [threading.Thread(target=loop) for _ in range(instances)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"rate": sum(rates)}


def targets(report: harness.Report, connections: int, runs: harness.Runs) -> None:
    """The targets of one instance."""
    if connections in SHARES:
        share = report.ratios(runs, "penstock", "in process")
        report.target(f"{connections} connections: share of the ceiling", share, least=SHARES[connections])
    else:
        ratio = report.ratios(runs, "penstock", "mosec")
        report.target(f"{connections} connections: x mosec at its best wait", ratio, least=1.2)


def main() -> None:
    options = harness.options(__doc__, peers=tuple(WAITS_MS))
    columns = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    for instances in (1, 2):
        workload = dataclasses.replace(WORKLOAD, instances=instances)
        contenders = {"penstock": ("penstock", workload)}
        for peer in (p for p in options.peers if instances == 1 or p == "mosec"):
            contenders |= harness.tuned(workload, peer, waits_ms=WAITS_MS[peer], sizes=(workload.max_batch,))
        told = {"mosec": ("mosec", dataclasses.replace(workload, max_batch=16))} if "mosec" in options.peers else {}
        with harness.serving(contenders) as servers, harness.serving(told) as knowing:
            for connections in (16, 64, 256):
                also: dict[str, Callable[[], harness.Sample]] = {}
                also["in process"] = lambda n=instances: ceiling(n, options.seconds)
                for server in knowing.values() if connections == 16 else ():
                    also[TOLD] = functools.partial(server.closed_loop, 16, options.seconds)
                runs = harness.closed_loops(servers, connections, options, also)
                report.add({"instances": instances, "connections": connections}, runs)
                if instances == 1:
                    targets(report, connections, runs)
    report.save()


if __name__ == "__main__":
    main()
