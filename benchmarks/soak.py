"""Does a model stay correct for half an hour beside one that leaks and one that crashes?

One server has three models: "good" triples numbers, "leaking" keeps 20 KB of each item, "crashing" ends its process by
a segmentation fault at one item in a hundred. "good" gets 80 % of what it sustains in a closed loop, the others 20
requests/s each, all as open loops. Every answer of "good" is checked. Once a minute the memory and the descriptors of
the server and its workers are read; the largest worker, which leaks, does not count. Exits with 1 if "good" gave a
wrong answer or none, if memory or descriptors grew, or if the log does not report the leak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from penstock.client.endpoint import Endpoint
from penstock.perf.bench.arrivals import Arrival, times
from penstock.perf.bench.figures import percentile
from penstock.perf.bench.load import Samples, closed_loop, open_loop

APP = """
import os, signal, time

class Good:
    def predict(self, items):
        time.sleep(0.004 + 0.0002 * len(items))
        return [3 * item for item in items]

class Leaking:
    def __init__(self):
        self.kept = []

    def predict(self, items):
        self.kept += [os.urandom(20_000) for _ in items]
        return items

class Crashing:
    def predict(self, items):
        if any(item % 100 == 0 for item in items):
            os.kill(os.getpid(), signal.SIGSEGV)
        return items
"""
MODELS = ("good", "leaking", "crashing")
RATE = 20.0  # of the two bad models
CLIENTS = 64  # of the closed loop that finds the rate of the good one
SHARE = 0.8
SEGMENT_S = 60.0
GROWTH = 1.05  # of memory after the first fifth, plus as many bytes:
SPARE_BYTES = 16 * 2**20
LEAK = re.compile(r"memory_grows\b.*\bleaking\b")
SPARE_FILES = 8


class Reading(NamedTuple):
    """What the server and its workers hold, without the largest worker."""

    nbytes: int
    files: int
    leaking_bytes: int


def read(pid: int) -> Reading:
    server = psutil.Process(pid)
    nbytes, files, workers = server.memory_info().rss, server.num_fds(), []
    for child in server.children(recursive=True):
        try:
            workers.append(child.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    *others, largest = sorted(workers)
    return Reading(nbytes + sum(others), files, largest)


def requests(model: str, first: int, count: int) -> list[bytes]:
    head = f"POST /predictions/{model} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    bodies = (b"%d" % number for number in range(first, first + count))
    return [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


async def load(endpoint: Endpoint, model: str, rate: float, first: int, seconds: float) -> Samples:
    """One segment of a model's load: every request has a number of its own."""
    arrivals = times(Arrival("poisson"), rate, seconds, first)

    def check(number: int, status: int, body: bytes) -> bool:
        return model != "good" or status != 200 or body == b"%d" % (3 * (first + number))

    sent = requests(model, first, len(arrivals))
    return await open_loop(endpoint, sent, arrivals, seconds=seconds, connections=32, patience_s=30, check=check)


async def soak(endpoint: Endpoint, pid: int, minutes: float) -> tuple[dict[int, int], list[Reading], list[float]]:
    """(the statuses of the good model, the readings, the latencies of the good model)."""
    alone = await closed_loop(endpoint, requests("good", 1, 1000), concurrency=CLIENTS, seconds=5.0)
    rate = SHARE * sum(status == 200 for status in alone.status) / alone.seconds
    print(f"good: {rate:,.0f} requests/s, {SHARE:.0%} of what {CLIENTS} clients get", flush=True)
    statuses: dict[int, int] = {}
    readings, latencies, first = [], list[float](), 1
    end = time.monotonic() + 60 * minutes
    while (left := end - time.monotonic()) > 1:
        seconds = min(SEGMENT_S, left)
        rates = {"good": rate, "leaking": RATE, "crashing": RATE}
        runs = await asyncio.gather(*(load(endpoint, model, rates[model], first, seconds) for model in MODELS))
        first += len(runs[0].status)
        for status in runs[0].status:
            statuses[status] = statuses.get(status, 0) + 1
        latencies += runs[0].latency_s
        readings.append(found := read(pid))
        bad = {
            model: sum(s == 200 for s in run.status) / len(run.status) for model, run in zip(MODELS, runs, strict=True)
        }
        shares = ", ".join(f"{model} {share:.2%}" for model, share in bad.items())
        print(
            f"{len(readings):3d}: answered {shares}; {found.nbytes / 2**20:,.0f} MiB, {found.files} files, "
            f"leaking worker {found.leaking_bytes / 2**20:,.0f} MiB",
            flush=True,
        )
    return statuses, readings, latencies


def middle(readings: list[Reading]) -> Reading:
    """The median of each value."""
    return Reading(*(round(statistics.median(values)) for values in zip(*readings, strict=True)))


def failures(statuses: dict[int, int], readings: list[Reading], log: str) -> list[str]:
    found = []
    if statuses.keys() != {200}:
        found.append(f"good: statuses {statuses}; -3 is a wrong answer")
    part = max(1, len(readings) // 5)  # medians, because a reading may meet a restarting worker or open connections
    settled, last = middle(readings[part : 2 * part] or readings), middle(readings[-part:])
    if last.nbytes > GROWTH * settled.nbytes + SPARE_BYTES:
        found.append(f"memory grew from {settled.nbytes:,} to {last.nbytes:,} bytes")
    if last.files > settled.files + SPARE_FILES:
        found.append(f"open files grew from {settled.files} to {last.files}")
    if not LEAK.search(log):
        found.append("the log does not report the leak")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes: float = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        app, log = Path(folder) / "app.py", Path(folder) / "log"
        app.write_text(APP)
        models = [f"{name}={app}:{name.capitalize()}" for name in MODELS]
        ready, write = os.pipe()
        command = [sys.executable, "-m", "penstock.cli.main", "serve", *models, "--port", "0"]
        command += ["--set", "server.management_port=0", "--set", "server.metrics_port=0"]
        with log.open("wb") as file:
            server = subprocess.Popen(
                command, stdout=file, stderr=file, pass_fds=[write], env={**os.environ, "PENSTOCK_READY_FD": str(write)}
            )
        os.close(write)
        try:
            with os.fdopen(ready) as lines:
                url: str = json.loads(lines.readline())["inference"]
            host, _, port = url.removeprefix("http://").partition(":")
            statuses, readings, latencies = uvloop.run(soak(Endpoint(host, int(port)), server.pid, minutes))
        finally:
            server.terminate()
            server.wait(60)
        text = log.read_text(errors="replace")
    latencies.sort()
    print(f"good: {sum(statuses.values()):,} requests, statuses {statuses}, p99 {percentile(latencies, 0.99):.3f} s")
    print(f"exit status of the server after SIGTERM: {server.returncode}")
    print(*[line for line in text.splitlines() if LEAK.search(line)][:3], sep="\n")
    wrong = failures(statuses, readings, text)
    print(*wrong or ["all correct; memory and open files are flat; the leak is reported"], sep="\n")
    return bool(wrong or server.returncode)


if __name__ == "__main__":
    sys.exit(main())
