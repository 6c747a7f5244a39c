"""How many 6.2 MB requests per second does a server accept, and how much memory does its server process need?

A request is 16 raw frames of 270 x 480 x 3 uint8; the answer is the mean of each frame, computed in a worker process.
`wrk` uses 4 connections. Peers use batches of up to 4 with a delay of 2 ms, or no batching, whichever is best.
Afterwards Penstock runs with 64 connections, and the memory of its server process is measured: its own ("anonymous")
and the part that it shares with its workers.
"""

import re
import threading
from pathlib import Path

import harness
import models

VALUES = [2 ** (i % 8) for i in range(models.FRAMES)]  # a float32 represents these means exactly
BODY = b"".join(bytes([v]) * (models.HEIGHT * models.WIDTH * models.CHANNELS) for v in VALUES)
WORKLOAD = harness.Workload("frame_means", BODY, [float(v) for v in VALUES], binary=True, max_batch=4)
WANTED = {"mosec": 3.0, "torchserve": 5.0}
POOL_MIB = 256  # limits.pool_bytes
MIB = 2**20


def crowded(server: harness.Server, connections: int, seconds: int) -> harness.Sample:
    """A run of `wrk`, and the peak memory of the server process during the run, in MiB."""
    status = Path(f"/proc/{server.process.pid}/status")
    most = {"RssAnon": 0.0, "RssShmem": 0.0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            text = status.read_text()
            for key in most:
                found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
                most[key] = max(most[key], int(found[1]) * 1024 / MIB if found else 0.0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        sample = server.closed_loop(connections, seconds)
    finally:
        over.set()
        watcher.join()
    return {**sample, "anonymous_mib": most["RssAnon"], "shared_mib": most["RssShmem"]}


def main() -> None:
    options = harness.options(__doc__, peers=("mosec", "torchserve", "litserve"))
    columns = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    columns |= {"anonymous_mib": "anonymous MiB", "shared_mib": "shared MiB"}
    report = harness.Report(__file__, __doc__, options, columns)
    contenders = {"penstock": ("penstock", WORKLOAD)}
    for peer in options.peers:
        contenders |= harness.tuned(WORKLOAD, peer, waits_ms=(2,), sizes=(1, WORKLOAD.max_batch))
    with harness.serving(contenders) as servers:
        runs = harness.closed_loops(servers, 4, options)
        report.add({"connections": 4}, runs)
        for peer, ratio in WANTED.items():
            report.target(f"4 connections: x {peer}", report.ratios(runs, "penstock", peer), least=ratio)
        server = servers["penstock"]
        server.closed_loop(64, 1)
        runs = harness.interleave(options.rounds, {"penstock": lambda: crowded(server, 64, options.seconds)})
        report.add({"connections": 64}, runs)
        anonymous, shared = ([s[k] for s in runs["penstock"]] for k in ("anonymous_mib", "shared_mib"))
        report.target("64 connections: anonymous MiB of the front-end", [max(anonymous)], most=100e6 / MIB)
        report.target("64 connections: shared MiB of the front-end", [max(shared)], most=POOL_MIB)
    report.save()


if __name__ == "__main__":
    main()
