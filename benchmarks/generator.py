"""Is the load generator honest: does it reach the rates of `wrk`, send on time, and count a stall for all requests?

The server answers each request after a fixed time, in its own process. If the machine has two cores, server and
generator have one each. Closed loops alternate between the generator and `wrk`. The open loop is Poisson; a send is
late if it leaves more than a millisecond after its scheduled time. The stall: 100 requests per second for 20 s,
answered after 5 ms each, by a server that is paused (SIGSTOP) for 2 s. The 95th, 99th and 99.9th percentiles of the
latencies are then at most 1.005, 1.805 and 1.985 s for any generator.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import harness
import uvloop
from report import spread

from penstock.perf.bench.figures import summarise
from penstock.perf.bench.load import Samples, closed_loop, open_loop
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.workload import parse_arrival, times

BODY = b'{"id": 12345, "text": "a small request of 50 bytes"}'
CLOSED = ((1, 1), (8, 2), (64, 10))  # clients, milliseconds: up to 6,400 requests/s
RATES = (1000, 5000, 10_000, 20_000)
WANTED_RATE = 5000
RATE, LASTS_S, STALL_S, STALL_AT_S, ANSWERED_S = 100, 20, 2.0, 9.0, 0.005
WANTED = {"p95_s": 1.005, "p99_s": 1.805, "p999_s": 1.985}


class Answering(asyncio.Protocol):
    """Answers every request after `delay_s`; a request must arrive in one piece."""

    delay_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        if self.delay_s:
            self.loop.call_later(self.delay_s, self.answer)
        else:
            self.answer()

    def answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok")


async def serve(delay_s: float) -> None:
    """Serves on a free port, which it prints, until stdin closes."""
    Answering.delay_s = delay_s
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answering, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


@contextlib.contextmanager
def answering(delay_s: float) -> Iterator[tuple[str, int]]:
    """A server's URL and process. It runs on the machine's last core, this process on the first."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, __file__, "--serve", str(delay_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    os.sched_setaffinity(process.pid, {cores[-1]})
    os.sched_setaffinity(0, {cores[0]})
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/", process.pid
    finally:
        os.sched_setaffinity(0, cores)
        process.stdin.close()
        process.wait()
        process.stdout.close()


def ours(url: str, clients: int, seconds: float) -> harness.Sample:
    """A closed loop of the generator."""
    endpoint, request = harness.post(url, BODY, "application/json")
    samples = uvloop.run(closed_loop(endpoint, [request], concurrency=clients, seconds=seconds))
    run = summarise(Load(mode="closed", concurrency=clients, seconds=seconds), samples)
    latency = run.latency
    return {
        "rate": run.throughput,
        "errors": sum(run.errors.values()),
        "p50_ms": (latency.p50_s or 0) * 1e3,
        "p99_ms": (latency.p99_s or 0) * 1e3,
        "cpu": run.generator.cpu,
    }


def closed(report: harness.Report, options: argparse.Namespace) -> None:
    """Rates and latencies of the same loop with both tools."""
    for clients, milliseconds in CLOSED:
        with answering(milliseconds / 1e3) as (url, _):
            ours(url, clients, 0.5)
            runs = harness.interleave(
                options.rounds,
                {
                    "penstock": lambda c=clients, u=url: ours(u, c, options.seconds),
                    "wrk": lambda c=clients, u=url: harness.wrk(u, BODY, "application/json", c, options.seconds),
                },
            )
        report.add({"clients": clients, "answered after, ms": milliseconds}, runs)
        ratios = report.ratios(runs, "penstock", "wrk")
        report.target(f"{clients} clients: rate, over that of wrk", ratios, least=0.95)
        report.target(f"{clients} clients: rate, over that of wrk", ratios, most=1.05)


def opened(report: harness.Report, options: argparse.Namespace) -> None:
    """Punctuality of the generator at rising rates, and its cost."""
    rows = []
    for rate in RATES:
        with answering(0.0) as (url, _):
            endpoint, request = harness.post(url, BODY, "application/json")
            runs: list[Measurement] = []
            for seed in range(options.rounds):
                arrivals = times(parse_arrival("poisson"), rate, options.seconds, seed)
                samples = uvloop.run(open_loop(endpoint, [request], arrivals, seconds=options.seconds))
                runs.append(summarise(Load(mode="open", rate=rate), samples))
        late = [run.generator.late_share for run in runs]
        cpu = [run.generator.cpu for run in runs]
        p99_ms = [run.generator.late_p99_s * 1e3 for run in runs]
        shown = [spread(values) for values in (late, p99_ms, cpu, [c / rate * 1e6 for c in cpu])]
        rows.append([f"{rate:,}", *shown, str(sum(bool(run.invalid) for run in runs))])
        if rate == WANTED_RATE:
            report.target(f"{rate}/s: share of the sends over 1 ms late", late, most=0.01)
    header = ["offered, requests/s", "share late", "late, p99 ms", "share of a core", "µs a request", "runs INVALID"]
    report.table("An open loop on one core", header, rows)


async def stop(pid: int) -> None:
    """Pauses the server for a while."""
    await asyncio.sleep(STALL_AT_S)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(STALL_S)
    os.kill(pid, signal.SIGCONT)


async def beside_a_stall(work: Coroutine[Any, Any, Samples], pid: int) -> Samples:
    """The samples of a loop during which the server is paused."""
    samples, _ = await asyncio.gather(work, stop(pid))
    return samples


def stalled(report: harness.Report) -> None:
    """Both loops with the same stall."""
    rows = []
    with answering(ANSWERED_S) as (url, pid):
        endpoint, request = harness.post(url, BODY, "application/json")
        arrivals = times(parse_arrival("constant"), RATE, LASTS_S, 0)
        for load, work in (
            (Load(mode="open", rate=RATE, arrival="constant"), open_loop(endpoint, [request], arrivals)),
            (Load(mode="closed", concurrency=1), closed_loop(endpoint, [request], concurrency=1, seconds=LASTS_S)),
        ):
            run = summarise(load, uvloop.run(beside_a_stall(work, pid)))
            found = {key: getattr(run.latency, key) for key in WANTED}
            rows.append([load.label, *(f"{value:.3f}" for value in found.values()), "; ".join(run.caveats) or "-"])
            if load.mode == "open":
                for key, wanted in WANTED.items():
                    off = abs((found[key] or 0) / wanted - 1)
                    report.target(f"a stall of 2 s: {key}, part by which it is not {wanted}", [off], most=0.02)
    report.table("A server that stands still for 2 s of 20", ["load", "p95 s", "p99 s", "p99.9 s", "told"], rows)


def main() -> None:
    options = harness.options(__doc__)
    columns = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "cpu": "generator, share of a core"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("hdrhistogram",))
    closed(report, options)
    opened(report, options)
    stalled(report)
    report.save()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        uvloop.run(serve(float(sys.argv[2])))
    else:
        main()
