"""How close do calls that only wait come to the ceiling if they overlap, and what do a thousand open streams cost?

The model awaits 50 ms. `overlapping` has `concurrency = 200`, `one by one` has `concurrency = 1`: the same model in
batches of up to 64, one after the other. The ceiling is 200 clients / 50 ms. Then 1,000 clients hold a stream open,
of which they have read the first part; memory is the proportional set size of server and worker.
"""

import asyncio
import functools
import random
import tempfile
from pathlib import Path

import harness
import uvloop
from closed_loop import Sample, wrk
from text_generation import Service

CLIENTS, WAIT_S = 200, 0.05
STREAMS = 1000
COLUMNS = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "memory_mb": "MB"}
MODEL = f"""
import asyncio


async def overlapping(items):
    await asyncio.sleep({WAIT_S})
    return items


class Open:
    async def predict(self, items):
        yield [b"part 1"] * len(items)
        await asyncio.Event().wait()
"""
CONFIG = f"""
[limits]
max_connections = {2 * STREAMS}

[models.overlapping]
target = "waits.py:overlapping"
batching = {{ concurrency = {CLIENTS} }}

[models.onebyone]
target = "waits.py:overlapping"
batching = {{ concurrency = 1 }}

[models.open]
target = "waits.py:Open"
batching = {{ concurrency = {STREAMS}, max_queue = {STREAMS} }}
"""


async def _streams(service: Service) -> Sample:
    head = "POST /predictions/open HTTP/1.1", "host: x", "content-type: application/json", "content-length: 1"

    async def opened() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write("\r\n".join((*head, "", "1")).encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(repr(answer[:300]))
        await reader.readuntil(b"part 1")
        return writer

    writers = await asyncio.gather(*(opened() for _ in range(STREAMS)))
    memory = sum(process.memory_full_info().pss for process in service.members())
    for writer in writers:
        writer.close()
    return {"memory_mb": memory / 1e6}


def main() -> None:
    options = harness.options(__doc__, seconds=4)
    method = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind."
    report = harness.Report(__file__, __doc__, options, COLUMNS, (), method, "")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "waits.py").write_text(MODEL)
        Path(folder, "penstock.toml").write_text(CONFIG)
        with Service(Path(folder, "penstock.toml"), lambda length, rng: random.random()) as service, service.awake():
            url = f"http://127.0.0.1:{service.port}/predictions"
            calls = {
                label: functools.partial(wrk, f"{url}/{model}", b"1", "application/json", CLIENTS, options.seconds)
                for label, model in (("overlapping", "overlapping"), ("one by one", "onebyone"))
            }
            runs = harness.interleave(options.rounds, calls)
            report.add({"clients": CLIENTS}, runs, "overlapping")
            share = [sample["rate"] * WAIT_S / CLIENTS for sample in runs["overlapping"]]
            report.target("overlapping: share of the ceiling", share, least=0.95)
            streams = harness.interleave(options.rounds, {"streams": lambda: uvloop.run(_streams(service))})
            report.add({"clients": STREAMS}, streams, "streams")
            report.target("1,000 open streams, MB", [sample["memory_mb"] for sample in streams["streams"]], most=300)
    report.save()


if __name__ == "__main__":
    main()
