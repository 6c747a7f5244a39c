"""Does the throughput of Redis workers grow with their number, and what is lost when one of them goes?

Each worker is a process of `penstock worker` with one copy of a model that sleeps 10 ms + 2 ms per item
(`models.heavy`, 381 items/s in batches of 16). One program asks for numbers with a RedisStreamer and keeps four
batches per worker in flight. Every answer must be the number that was asked for. "lost" counts the calls that were
not answered at all, that failed, or that got another number. In the last two rows one of four workers ends in the
middle of the run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import harness

from penstock import RedisStreamer

BATCH = 16
BATCHES_IN_FLIGHT = 4  # per worker
LEASE_S = 2  # after which the requests of a killed worker run elsewhere
WARM_S = 0.5
LIMIT_S = 30.0


@contextlib.contextmanager
def broker() -> Iterator[str]:
    (port,) = harness.free_ports(1)
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"localhost:{port}"
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def workers(count: int, address: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Worker processes, once all of them serve."""
    options = ["--redis", address, "--max-batch-size", str(BATCH), "--lease", str(LEASE_S)]
    command = [sys.executable, "-m", "penstock.cli.main", "worker", "models.py:heavy", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = {"cwd": harness.HERE, "env": env, "text": True, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, **quiet) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            if "serves" not in process.stdout.readline():
                raise RuntimeError("a worker did not start")
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate(timeout=60)


class Load:
    """Calls of BATCH numbers each, `depth` of them in flight."""

    def __init__(self, streamer: RedisStreamer, depth: int) -> None:
        self._streamer, self._depth = streamer, depth
        self._ended: SimpleQueue[tuple[list[int], float, Future]] = SimpleQueue()
        self._in_flight, self._next = 0, 0
        self.lost, self.longest_s = 0, 0.0

    def run(self, seconds: float) -> float:
        """Answered numbers per second; the calls in flight at the end go on."""
        begin, count = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds:
            while self._in_flight < self._depth:
                self._ask()
            count += self._finish()
        return count / (time.perf_counter() - begin)

    def end(self) -> None:
        """Waits for the calls in flight."""
        while self._in_flight:
            self._finish()

    def _ask(self) -> None:
        numbers, sent = list(range(self._next, self._next + BATCH)), time.perf_counter()
        self._next += BATCH
        self._in_flight += 1
        call = self._streamer.submit(numbers, deadline=LIMIT_S)
        call.add_done_callback(lambda call: self._ended.put((numbers, sent, call)))

    def _finish(self) -> int:
        """The right answers of the next call that ends."""
        numbers, sent, call = self._ended.get(timeout=2 * LIMIT_S)
        self._in_flight -= 1
        right = call.exception() is None and call.result() == numbers
        self.longest_s = max(self.longest_s, time.perf_counter() - sent)
        self.lost += 0 if right else BATCH
        return BATCH if right else 0


def measure(count: int, seconds: float, number: int | None = None) -> harness.Sample:
    """A run with `count` workers; with a signal `number`, one of them receives it half-way."""
    with broker() as address, workers(count, address) as started, RedisStreamer(address) as streamer:
        load = Load(streamer, count * BATCHES_IN_FLIGHT)
        load.run(WARM_S)
        if number is None:
            rate = load.run(seconds)
        else:
            load.run(seconds / 2)
            started[0].send_signal(number)
            rate = load.run(seconds / 2)
        load.end()
        return {"rate": rate, "lost": float(load.lost), "longest_s": load.longest_s}


def main() -> None:
    options = harness.options(__doc__, seconds=6)
    columns = {"rate": "items/s", "lost": "lost", "longest_s": "longest call s"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=["redis", "hiredis"])
    runs = harness.interleave(
        options.rounds,
        {
            "1 worker": lambda: measure(1, options.seconds),
            "2 workers": lambda: measure(2, options.seconds),
            "4 workers": lambda: measure(4, options.seconds),
            "4 workers, one gets SIGTERM": lambda: measure(4, options.seconds, signal.SIGTERM),
            "4 workers, one is killed": lambda: measure(4, options.seconds, signal.SIGKILL),
        },
    )
    report.add({}, runs, base="4 workers")
    report.target("2 workers: x 1 worker", report.ratios(runs, "2 workers", "1 worker"), least=1.8)
    report.target("4 workers: x 1 worker", report.ratios(runs, "4 workers", "1 worker"), least=3.6)
    for name in ("4 workers, one gets SIGTERM", "4 workers, one is killed"):
        report.target(f"{name}: lost in all rounds", [sum(sample["lost"] for sample in runs[name])], most=0)
    report.save()


if __name__ == "__main__":
    main()
