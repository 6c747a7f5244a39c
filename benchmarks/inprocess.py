"""How many items per second pass through Penstock inside a program, and how long does a single call take?

The model does nothing and runs in a thread and in a process. Calls use the asyncio interface (`Engine`: 256 tasks
with one item per call, 8 tasks with 64) and the synchronous one (`Portal`: 32 threads, one item per call), each with
a new engine. service_streamer is the peer of the synchronous interface, with the best of several batch sizes (1, or
up to 16, 32 or 64 within 1 ms).
"""

import asyncio
import functools
import json
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import harness
import uvloop

import penstock
from penstock.config.schema import ModelConfig

THREADS = 32
SIZES = (1, 16, 32, 64)
WARM_S = 0.3


def config(transport: str) -> ModelConfig:
    return ModelConfig(target=f"{harness.HERE}/models.py:echo", transport=transport)


def asyncio_face(transport: str, tasks: int, items: int, seconds: float) -> harness.Sample:
    """Items/s and latency per call, for a number of tasks and items per call; a single item uses `infer`."""

    async def run() -> harness.Sample:
        async with penstock.Engine() as engine:
            await engine.load("echo", config(transport))
            call = functools.partial(engine.infer, "echo", 1)
            if items > 1:
                call = functools.partial(engine.infer_many, "echo", list(range(items)))
            await crowd(call, tasks, WARM_S)
            sample = await crowd(call, tasks, seconds)
            return {**sample, "rate": sample["rate"] * items}

    return uvloop.run(run())


async def crowd(call: Callable[[], Awaitable[Any]], tasks: int, seconds: float) -> harness.Sample:
    """Calls per second of `tasks` that each await one call after the other."""
    latencies: list[float] = []
    start = time.perf_counter()
    end = start + seconds

    async def loop() -> None:
        last = time.perf_counter()
        while last < end:
            await call()
            now = time.perf_counter()
            latencies.append(now - last)
            last = now

    await asyncio.gather(*(loop() for _ in range(tasks)))
    return {"rate": len(latencies) / (time.perf_counter() - start), **harness.percentiles(latencies)}


def sync_face(transport: str, threads: int, seconds: float) -> harness.Sample:
    """Items/s and latency of `predict` with one item, from a number of threads."""
    with penstock.Portal() as portal:
        portal.load("echo", config(transport))

        def call() -> None:
            portal.predict("echo", [1])

        crowd_of_threads(call, threads, WARM_S)
        return crowd_of_threads(call, threads, seconds)


def crowd_of_threads(call: Callable[[], object], threads: int, seconds: float) -> harness.Sample:
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    def loop() -> None:
        last = time.perf_counter()
        while last < end:
            call()
            now = time.perf_counter()
            latencies.append(now - last)
            last = now

    crew = [threading.Thread(target=loop) for _ in range(threads)]
    start = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return {"rate": len(latencies) / (time.perf_counter() - start), **harness.percentiles(latencies)}


def service_streamer(transport: str, threads: int, size: int, seconds: float) -> harness.Sample:
    """The same for the peer, in its own Python, with batches of up to `size`."""
    command = [harness.python_of("service_streamer"), str(harness.HERE / "peers" / "inprocess_service_streamer.py")]
    command += [transport, str(threads), str(size), str(seconds), str(WARM_S)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    started, seconds_run, latencies = json.loads(out.splitlines()[-1])
    return {"rate": len(latencies) / (seconds_run - started), **harness.percentiles(latencies)}


def best_size(transport: str, threads: int) -> int:
    """The best batch size for the peer."""
    return max(SIZES, key=lambda size: service_streamer(transport, threads, size, WARM_S)["rate"])


def main() -> None:
    options = harness.options(__doc__, seconds=1, peers=("service_streamer",))
    columns = {"rate": "items/s", "p50_ms": "p50 ms of a call", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    s = options.seconds
    for transport, most in (("thread", 100_000), ("process", 60_000)):
        faces: dict[str, dict[str, Callable[[], harness.Sample]]] = {
            "256 tasks, 1 item": {"asyncio": lambda t=transport: asyncio_face(t, 256, 1, s)},
            "8 tasks, 64 items": {"asyncio": lambda t=transport: asyncio_face(t, 8, 64, s)},
            f"{THREADS} threads, 1 item": {"sync": lambda t=transport: sync_face(t, THREADS, s)},
            "lone call": {
                "asyncio": lambda t=transport: asyncio_face(t, 1, 1, s),
                "sync": lambda t=transport: sync_face(t, 1, s),
            },
        }
        for callers, threads in ((f"{THREADS} threads, 1 item", THREADS), ("lone call", 1)) if options.peers else ():
            size = best_size(transport, threads)
            peer = functools.partial(service_streamer, transport, threads, size, s)
            faces[callers][f"service_streamer, batches of {size}"] = peer
        for callers, contenders in faces.items():
            runs = harness.interleave(options.rounds, contenders)
            report.add({"transport": transport, "callers": callers}, runs, base="sync")
            for face in (f for f in ("asyncio", "sync") if f in runs):
                rates, p50 = ([x[k] for x in runs[face]] for k in ("rate", "p50_ms"))
                what = f"{transport}, {face}, {callers}"
                if callers == "lone call":
                    report.target(f"{what}: p50 ms", p50, most=0.3)
                else:
                    report.target(f"{what}: items/s", rates, least=most if face == "asyncio" else 20_000)
    report.save()


if __name__ == "__main__":
    main()
