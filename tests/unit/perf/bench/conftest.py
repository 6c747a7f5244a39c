import random
from collections.abc import Callable

import pytest

from penstock.perf.bench.measurement import GeneratorHealth, Gpu, Latency, Load, Measurement, ServerStats, parse_slo

Make = Callable[..., Measurement]


@pytest.fixture
def make_measurement() -> Make:
    """Makes the measurement of a server that takes `base_s` when idle and handles at most `most` requests per second.

    `noise` is the spread of a run against the next; `rate` makes an open loop, `clients` a closed one.
    """

    def make(
        *, label: str = "", rate: float = 0.0, clients: int = 0, base_s: float = 0.01, most: float = 1000.0,
        slo: str = "", noise: float = 0.0, random_: random.Random | None = None, slower: float = 1.0, **more: object,
    ) -> Measurement:  # fmt: skip
        def shaken() -> float:
            return slower * random_.lognormvariate(0, noise) if random_ else slower

        once = shaken()
        if rate:
            load = Load(mode="open", rate=rate, seconds=10)
            busy = min(rate / most, 0.99)
            middle, throughput = base_s * once / (1 - busy * 0.9), min(rate, most / once)
        else:
            load = Load(mode="closed", concurrency=clients, seconds=10)
            throughput = min(clients / base_s, most) / once
            busy, middle = throughput / most, clients / throughput
        tail = middle * (1.5 + 2 * busy) * (shaken() / slower)
        latency = Latency(
            mean_s=middle * 1.05, p50_s=middle, p75_s=middle * 1.1, p90_s=middle * 1.3, p95_s=tail * 0.8, p99_s=tail,
            p999_s=tail * 1.4, max_s=tail * 2, p99_low_s=tail * 0.95, p99_high_s=tail * 1.07,
        )  # fmt: skip
        server = ServerStats(
            queue_s=middle * 0.5, preprocess_s=0.0004, run_s=base_s * 0.4, postprocess_s=0.0002,
            batches={"1": 20, "2": 40, "4": int(300 * busy), "8": int(600 * busy * busy)}, mean_batch=1 + 6 * busy,
            cpu=0.3 + busy, memory_bytes=400 << 20, gpus=[Gpu(name="G", utilization=busy, memory_bytes=1 << 30)],
        )  # fmt: skip
        requests = int(throughput * 10)
        run = {
            "load": load, "label": label, "seconds": 10.0, "requests": requests, "answered": requests,
            "throughput": throughput, "goodput": throughput * 0.99, "latency": latency, "server": server,
            "generator": GeneratorHealth(cpu=0.2), "started": "2026-01-01T00:00:00Z",
        }  # fmt: skip
        measurement = Measurement(**(run | more))
        return Measurement(**(run | more), slo=parse_slo(slo).judge(measurement)) if slo else measurement

    return make
