"""How long does an interactive request wait while a bulk job saturates the model?

The models take 20 ms + 1 ms per row, and 250 ms + 1.6 ms per row, with at most 64 rows, on 1, 2 and 4 instances. The
bulk job keeps requests of `prebatch` rows (15 kB each, binary Open Inference, `x-priority: 1`) in flight, enough for
three full batches per instance. Single requests arrive as well, 5 per second, Poisson. Latency is in units of a full
batch; percentiles cover all rounds. "bulk" is the throughput of the job relative to full batches; "bulk alone" is the
same without the single requests.
"""

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import harness
import numpy as np
import uvloop

from penstock.client.endpoint import Endpoint
from penstock.perf.bench.load import Samples, closed_loop, http_request, open_loop
from penstock.serving.protocols.oip_messages import encode_arrays

BODY = b"[12345]"  # a list, so that the model can tell it from Open Inference
RATE = 5.0
WARM_S = 2.0
LEARN_S = 4  # of the bulk job, before: the server knows what a batch takes after eight of them
ROWS = 64
FRAME_BYTES = 15_000
MODELS = {"by_rows": (0.020, 0.001), "by_launches": (0.250, 0.0016)}


async def beside(
    endpoint: Endpoint, lone: bytes, times: Sequence[float], bulk: bytes, in_flight: int, seconds: float
) -> tuple[Samples, Samples]:
    """Single requests at their times, while `in_flight` bulk requests run: the samples of both."""
    return await asyncio.gather(
        open_loop(endpoint, [lone], times, connections=8),
        closed_loop(endpoint, [bulk], concurrency=in_flight, seconds=seconds),
    )


def bulk_request(endpoint: Endpoint, model: str, rows: int) -> bytes:
    """One prebatch, with its head."""
    frames = np.zeros((rows, FRAME_BYTES), np.uint8)
    index = np.arange(rows, dtype=np.int64)
    head, buffers = encode_arrays({"frames": frames, "frame_index": index})
    body = b"".join([head, *(bytes(b) for b in buffers)])
    headers = {"x-priority": "1", "content-type": "application/octet-stream"}
    headers["inference-header-content-length"] = str(len(head))
    return http_request(endpoint, "POST", f"/v2/models/{model}/infer", headers, body)


def measured(server: harness.Server, prebatch: int, rate: float, seconds: int, seed: int) -> dict[str, Any]:
    """One run: latencies of the single requests in batch times, and rows of the bulk job relative to capacity."""
    w = server.workload
    a, b = MODELS[w.model]
    batch_s = a + b * ROWS
    in_flight = -(-3 * ROWS // prebatch) * w.instances
    times = harness.poisson(rate, WARM_S + seconds, seed) if rate else [WARM_S + seconds]
    endpoint, one = harness.post(server.url, BODY, "application/json")
    bulk = bulk_request(endpoint, w.model, prebatch)
    with server.awake():
        run, job = uvloop.run(beside(endpoint, one, times, bulk, in_flight, WARM_S + seconds))
    for what, samples in (("lone requests", run), ("bulk", job)):
        if any(status != 200 for status in samples.status):
            raise SystemExit(f"{what}: status {sorted(set(samples.status))}, {samples.first_error}")
    done_s = [at + took for at, took in zip(job.intended_s, job.latency_s, strict=True)]
    rows = prebatch * sum(WARM_S <= t < WARM_S + seconds for t in done_s) / seconds
    lone = [x / batch_s for t, x in zip(times, run.latency_s, strict=True) if t >= WARM_S]
    late = [x / batch_s for x in run.late_s]
    return {"bulk": (rows + rate) * batch_s / ROWS / w.instances, "lone": lone, "late": late}


def percentile(values: Sequence[float], p: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * p // 100)]


def cell(report: harness.Report, server: harness.Server, prebatch: int, options: argparse.Namespace) -> list[str]:
    """One row of the table, and its targets."""
    w = server.workload
    lone: list[float] = []
    late: list[float] = []
    shares: list[float] = []
    alone: list[float] = []
    for seed in range(1, options.rounds + 1):
        beside = measured(server, prebatch, RATE, options.seconds, seed)
        lone += beside["lone"]
        late += beside["late"]
        shares.append(beside["bulk"])
        alone.append(measured(server, prebatch, 0, max(3, options.seconds // 4), seed)["bulk"])
    what = f"{w.model}, {w.instances} instances, prebatch {prebatch}"
    report.target(f"{what}: p99 of a lone request, batch times", [percentile(lone, 99)], most=2)
    report.target(f"{what}: bulk, over bulk alone", [x / y for x, y in zip(shares, alone, strict=True)], least=0.93)
    middle = [sorted(values)[len(values) // 2] for values in (shares, alone)]
    cells = [percentile(lone, 50), percentile(lone, 99), max(lone), percentile(late, 99), *middle]
    return [w.model, str(w.instances), str(prebatch), str(len(lone)), *(f"{x:.2f}" for x in cells)]


def main() -> None:
    options = harness.options(__doc__, seconds=20)
    method = f"{options.rounds} rounds of {options.seconds} s, those of the bulk job alone between them."
    report = harness.Report(__file__, __doc__, options, {}, method=method)
    header = [
        "model",
        "instances",
        "prebatch",
        "lone requests",
        "p50",
        "p99",
        "most",
        "sent late, p99",
        "bulk",
        "bulk alone",
    ]
    rows = []
    for model in MODELS:
        workload = harness.Workload(model, BODY, [12345], max_batch=ROWS)
        for instances in (1, 2, 4):
            contender = {"penstock": ("penstock", dataclasses.replace(workload, instances=instances))}
            with harness.serving(contender) as servers:
                measured(servers["penstock"], ROWS, 0, LEARN_S, 0)
                for prebatch in (32, 64):
                    rows.append(cell(report, servers["penstock"], prebatch, options))
                    print(*rows[-1], flush=True)
    report.table("Latency of lone requests in batch times; bulk rows over the capacity", header, rows)
    report.save()


if __name__ == "__main__":
    main()
