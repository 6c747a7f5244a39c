"""Does a server stay correct, and its memory flat, for half an hour of what real clients and models do?

Each phase has a server of its own (`--phases` selects some, `--minutes` scales all of them together):

- bad: a model stays correct beside one that leaks and one that crashes. "good" triples numbers, "leaking" keeps 20 KB
  of each item, "crashing" ends its process by a segmentation fault at one item in a hundred. "good" gets 80 % of what
  it sustains in a closed loop, the others 20 requests/s each, all as open loops. Every answer of "good" is checked.
- lone: one client, which sends its next request after each answer; three instances.
- expired: a million requests that wait in the queue until their time is over.
- http, grpc: a hundred thousand streams, each of which its client leaves after the first part.

The memory and the descriptors of the server and its workers are read again and again; in "bad" the largest worker,
which leaks, does not count. Exits with 1 if "good" gave a wrong answer or none, if the log does not report the leak, if
descriptors grew, or memory: in "bad" after the first fifth by 5 %, in the others within the last third by 1 %.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import uvloop

from penstock import AsyncClient
from penstock.client.endpoint import Endpoint, parse_url
from penstock.perf.bench.figures import percentile
from penstock.perf.bench.load import Samples, closed_loop, open_loop
from penstock.perf.bench.workload import Arrival, times

APP = """
import asyncio, os, signal, time

import numpy as np

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

class Echo:
    def predict(self, items):
        return items

class Slow:
    def predict(self, items):
        time.sleep(0.2)
        return items

class Parts:
    async def predict(self, items):
        for n in range(1000):
            yield [n if isinstance(item, int) else {"n": np.array([n])} for item in items]
            await asyncio.sleep(0.01)
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
FLAT = 1.01  # of memory within the last third of a phase
READINGS = 60  # of a phase
WHOLE_MINUTES = 30.0  # in which a million requests expire
EXPIRED, ABORTED = 1_000_000, 100_000
LEAVERS = 32  # clients that leave streams


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
    *others, largest = sorted(workers or [0])
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


# ---- the other phases: what they do for a while, and how many requests of which status they had

Count = dict[int, int]


def add(counted: Count, statuses: Any) -> None:
    for status in statuses:
        counted[status] = counted.get(status, 0) + 1


async def lone(urls: dict[str, str], seconds: float, done: Callable[[], bool], counted: Count) -> None:
    endpoint, sent = parse_url(urls["inference"]), requests("echo", 1, 1000)
    while not done():
        add(counted, (await closed_loop(endpoint, sent, concurrency=1, seconds=seconds / READINGS)).status)


async def expired(urls: dict[str, str], number: float, done: Callable[[], bool], counted: Count) -> None:
    endpoint, sent = parse_url(urls["inference"]), requests("slow", 1, 1000)
    while sum(counted.values()) - counted.get(200, 0) < number:
        run = await closed_loop(endpoint, sent, concurrency=512, at_least=max(1000, int(number / READINGS)))
        add(counted, run.status)


def streams(url: str, value: Any) -> Callable[..., Awaitable[None]]:
    async def leave(urls: dict[str, str], number: float, done: Callable[[], bool], counted: Count) -> None:
        async def one(client: AsyncClient) -> None:
            while counted.get(200, 0) < number:
                async with contextlib.aclosing(client.stream("parts", value)) as parts:
                    async for _ in parts:
                        break
                add(counted, [200])

        async with AsyncClient(urls[url]) as client:
            await asyncio.gather(*(one(client) for _ in range(LEAVERS)))

    return leave


SHORT = ["batching.timeout_s=0.05", "batching.max_batch_size=1", "batching.max_queue=4096"]
PHASES: dict[str, tuple[str, list[str], Callable[..., Awaitable[None]], float]] = {
    # model, its settings, what is done, how much of it in half an hour: seconds or requests
    "lone": ("echo", ["instances=3"], lone, 600.0),
    "expired": ("slow", SHORT, expired, EXPIRED),
    "http": ("parts", [], streams("inference", 1), ABORTED),
    "grpc": ("parts", [], streams("grpc", {"x": np.zeros((1, 1))}), ABORTED),
}


