"""How many small requests per second pass through the whole server, compared with its peers in the same minute?

JSON of 51 bytes and raw bodies of 4 KiB, 64 KiB and 1 MiB are echoed, with 1 to 256 connections of `wrk` on this
machine and one worker process per server. Penstock runs with all features on and batches of up to 64. Each peer has
several configurations: no batching, and batches of up to 16 and 64 with a delay of 1 ms. It is measured with the best
one for each number of connections.
"""

import functools

import harness

JSON = b'{"id": 12345, "text": "a small request of 50 bytes"}'
KIB = bytes(range(256)) * 4
WORKLOADS = {
    "JSON": harness.Workload("echo", JSON, {"id": 12345, "text": "a small request of 50 bytes"}),
    **{name: harness.Workload("echo", KIB * n, KIB * n, binary=True) for name, n in
       {"4 KiB": 4, "64 KiB": 64, "1 MiB": 1024}.items()},
}  # fmt: skip
CONNECTIONS = (1, 16, 64, 256)
PEERS = ("mosec", "litserve", "torchserve", "service_streamer")  # with JSON; mosec with all bodies
WANTED = {
    "JSON": {1: 1.0, 16: 1.0, 64: 1.6, 256: 1.6},
    "4 KiB": {1: 1.0, 16: 1.1, 64: 1.1, 256: 1.1},
    "64 KiB": dict.fromkeys(CONNECTIONS, 1.5),
    "1 MiB": dict.fromkeys(CONNECTIONS[:3], 1.5),
}  # times mosec's requests/s


def main() -> None:
    options = harness.options(__doc__, peers=PEERS)
    columns = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    for body, workload in WORKLOADS.items():
        contenders = {"penstock": ("penstock", workload)}
        for peer in (p for p in options.peers if body == "JSON" or p == "mosec"):
            contenders |= harness.tuned(workload, peer, waits_ms=(1,), sizes=(1, 16, 64))
        with harness.serving(contenders) as servers:
            for connections, wanted in WANTED[body].items():
                runs = harness.closed_loops(servers, connections, options)
                report.add({"body": body, "connections": connections}, runs)
                ratios = functools.partial(report.ratios, runs, "penstock", "mosec")
                report.target(f"{body} at {connections}: x mosec", ratios(), least=wanted)
                report.target(f"{body} at {connections}: p99, x mosec's", ratios("p99_ms"), most=1.0)
    report.save()


if __name__ == "__main__":
    main()
