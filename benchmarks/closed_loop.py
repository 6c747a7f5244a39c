"""Closed loops: one run of `wrk`, of `h2load`, or of a repeated call."""

import asyncio
import json
import math
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Sample = dict[str, float]

MANY = 128  # connections; of fewer, the client's own turns are too large a part
AT_WORK = 0.8  # of them at least: 0.9 is usual, the rest is what the client takes between two requests
PROCESSES = 8  # of `python_loops`
TURNS = 4  # of each connection in a run; in a shorter run the answers that are still to come hide too much

WRK = """
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = "{content_type}"
{headers}
file:close()
function done(summary, latency)
  local e = summary.errors
  io.write(string.format('\\nRESULT [%d, %d, %d, %d, %d, %f]\\n', summary.duration, summary.requests,
    e.connect + e.read + e.write + e.status + e.timeout, latency:percentile(50), latency:percentile(99),
    summary.requests > 0 and latency.mean or 0))
end
"""


def wrk(
    url: str,
    body: bytes,
    content_type: str,
    connections: int,
    seconds: int,
    headers: Mapping[str, object] | None = None,
) -> Sample:
    """Requests/s (only 2xx and 3xx answers count), p50, p99, errors and requests in flight of one run.

    A run with many connections is marked `invalid` if not nearly all of them were busy: it measures a queue of
    connections or a saturated client, not the server.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, script = Path(folder, "body"), Path(folder, "wrk.lua")
        file.write_bytes(body)
        lines = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in (headers or {}).items())
        script.write_text(WRK.format(body=file, content_type=content_type, headers=lines))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script), url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^RESULT (.*)$", out, re.MULTILINE)
    assert found is not None, out
    duration_us, requests, errors, p50_us, p99_us, mean_us = json.loads(found[1])
    sample = {"rate": max(0, requests - errors) / duration_us * 1e6, "errors": errors}
    if not requests:
        return sample
    # by Little's law; the last answer of each connection was still to come when the run ended
    under_way = requests * mean_us / max(duration_us - mean_us, mean_us)
    sample |= {"p50_ms": p50_us / 1e3, "p99_ms": p99_us / 1e3, "mean_ms": mean_us / 1e3, "under_way": under_way}
    if connections >= MANY and duration_us > TURNS * mean_us and under_way < AT_WORK * connections:
        sample["invalid"] = 1
    return sample


def python_loops(
    url: str,
    body: bytes,
    content_type: str,
    connections: int,
    seconds: int,
    headers: Mapping[str, object] | None = None,
) -> Sample:
    """Like `wrk`, by processes with Penstock's own load generator: where wrk cannot be installed."""
    count = min(PROCESSES, connections)
    shares = [connections // count + (i < connections % count) for i in range(count)]
    told = {"content-type": content_type, **{name: str(value) for name, value in (headers or {}).items()}}
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        runs = [pool.submit(_python_loop, url, body, told, share, seconds) for share in shares]
        latencies = [latency for run in runs for latency in run.result()]
    answered = [latency for latency in latencies if latency < math.inf]
    return {
        "rate": len(answered) / seconds, "errors": len(latencies) - len(answered), **percentiles(answered),
    }  # fmt: skip


def _python_loop(url: str, body: bytes, headers: dict[str, str], connections: int, seconds: int) -> list[float]:
    """Latencies in s, infinite for a request without a good answer."""
    from penstock.client.endpoint import parse_url
    from penstock.perf.bench.load import closed_loop, http_request

    endpoint = parse_url(url.removesuffix(path := urlsplit(url).path))
    request = http_request(endpoint, "POST", path, headers, body)
    found = asyncio.run(closed_loop(endpoint, [request], concurrency=connections, seconds=seconds))
    pairs = zip(found.latency_s, found.status, strict=True)
    return [latency if 200 <= status < 300 else math.inf for latency, status in pairs]


def h2load(url: str, message: bytes, seconds: int, streams: int) -> Sample:
    """gRPC calls per second over one connection, so many at once. Raises CalledProcessError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder, "body")
        body.write_bytes(b"\0" + struct.pack(">I", len(message)) + message)
        command = ["h2load", "-D", str(seconds), "--warm-up-time=1", "-c1", f"-m{streams}", "-w30", "-W30"]
        command += ["-d", str(body), "-H", "content-type: application/grpc", "-H", "te: trailers", url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"finished in [\d.]+\w+, ([\d.]+) req/s", out)
    failed = re.search(r"(\d+) failed, (\d+) errored", out)
    assert found is not None, out
    if failed is None or failed.groups() != ("0", "0"):
        raise subprocess.CalledProcessError(1, command, out)
    return {"rate": float(found[1])}


def timed(call: Callable[[], Any], seconds: float) -> Sample:
    """Calls per second and latency of `call`, repeated by this thread."""
    latencies: list[float] = []
    start = last = time.perf_counter()
    while last - start < seconds:
        call()
        now = time.perf_counter()
        latencies.append(now - last)
        last = now
    return {"rate": len(latencies) / (last - start), **percentiles(latencies)}


def percentiles(latencies_s: Sequence[float]) -> Sample:
    """p50 and p99 in ms; empty for no samples."""
    if not latencies_s:
        return {}
    ordered = sorted(latencies_s)
    return {f"p{p}_ms": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for p in (50, 99)}
