"""How many rows/s does a model with slow preprocessing answer with helper processes, and what do they cost?

`preprocess` computes for 5 ms in Python, for each row, or for no time at all; `predict` waits for a device, 2 ms for
each batch of up to 64 rows. 64 tasks ask an `Engine` for one row each; the model is in a process.
"""

import functools

import harness
import uvloop
from inprocess import WARM_S, crowd

import penstock
from penstock.config.schema import BatchingConfig, ModelConfig

TARGET = f"{harness.HERE}/models.py:SlowToPreprocess"
TASKS = 64
HELPERS = (0, 2)
LEAST = 1.8  # times the rows/s without helpers, on two cores


def rows(preprocess_s: float, helpers: int, seconds: float) -> harness.Sample:
    config = ModelConfig(
        target=TARGET,
        options={"preprocess_s": preprocess_s},
        preprocess_processes=helpers,
        batching=BatchingConfig(max_batch_size=64),
    )

    async def run() -> harness.Sample:
        async with penstock.Engine() as engine:
            await engine.load("slow", config)
            call = functools.partial(engine.infer, "slow", 1)
            await crowd(call, TASKS, WARM_S)
            return await crowd(call, TASKS, seconds)

    return uvloop.run(run())


def main() -> None:
    options = harness.options(__doc__)
    columns = {"rate": "rows/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns)
    for preprocess_s in (0.005, 0.0):
        contenders = {f"{n} helpers": functools.partial(rows, preprocess_s, n, options.seconds) for n in HELPERS}
        runs = harness.interleave(options.rounds, contenders)
        report.add({"preprocess": f"{preprocess_s * 1e3:g} ms"}, runs)
        if preprocess_s:
            ratios = [b["rate"] / a["rate"] for a, b in zip(*runs.values(), strict=True)]
            report.target("rows/s with 2 helpers, by those without", ratios, least=LEAST)
    report.save()


if __name__ == "__main__":
    main()
