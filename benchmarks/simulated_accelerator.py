"""How near does a server of batches come to the ceiling of an accelerator that takes 5 ms + 0.2 ms an item?

The model sleeps, 64 items at most a batch, one and two instances, 16, 64 and 256 connections of `wrk`. "in process" is
the ceiling: the same model called again and again with 64 items, by one thread an instance. Peers wait 5 ms for a batch
to fill; mosec with one instance is measured with other waits, too, at 16 connections, where they matter.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading

import harness
import models

BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
WORKLOAD = harness.Workload("accelerator", BODY, {"id": 12345, "text": "a small request of 50 bytes"}, wait_ms=5)
WAITS_MS = (1, 2, 5, 10)
SHARES = {256: 0.96, 64: 0.83}


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


def main() -> None:
    options = harness.options(__doc__)
    columns = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    for instances in (1, 2):
        workload = dataclasses.replace(WORKLOAD, instances=instances)
        contenders = harness.same(workload, options.peers)
        if "mosec" in contenders:
            del contenders["mosec"]
            for wait in WAITS_MS if instances == 1 else (5,):
                contenders[f"mosec {wait} ms"] = ("mosec", dataclasses.replace(workload, wait_ms=wait))
        with harness.serving(contenders) as servers:
            for connections in (16, 64, 256):
                shown = {n: s for n, s in servers.items() if connections == 16 or n == "mosec 5 ms" or "mosec" not in n}
                also = {"in process": lambda n=instances: ceiling(n, options.seconds)}
                runs = harness.closed_loops(shown, connections, options, also)
                report.add({"instances": instances, "connections": connections}, runs)
                if instances > 1:
                    continue
                if connections in SHARES:
                    share = report.ratios(runs, "penstock", "in process")
                    report.target(f"{connections} connections: share of the ceiling", share, least=SHARES[connections])
                waits = [n for n in runs if n.startswith("mosec")]
                if connections == 16 and waits:
                    best = max(waits, key=lambda n: statistics.median(s["rate"] for s in runs[n]))
                    ratio = report.ratios(runs, "penstock", best)
                    report.target(f"16 connections: x mosec at its best wait ({best})", ratio, least=1.2)
    report.save()


if __name__ == "__main__":
    main()
