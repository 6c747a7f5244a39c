"""Do texts of different lengths share batches, and how near do they come to texts that were sorted beforehand?

Clients in closed loops send tokens of log-normal lengths from 8 to 256 (Open Inference, binary). "by shape" runs each
length in calls of its own, as without `pad`; "padded" pads. "one length" is the same number of texts with the mean
length. The oracle knows all texts: it sorts them, cuts them into batches of 64, and runs them in a plain loop in one
process, without a server. "launches" takes the time of a GPU, "encoder" computes on the CPU. On the server the model
shares the cores with the load generator and the server process.
"""

import itertools
import math
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import harness
import numpy as np
import uvloop
from servers import HERE, Penstock

from penstock.client.endpoint import parse_url
from penstock.perf.bench.figures import summarise
from penstock.perf.bench.load import closed_loop, http_request
from penstock.perf.bench.measurement import Load
from penstock.serving.protocols.oip_messages import encode_arrays

MOST_ROWS = 64
FEW, MANY = 32, 512
NAMES = ("input_ids", "attention_mask")
PAD = '{datatype = "INT64", shape = [-1, -1], pad = 0}'
FREE = "INT64[-1,-1]"


def lengths_of(count: int) -> list[int]:
    draws = (int(Random(k).lognormvariate(math.log(40), 0.8)) for k in itertools.count())
    return list(itertools.islice((n for n in draws if 8 <= n <= 256), count))


LENGTHS = lengths_of(2048)
MEAN = sum(LENGTHS) / len(LENGTHS)


def tokens_of(length: int) -> dict[str, Any]:
    ids = np.arange(length, dtype=np.int64)[None] % 1000
    return dict(zip(NAMES, (ids, np.ones_like(ids)), strict=True))


class TextServer(Penstock):
    """A server of one of the models in `text_models.py`."""

    def __init__(self, kind: str, pad: bool) -> None:
        keys = [f"models.m.inputs.{name}={PAD if pad else FREE}" for name in NAMES]
        keys += [f"models.m.batching.max_batch_size={MOST_ROWS}", "models.m.batching.max_queue=4096"]
        super().__init__(f"m={HERE}/text_models.py:{kind}", keys)
        self.padded = pad

    def loop(self, clients: int, seconds: int, lengths: Sequence[int] = LENGTHS) -> harness.Sample:
        endpoint = parse_url(self.urls["inference"])
        requests = []
        for length in lengths:
            head, buffers = encode_arrays(tokens_of(length), binary_outputs=True)
            headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}
            body = b"".join([head, *map(bytes, buffers)])
            requests.append(http_request(endpoint, "POST", "/v2/models/m/infer", headers, body))
        with self.awake():
            uvloop.run(closed_loop(endpoint, requests, concurrency=clients, seconds=1))
            before = self._counts()
            samples = uvloop.run(closed_loop(endpoint, requests, concurrency=clients, seconds=seconds))
            after = self._counts()
        run = summarise(Load(mode="closed", concurrency=clients, seconds=seconds), samples)
        rows, batches, tokens, padding = (b - a for a, b in zip(before, after, strict=True))
        return {
            "rate": run.throughput * sum(lengths) / len(lengths),
            "rows": rows / max(1, batches),
            "p50_ms": (run.latency.p50_s or 0) * 1e3,
            "p99_ms": (run.latency.p99_s or 0) * 1e3,
            "errors": sum(run.errors.values()),
            **({"padding": padding / max(1, tokens)} if self.padded else {}),
        }

    def _counts(self) -> list[float]:
        with urllib.request.urlopen(f"{self.urls['metrics']}/metrics") as response:
            lines = response.read().decode().splitlines()
        names = ("batch_rows_sum", "batch_rows_count", "tokens_total", "padded_tokens_total")
        return [sum(float(x.split()[-1]) for x in lines if x.startswith(f"penstock_{name}{{")) for name in names]


def oracle(kind: str, seconds: int) -> harness.Sample:
    """Tokens per second of sorted batches, one after the other."""
    import text_models
    import torch

    torch.set_num_threads(1)
    model = getattr(text_models, kind)().eval()
    batches = []
    texts = sorted(LENGTHS)
    for part in (texts[k : k + MOST_ROWS] for k in range(0, len(texts), MOST_ROWS)):
        ids = torch.zeros((len(part), max(part)), dtype=torch.int64)
        mask = torch.tensor([[k < n for k in range(max(part))] for n in part]).long()
        batches.append((ids, mask))
    done, started = 0, time.perf_counter()
    with torch.inference_mode():
        for ids, mask in itertools.cycle(batches):
            model(ids, mask)
            done += int(mask.sum())
            if (passed := time.perf_counter() - started) > seconds:
                return {"rate": done / passed, "rows": MOST_ROWS}
    raise AssertionError


def main() -> None:
    options = harness.options(__doc__, seconds=4)
    columns = {"rate": "tokens/s", "rows": "rows a batch", "padding": "padding", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("torch",))
    s = options.seconds
    for kind in ("Launches", "Encoder"):
        with ExitStack() as stack:
            shape, padded = (stack.enter_context(TextServer(kind, pad)) for pad in (False, True))
            few = harness.interleave(
                options.rounds,
                {
                    "by shape": lambda v=shape: v.loop(FEW, s),
                    "padded": lambda v=padded: v.loop(FEW, s),
                    "one length": lambda v=shape: v.loop(FEW, s, [round(MEAN)]),
                },
            )
            many = harness.interleave(
                options.rounds,
                {
                    "padded": lambda v=padded: v.loop(MANY, s),
                    "sorted": lambda k=kind: oracle(k, s),
                    "one length": lambda v=shape: v.loop(MANY, s, [round(MEAN)]),
                },
            )
        report.add({"model": kind.lower(), "clients": FEW}, few, base="padded")
        report.add({"model": kind.lower(), "clients": MANY}, many, base="padded")
        what = f"{kind.lower()}, {FEW} clients"
        report.target(
            f"{what}: rows a batch, over those by shape", report.ratios(few, "padded", "by shape", "rows"), least=8
        )
        report.target(f"{what}: p99, over that by shape", report.ratios(few, "padded", "by shape", "p99_ms"), most=1)
        ratios = report.ratios(many, "padded", "sorted")
        report.target(f"{kind.lower()}, {MANY} clients: tokens/s, over sorted texts", ratios, least=0.95)
        report.target(f"{kind.lower()}, {MANY} clients: padding", [x["padding"] for x in many["padded"]], most=0.15)
    report.save()


if __name__ == "__main__":
    main()
