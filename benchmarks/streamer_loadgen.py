"""MLPerf's load generator over futures.

LoadGen may come from a virtual environment of its own, of whose packages `site` is the folder.
"""

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES = 64  # different samples; LoadGen draws from them


def loadgen(
    submit: Callable[[int], Any], scenario: str, qps: float, seconds: float, latency_s: float, site: str | None = None
) -> dict[str, Any]:
    """Samples/s, p99 in ms, and VALID or INVALID of one run of a scenario, as LoadGen's summary states them.

    `submit` returns a future for a sample, given its index. `Offline` submits at once what takes `seconds` at `qps`
    samples/s and a tenth more, `Server` one by one at random times; it is valid if the p99 is at most `latency_s`.
    Raises the error of the first call that failed.
    """
    sys.path += {site} - {None, *sys.path}
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
            submit(sample.index).add_done_callback(completion(sample.id))

    settings = mlperf.TestSettings()
    settings.scenario = getattr(mlperf.TestScenario, scenario)
    settings.mode = mlperf.TestMode.PerformanceOnly
    settings.min_duration_ms = round(seconds * 1e3)
    settings.offline_expected_qps = settings.server_target_qps = qps
    settings.server_target_latency_ns = round(latency_s * 1e9)
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


def fastest_valid(run: Callable[[float], dict[str, Any]], ceiling: float, least: float = 0.8) -> dict[str, Any]:
    """The fastest valid run of the Server scenario, of four that halve the range of `least` to 1 x the ceiling.

    `run` makes one at a number of samples/s; it has failed if it returns nothing. A rate of 0 if none is valid.
    """
    most, results = 1.0, []
    fastest: dict[str, Any] = {"rate": 0.0}
    for _ in range(4):
        share = (least + most) / 2
        qps = round(share * ceiling)
        found = run(qps)
        if not found:
            return {}
        results.append(f"{qps:,} {found['result']}")
        if found["result"] == "VALID":
            least, fastest = share, found
        else:
            most = share
    return {**fastest, "result": ", ".join(results)}
