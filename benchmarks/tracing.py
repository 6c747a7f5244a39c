"""What do traces cost: requests/s of `http_echo`'s small JSON at 64 connections, without tracing, at 1 % and at 10 %?

The collector, a process of its own, reads the spans and answers; it does not look at them. Tracing has its default
bound of 50 requests a second; "10 %, unbounded" shows what that saves. CPU counts the server's process.
"""

import asyncio
import contextlib
import functools
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import harness
import psutil
from http_echo import WORKLOADS

CONNECTIONS = 64
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
RATIOS = {
    "off": [],
    "1 %": ["tracing.ratio=0.01"],
    "10 %": ["tracing.ratio=0.1"],
    "10 %, unbounded": ["tracing.ratio=0.1", "tracing.max_per_s=1000000"],
}


def collect(pipe: Connection) -> None:
    """Sends its port, and answers every export until it is killed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                writer.write(ANSWER)

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """The URL of a collector."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}/v1/traces"
    finally:
        process.kill()
        process.join()


def measured(server: Any, seconds: int) -> harness.Sample:
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    sample = server.closed_loop(CONNECTIONS, seconds)
    after = process.cpu_times()
    spent_s = sum(after[:2]) - sum(before[:2])
    return {**sample, "cpu_us": spent_s / (sample["rate"] * seconds) * 1e6}


def main() -> None:
    options = harness.options(__doc__)
    columns = {"rate": "requests/s", "p99_ms": "p99 ms", "cpu_us": "CPU us"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("opentelemetry-sdk",))
    workload = WORKLOADS["JSON"]
    with collector() as url, contextlib.ExitStack() as stack:
        servers = {
            label: stack.enter_context(
                harness.Server("penstock", workload, *([*sets, f"tracing.endpoint={url}"] if sets else []))
            )
            for label, sets in RATIOS.items()
        }
        loops = {label: functools.partial(measured, server, options.seconds) for label, server in servers.items()}
        for loop in loops.values():
            loop()
        runs = harness.interleave(options.rounds, loops)
    report.add({"connections": CONNECTIONS}, runs)
    report.target("1 %: x requests/s without", report.ratios(runs, "1 %", "off"), least=0.97)
    report.target("10 %: x requests/s without", report.ratios(runs, "10 %", "off"), least=0.94)
    report.save()


if __name__ == "__main__":
    main()
