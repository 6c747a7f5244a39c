"""MLPerf's load generator over the futures of a streamer.

LoadGen comes from its own virtual environment, whose packages BENCH_SPEC names as `loadgen`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES = 64  # different samples; LoadGen draws from them
LATENCY_NS = 60_000_000  # most that the p99 of the Server scenario may be


def loadgen(model: Any, scenario: str, qps: float, seconds: float) -> dict[str, Any]:
    """Samples/s, p99 in ms, and VALID or INVALID of one run of a scenario, as LoadGen's summary states them.

    `Offline` submits at once what takes `seconds` at `qps` samples/s and a tenth more, `Server` one by one at random
    times. Raises the error of the first call that failed.
    """
    sys.path += {json.loads(os.environ["BENCH_SPEC"])["loadgen"]} - set(sys.path)
    import mlperf_loadgen as mlperf

    failures: list[BaseException] = []

    def completion(identity: int) -> Callable[[Any], None]:
        def complete(future: Any) -> None:
            if error := future.exception():
                failures.append(error)
            mlperf.QuerySamplesComplete([mlperf.QuerySampleResponse(identity, 0, 0)])

        return complete

    def issue(samples: list[Any]) -> None:
        for sample in samples:
            model.submit([sample.index]).add_done_callback(completion(sample.id))

    settings = mlperf.TestSettings()
    settings.scenario = getattr(mlperf.TestScenario, scenario)
    settings.mode = mlperf.TestMode.PerformanceOnly
    settings.min_duration_ms = round(seconds * 1e3)
    settings.offline_expected_qps = settings.server_target_qps = qps
    settings.server_target_latency_ns = LATENCY_NS
    with tempfile.TemporaryDirectory() as folder:
        log = mlperf.LogSettings()
        log.enable_trace = False
        output = mlperf.LogOutputSettings()
        output.outdir = folder
        log.log_output = output
        system = mlperf.ConstructSUT(issue, lambda: None)
        library = mlperf.ConstructQSL(SAMPLES, SAMPLES, lambda _: None, lambda _: None)
        mlperf.StartTestWithLogSettings(system, library, settings, log)
        mlperf.DestroyQSL(library)
        mlperf.DestroySUT(system)
        summary = dict(re.findall(r"^(.+?) *: (.*)$", Path(folder, "mlperf_log_summary.txt").read_text(), re.MULTILINE))
    if failures:
        raise failures[0]
    rate = summary["Samples per second" if scenario == "Offline" else "Completed samples per second"]
    p99_ms = float(summary["99.00 percentile latency (ns)"]) / 1e6
    return {"rate": float(rate), "p99_ms": p99_ms, "result": summary["Result is"]}
