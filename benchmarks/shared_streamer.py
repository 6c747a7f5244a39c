"""What does one batcher for all processes of a web server do, compared with a streamer in each of them?

gunicorn with 8 workers, threaded or with asyncio; each worker has a port of its own, and 16 connections of `wrk`. The
model holds 100 MiB and takes 5 ms + 0.2 ms n on a device that runs one batch at a time, whoever sends it. Memory is the
sum over all processes, with shared pages counted once (PSS). Then lone calls of a program without a web server.
"""

import contextlib
import functools
import json
import os
import socket
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
from closed_loop import percentiles
from processes import Processes

START_S = 90.0
WORKERS = 8
CONNECTIONS = 16  # of each worker
KINDS = {"each": "own", "shared": "shared"}
SERVERS = {
    "threads": ("-k", "gthread", "--threads", "16", "shared_streamer_app:wsgi"),
    "asyncio": ("-k", "uvicorn.workers.UvicornWorker", "shared_streamer_app:asgi"),
}


class WebServer(Processes):
    """gunicorn with the application. Paused unless inside `awake()`."""

    def __init__(self, server: str, kind: str) -> None:
        super().__init__()
        addresses = [f"127.0.0.1:{port}" for port in harness.free_ports(WORKERS)]
        self._urls = [f"http://{address}/" for address in addresses]
        options = ["-w", str(WORKERS), "--timeout", "0", "--keep-alive", "60", "-c", "python:shared_streamer_app"]
        for address in addresses:
            options += ["-b", address]
        command = [sys.executable, "-W", "ignore", "-m", "gunicorn", *options, *SERVERS[server]]
        try:
            path = os.pathsep.join([str(harness.HERE), os.environ.get("PYTHONPATH", "")])
            self._spawn(command, BENCH_KIND=kind, PYTHONPATH=path, PYTHONUNBUFFERED="1")
            self._wait(kind)
            self.stop()
        except BaseException:
            self.close()
            raise

    def _wait(self, kind: str) -> None:
        """Returns when every process has answered, and its model is loaded."""
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                for url in self._urls:
                    urllib.request.urlopen(url, timeout=START_S).close()
                if len(list(Path(self._folder).glob("loaded-*"))) == (WORKERS if kind == "own" else 1):
                    return
            if time.monotonic() > end:
                raise TimeoutError(f"gunicorn did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.1)

    def run(self, seconds: int) -> dict[str, Any]:
        """One run of `wrk`, and the memory of all processes after it."""
        with self.awake(), ThreadPoolExecutor(WORKERS) as pool:
            call = functools.partial(harness.wrk, body=b"1", content_type="text/plain", connections=CONNECTIONS)
            samples = list(pool.map(functools.partial(call, seconds=seconds), self._urls))
            members = self.members()
            return {
                **{key: sum(sample[key] for sample in samples) for key in ("rate", "errors")},
                **{key: statistics.median(sample[key] for sample in samples) for key in ("p50_ms", "p99_ms")},
                "memory_mib": sum(process.memory_full_info().pss for process in members) / 2**20,
                "processes": len(members),
            }


class Program(Processes):
    """A program with a streamer of its own and a shared one. Paused unless inside `awake()`."""

    def __init__(self) -> None:
        super().__init__()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(harness.HERE / "shared_streamer_app.py")]
            self._spawn(command, (theirs.fileno(),), BENCH_FD=str(theirs.fileno()))
        ours.settimeout(START_S)
        self._file = ours.makefile("rw", buffering=1)
        self._file.readline()
        self.stop()

    def run(self, kind: str, seconds: float) -> dict[str, float]:
        with self.awake():
            self._file.write(json.dumps([kind, seconds]) + "\n")
            found = json.loads(self._file.readline())
        return {"rate": len(found) / seconds, **percentiles(found)}


def main() -> None:
    options = harness.options(__doc__, seconds=3)
    columns = {
        "rate": "requests/s",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
        "memory_mib": "memory MiB",
        "processes": "processes",
    }
    report = harness.Report(__file__, __doc__, options, columns, libraries=("gunicorn", "uvicorn"))
    for server in SERVERS:
        with contextlib.ExitStack() as stack:
            servers = {who: stack.enter_context(WebServer(server, kind)) for who, kind in KINDS.items()}
            contenders = {who: functools.partial(each.run, options.seconds) for who, each in servers.items()}
            runs = harness.interleave(options.rounds, contenders)
        report.add({"gunicorn": server}, runs, base="shared")
        report.target(f"{server}: requests/s, x a streamer in each", report.ratios(runs, "shared", "each"), least=1.8)
        memory = report.ratios(runs, "shared", "each", "memory_mib")
        report.target(f"{server}: memory, x a streamer in each", memory, most=0.3)
    report.section("Lone calls of a model that does nothing")
    with Program() as program:
        runs = harness.interleave(
            options.rounds, {who: functools.partial(program.run, kind, 1) for who, kind in KINDS.items()}
        )
    report.add({"calls": "lone"}, runs, base="shared")
    more = [a["p50_ms"] - b["p50_ms"] for a, b in zip(runs["shared"], runs["each"], strict=True)]
    report.target("lone call: p50 ms more than a streamer of its own", more, most=0.25)
    report.save()


if __name__ == "__main__":
    main()
