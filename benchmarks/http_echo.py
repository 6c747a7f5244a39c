"""How many small requests per second pass through the whole server, compared with its peers in the same minute?

JSON of 51 bytes and raw bodies of 4 KiB are echoed, with 1, 16, 64 and 256 connections of `wrk` on this machine and
one worker process per server. Penstock runs with all features on and batches of up to 64. Each peer has several
configurations: no batching, and batches of up to 16 and 64 with a delay of 1 ms. It is measured with the best one for
each number of connections.
"""

from __future__ import annotations

import harness

JSON = b'{"id": 12345, "text": "a small request of 50 bytes"}'
RAW = bytes(range(256)) * 16
WORKLOADS = {
    "JSON": harness.Workload("echo", JSON, {"id": 12345, "text": "a small request of 50 bytes"}),
    "4 KiB": harness.Workload("echo", RAW, RAW, binary=True),
}
CONNECTIONS = (1, 16, 64, 256)
PEERS = {"JSON": ("mosec", "litserve", "torchserve", "service_streamer"), "4 KiB": ("mosec",)}
WANTED = {("mosec", 64): 2.5, ("mosec", 256): 2.0, ("torchserve", 64): 6.0, ("litserve", 64): 40.0}


def main() -> None:
    options = harness.options(__doc__, peers=PEERS["JSON"])
    columns = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    for body, workload in WORKLOADS.items():
        contenders = {"penstock": ("penstock", workload)}
        for peer in (p for p in PEERS[body] if p in options.peers):
            contenders |= harness.tuned(workload, peer, waits_ms=(1,), sizes=(1, 16, 64))
        with harness.serving(contenders) as servers:
            for connections in CONNECTIONS:
                runs = harness.closed_loops(servers, connections, options)
                report.add({"body": body, "connections": connections}, runs)
                if body != "JSON":
                    continue
                if connections == 1:
                    report.target("JSON, lone requests/s", [s["rate"] for s in runs["penstock"]], least=4000)
                for (peer, at), ratio in WANTED.items():
                    if at == connections:
                        report.target(f"JSON at {at}: x {peer}", report.ratios(runs, "penstock", peer), least=ratio)
                if connections >= 64:
                    p99 = report.ratios(runs, "penstock", "mosec", "p99_ms")
                    report.target(f"JSON at {connections}: p99, x mosec's", p99, most=1.0)
    report.save()


if __name__ == "__main__":
    main()
