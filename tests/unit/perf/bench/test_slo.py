"""SLOs with several objectives: the latency limit of goodput."""

from __future__ import annotations

import pytest

from penstock.perf.bench.measurement import parse_slo


@pytest.mark.parametrize(
    ("text", "latency_s"),
    [
        ("p99<=100ms", 0.1),
        ("p50<=20ms,p99<=200ms", 0.2),
        ("p99<=200ms,mean<=20ms,error<=1%", 0.2),
        ("max<=1s,p99<=100ms,p99.9<=500ms", 0.1),
        ("p99<=1s,max<=200ms", 0.2),
        ("p95<=90ms,p50<=20ms", 0.09),
        ("p50<=20ms,mean<=30ms", 0.02),
        ("mean<=20ms", 0.02),
        ("error<=1%,throughput>=5", None),
    ],
)
def test_the_tightest_tail_objective_limits_goodput(text: str, latency_s: float | None) -> None:
    assert parse_slo(text).latency_s == latency_s
