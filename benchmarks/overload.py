"""How much capacity does an overloaded server give to requests with 200 ms, and how soon do the others fail?

An open loop of Poisson arrivals at 0.5, 1, 2 and 5 times the model's 381/s: 10 ms + 2 ms per item, at most 16 items.
Goodput is the number of right answers within 200 ms of the scheduled send time, relative to capacity; the first
second does not count. Peers get the 200 ms as their timeout. "queue 48" limits the queue (mosec: requests in flight)
to 48 items, which take 126 ms; otherwise the default limit applies. "lost" requests have no answer, "other" ones an
answer that is neither a result nor 429, 503, 504 or 408. Memory is the peak of a run, over all processes.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import harness
import psutil

BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
ANSWER = {"id": 12345, "text": "a small request of 50 bytes"}
DEADLINE_MS = 200
WORKLOAD = harness.Workload("heavy", BODY, ANSWER, max_batch=16, wait_ms=5, timeout_ms=DEADLINE_MS)
CAPACITY = 16 / (0.010 + 0.002 * 16)
WARM_S = 1.0
REFUSED, SHED = (429, 503), (504, 408)
WANTED = {2: 0.90, 5: 0.85}
SETTLE_TRIES = 100
CAN_BE_BOUNDED = ("penstock", "mosec", "torchserve")


def settle(server: harness.Server) -> None:
    """Returns when a single request is answered in time again: some servers still work on expired requests."""
    for _ in range(SETTLE_TRIES):
        start = time.perf_counter()
        run = harness.open_loop(server.url, BODY, server.workload.content_type, [0.0], connections=1)
        if run.status[0] == 200 and time.perf_counter() - start < DEADLINE_MS / 1e3:
            return
    raise SystemExit(f"{server.name} does not recover from the run before")


@contextlib.contextmanager
def watched(processes: list[psutil.Process]) -> Iterator[list[int]]:
    """The bytes that no other process shares with these, every quarter of a second and at the end."""
    found: list[int] = []
    over = threading.Event()

    def watch() -> None:
        done = False
        while not done:
            done = over.wait(0.25)
            total = 0
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_full_info().uss
            found.append(total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def loaded(server: harness.Server, load: float, seconds: float, seed: int) -> harness.Sample:
    """One run of arrivals at `load` x capacity."""
    w = server.workload
    times = harness.poisson(load * CAPACITY, WARM_S + seconds, seed)
    with server.awake():
        settle(server)
        with watched(server.members()) as memory:
            run = harness.open_loop(server.url, w.body, w.content_type, times, x_deadline_ms=str(DEADLINE_MS))
    answers = list(zip(times, run.latency_s, run.status, strict=True))
    good = sum(
        200 <= status < 300 and latency <= DEADLINE_MS / 1e3 and WARM_S <= at + latency < WARM_S + seconds
        for at, latency, status in answers
    )
    served = harness.percentiles([x for _, x, status in answers if 200 <= status < 300])
    refused = harness.percentiles([x for _, x, status in answers if status in REFUSED])
    shed = [x for _, x, status in answers if status in SHED]
    late = harness.percentiles(run.late_s)
    sample = {
        "goodput": good / seconds / CAPACITY,
        **served,
        "lost": sum(status <= 0 for _, _, status in answers),
        "other": sum(s > 0 and not 200 <= s < 300 and s not in (*REFUSED, *SHED) for _, _, s in answers),
        "memory_mib": max(memory) / 2**20,
        "generator_late_p99_ms": late["p99_ms"],
        "refused": sum(status in REFUSED for _, _, status in answers) / len(answers),
        "shed": len(shed) / len(answers),
    }
    if refused:
        sample["refused_p99_ms"] = refused["p99_ms"]
    if shed:
        sample["shed_after_ms"] = max(shed) * 1e3 - DEADLINE_MS
    return sample


def main() -> None:
    options = harness.options(__doc__, peers=("mosec", "litserve"), others=("torchserve", "service_streamer"))
    columns = {"goodput": "goodput / capacity", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "refused": "share refused"}
    columns |= {"refused_p99_ms": "refused after, p99 ms", "shed": "share shed", "lost": "lost", "other": "other"}
    columns |= {"shed_after_ms": "shed, most ms after the deadline", "memory_mib": "memory MiB"}
    columns |= {"generator_late_p99_ms": "generator late, p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    contenders = harness.same(WORKLOAD, options.peers)
    bounded = dataclasses.replace(WORKLOAD, queue=48)
    contenders |= {f"{n}, queue 48": (n, bounded) for n in contenders if n in CAN_BE_BOUNDED}
    refused: list[float] = []
    shed: list[float] = []
    with harness.serving(contenders) as servers:
        for server in servers.values():
            loaded(server, 5.0, 1.0, 0)
        for load in (0.5, 1, 2, 5):
            shown = {n: s for n, s in servers.items() if load > 1 or "queue" not in n}
            seeds = {name: iter(range(1, 1 + options.rounds)) for name in shown}  # the same arrivals for all
            runs = harness.interleave(
                options.rounds,
                {
                    n: lambda n=n, s=s, load=load, seeds=seeds: loaded(s, load, options.seconds, next(seeds[n]))
                    for n, s in shown.items()
                },
            )
            report.add({"load": f"{load:g} x"}, runs)
            for name in (n for n in runs if n.startswith("penstock")):
                samples = runs[name]
                astray = sum(s["lost"] + s["other"] for s in samples)
                report.target(f"{load:g} x, {name}: lost, or answered otherwise", [astray], most=0)
                if load in WANTED:
                    report.target(f"{load} x, {name}: goodput", [s["goodput"] for s in samples], least=WANTED[load])
                if load == 5:
                    growth = samples[-1]["memory_mib"] / samples[0]["memory_mib"]
                    report.target(f"{load} x, {name}: memory, last over first run", [growth], most=1.05)
                refused += [s["refused_p99_ms"] for s in samples if "refused_p99_ms" in s]
                shed += [s["shed_after_ms"] for s in samples if "shed_after_ms" in s]
    report.target("refused after, p99 ms, worst run", refused and [max(refused)], most=10)
    report.target("shed, ms after the deadline, worst of all", shed and [max(shed)], most=10)
    report.save()


if __name__ == "__main__":
    main()