async def phase(name: str, urls: dict[str, str], pid: int, share: float) -> list[str]:
    """Runs one of PHASES. Returns what is wrong."""
    _, _, work, whole = PHASES[name]
    counted: Count = {}
    readings: list[Reading] = []
    began, over = time.monotonic(), False
    doing = asyncio.ensure_future(
        work(urls, whole * share, lambda: over or time.monotonic() > began + whole * share, counted)
    )
    async for reading in _readings(doing, pid):
        readings.append(reading)
    over = True
    await doing
    last = readings[-(len(readings) // 3) :]
    early, late = middle(last[: len(last) // 2]), middle(last[len(last) // 2 :])
    print(
        f"{name}: {sum(counted.values()):,} requests in {time.monotonic() - began:,.0f} s, statuses {counted}; "
        f"{readings[0].nbytes / 2**20:,.1f} MiB at first, in the last third {early.nbytes / 2**20:,.1f} and "
        f"{late.nbytes / 2**20:,.1f}; {late.files} files",
        flush=True,
    )
    wrong = []
    if late.nbytes > FLAT * early.nbytes:
        wrong.append(f"{name}: memory grew within the last third from {early.nbytes:,} to {late.nbytes:,} bytes")
    if late.files > early.files + SPARE_FILES:
        wrong.append(f"{name}: open files grew from {early.files} to {late.files}")
    if counted.keys() - {200, 503, 504}:
        wrong.append(f"{name}: statuses {counted}")
    return wrong


async def _readings(doing: asyncio.Future[None], pid: int) -> AsyncIterator[Reading]:
    """A reading a second until it is done, at least six; of the largest worker too."""
    count = 0
    while not doing.done() or count < 6:
        found = read(pid)
        yield found._replace(nbytes=found.nbytes + found.leaking_bytes)
        count += 1
        await asyncio.wait([doing], timeout=1.0)
        if doing.done():
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def serving(*models: str, settings: list[str]) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes], Path]]:
    """A server with models of APP: its addresses, its process, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        app, log = Path(folder) / "app.py", Path(folder) / "log"
        app.write_text(APP)
        ready, write = os.pipe()
        command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0"]
        command += [f"{name}={app}:{name.capitalize()}" for name in models]
        for setting in ("server.management_port=0", "server.metrics_port=0", *settings):
            command += ["--set", setting]
        with log.open("wb") as file:
            server = subprocess.Popen(
                command, stdout=file, stderr=file, pass_fds=[write], env={**os.environ, "PENSTOCK_READY_FD": str(write)}
            )
        os.close(write)
        try:
            with os.fdopen(ready) as lines:
                line = lines.readline()
            assert line, log.read_text(errors="replace")
            yield json.loads(line), server, log
        finally:
            server.terminate()
            server.wait(60)


def bad(share: float) -> list[str]:
    """The first phase. Returns what is wrong."""
    with serving(*MODELS, settings=[]) as (urls, server, log):
        statuses, readings, latencies = uvloop.run(soak(parse_url(urls["inference"]), server.pid, 10 * share))
        server.terminate()
        server.wait(60)
        text = log.read_text(errors="replace")
    latencies.sort()
    print(f"good: {sum(statuses.values()):,} requests, statuses {statuses}, p99 {percentile(latencies, 0.99):.3f} s")
    print(*[line for line in text.splitlines() if LEAK.search(line)][:3], sep="\n")
    wrong = failures(statuses, readings, text)
    return [*wrong, f"exit status {server.returncode}"] if server.returncode else wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["bad", *PHASES]
    parser.add_argument("--minutes", type=float, default=WHOLE_MINUTES, help="length of all phases together, about")
    parser.add_argument("--phases", nargs="+", choices=names, default=names)
    given = parser.parse_args()
    share = given.minutes / WHOLE_MINUTES
    wrong: list[str] = []
    for name in given.phases:
        if name == "bad":
            wrong += bad(share)
            continue
        model, settings, _, _ = PHASES[name]
        with serving(model, settings=[f"models.{model}.{each}" for each in settings]) as (urls, server, _):
            wrong += uvloop.run(phase(name, urls, server.pid, share))
        if server.returncode:
            wrong.append(f"{name}: exit status {server.returncode}")
    print(*wrong or ["all correct; memory and open files are flat"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
