"""How long does a request take with `penstock.Client`, next to other Python clients?

The server is `penstock serve` with models that do almost nothing; every client checks its first
answer. A request is a JSON of 50 bytes, or a tensor of 600 KB whose sum is the answer: our client and tritonclient
encode it for each request, the others send a body made beforehand. One thread sends one request after the other, and
then 16 tasks of one event loop do.
"""

import asyncio
import http.client
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any
from urllib.parse import urlsplit

import harness
import httpx
import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import uvloop

import penstock
from penstock.perf.bench.server import ServerProcess
from penstock.serving.protocols.oip_messages import encode_arrays

VALUE = {"id": 12345, "text": "a small request of 50 bytes"}
TENSOR = np.ones((1, 150_000), np.float32)
TOTAL = float(TENSOR.sum())
TASKS = 16
WARM_S = 0.2
JSON = {"Content-Type": "application/json"}
PREDICT, INFER = "/predictions/echo", "/v2/models/total/infer"

Call = Callable[[], Any]
AsyncCall = Callable[[], Awaitable[Any]]


def prepared() -> tuple[bytes, dict[str, str]]:
    """Body and headers of the tensor's request."""
    head, buffers = encode_arrays({"x": TENSOR}, binary_outputs=True)
    return b"".join([head, *buffers]), {"Inference-Header-Content-Length": str(len(head))}


def triton_input(module: Any) -> Any:
    found = module.InferInput("x", list(TENSOR.shape), "FP32")
    found.set_data_from_numpy(TENSOR)
    return found


def synchronous(url: str, stack: ExitStack) -> dict[str, dict[str, Call]]:
    """Kind of request -> client -> a call."""
    ours = stack.enter_context(penstock.Client(url))
    theirs = stack.enter_context(httpx.Client(base_url=url))
    tritons = triton.InferenceServerClient(urlsplit(url).netloc)
    stack.callback(tritons.close)
    plain = http.client.HTTPConnection(urlsplit(url).netloc)
    stack.callback(plain.close)
    body, headers = prepared()

    def plainly(path: str, body: bytes, headers: dict[str, str]) -> bytes:
        plain.request("POST", path, body, headers)
        return plain.getresponse().read()

    def by_triton() -> Any:
        return tritons.infer("total", [triton_input(triton)]).as_numpy("total")

    return {
        "JSON, 50 bytes": {
            "penstock.Client": lambda: ours.predict("echo", VALUE),
            "httpx": lambda: theirs.post(PREDICT, json=VALUE).json(),
            "http.client": lambda: json.loads(plainly(PREDICT, json.dumps(VALUE).encode(), JSON)),
        },
        "tensor, 600 KB": {
            "penstock.Client": lambda: ours.infer("total", {"x": TENSOR}).outputs["total"],
            "tritonclient.http": by_triton,
            "httpx": lambda: theirs.post(INFER, content=body, headers=headers).content,
            "http.client": lambda: plainly(INFER, body, headers),
        },
    }


async def asynchronous(url: str, stack: AsyncExitStack) -> dict[str, dict[str, AsyncCall]]:
    """The same for 16 tasks."""
    ours = await stack.enter_async_context(penstock.AsyncClient(url))
    theirs = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
    tritons = triton_aio.InferenceServerClient(urlsplit(url).netloc)
    stack.push_async_callback(tritons.close)
    body, headers = prepared()

    async def ours_infer() -> Any:
        return (await ours.infer("total", {"x": TENSOR})).outputs["total"]

    async def httpx_json() -> Any:
        return (await theirs.post(PREDICT, json=VALUE)).json()

    async def httpx_tensor() -> bytes:
        return (await theirs.post(INFER, content=body, headers=headers)).content

    async def by_triton() -> Any:
        return (await tritons.infer("total", [triton_input(triton)])).as_numpy("total")

    return {
        "JSON, 50 bytes": {"penstock.AsyncClient": lambda: ours.predict("echo", VALUE), "httpx": httpx_json},
        "tensor, 600 KB": {
            "penstock.AsyncClient": ours_infer,
            "tritonclient.http.aio": by_triton,
            "httpx": httpx_tensor,
        },
    }


def check(answer: Any) -> None:
    """Raises if an answer is wrong."""
    if isinstance(answer, bytes):
        answer = np.frombuffer(answer[-4:], np.float32)
    assert answer == VALUE if isinstance(answer, dict) else float(answer[0]) == TOTAL, answer


async def crowd(url: str, kind: str, who: str, seconds: float) -> harness.Sample:
    """Requests/s and latency of 16 tasks with one client."""
    async with AsyncExitStack() as stack:
        call = (await asynchronous(url, stack))[kind][who]
        check(await call())
        latencies: list[float] = []
        end = time.perf_counter() + seconds

        async def loop() -> None:
            while (start := time.perf_counter()) < end:
                await call()
                latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(loop() for _ in range(TASKS)))
        return {"rate": len(latencies) / seconds, **harness.percentiles(latencies)}


def alone(call: Call, seconds: float) -> harness.Sample:
    harness.timed(call, WARM_S)
    return harness.timed(call, seconds)


async def names(url: str) -> dict[str, list[str]]:
    async with AsyncExitStack() as stack:
        return {kind: list(calls) for kind, calls in (await asynchronous(url, stack)).items()}


def main() -> None:
    options = harness.options(__doc__, seconds=1)
    columns = {"p50_ms": "p50 ms", "p99_ms": "p99 ms", "rate": "requests/s"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("httpx", "tritonclient"))
    keys = ["--set", "server.grpc_port=0"]
    with ServerProcess([f"{harness.HERE}/models.py:{name}" for name in ("echo", "total")] + keys) as server:
        url = server.urls["inference"]
        with ExitStack() as stack:
            for kind, calls in synchronous(url, stack).items():
                for call in calls.values():
                    check(call())
                runs = harness.interleave(
                    options.rounds, {who: lambda c=call: alone(c, options.seconds) for who, call in calls.items()}
                )
                compare(report, "one thread", kind, runs, "penstock.Client")
        for kind, contenders in uvloop.run(names(url)).items():
            loops = {who: lambda k=kind, w=who: uvloop.run(crowd(url, k, w, options.seconds)) for who in contenders}
            compare(report, f"{TASKS} tasks", kind, harness.interleave(options.rounds, loops), "penstock.AsyncClient")
    report.save()


def compare(report: harness.Report, callers: str, kind: str, runs: harness.Runs, ours: str) -> None:
    """Adds the rows, and the targets: as fast as the general client and as the one for tensors."""
    report.add({"callers": callers, "request": kind}, runs, base=ours)
    for other in [name for name in runs if name.startswith(("httpx", "triton"))]:
        ratios = [a["rate"] / b["rate"] for a, b in zip(runs[ours], runs[other], strict=True)]
        report.target(f"{callers}, {kind}: requests/s, times {other}", ratios, least=1.0)


if __name__ == "__main__":
    main()
