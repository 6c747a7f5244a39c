"""The counters of Triton's statistics: exact sums, bounded sizes, nothing left of an unloaded version."""

from __future__ import annotations

from penstock.core.contracts import BatchRecord
from penstock.serving.triton.statistics import MAX_BATCH_SIZES, ModelStatistics


def record(rows: int, waits_s: tuple[float, ...] = (0.25,), **more: object) -> BatchRecord:
    fields = {"stages_s": (0.001, 0.002, 0.003), **more}
    return BatchRecord("m", "1", 0, rows, 8, "full", False, 0.5, 0.6, waits_s, 0, **fields)  # type: ignore[arg-type]


def test_sums_are_those_of_triton() -> None:
    statistics = ModelStatistics(clock=lambda: 12.3456)
    statistics.on_complete(record(3, (0.5, 0.25)))
    statistics.on_complete(record(3, stages_s=None))
    statistics.on_complete(record(3, outcome="died"))
    statistics.on_answer("m", "1", [1.0, 2.0, 4.0], 1)
    statistics.on_reject("m", "1", "queue_full")
    statistics.on_reject("m", "1", "cancelled")
    body = statistics.of("m", "1").body("m", "1")
    assert (body["last_inference"], body["inference_count"], body["execution_count"]) == (12346, 6, 2)
    sums = body["inference_stats"]
    assert sums["success"] == {"count": 2, "ns": 3_000_000_000}
    assert sums["fail"] == {"count": 2, "ns": 4_000_000_000}
    assert sums["queue"] == {"count": 3, "ns": 1_000_000_000}
    assert sums["compute_input"] == {"count": 3, "ns": 2_000_000}
    assert sums["compute_infer"] == {"count": 3, "ns": 504_000_000}
    assert sums["compute_output"] == {"count": 3, "ns": 6_000_000}
    assert sums["cache_hit"] == sums["cache_miss"] == {"count": 0, "ns": 0}
    assert body["batch_stats"] == [
        {
            "batch_size": 3,
            "compute_input": {"count": 2, "ns": 1_000_000},
            "compute_infer": {"count": 2, "ns": 502_000_000},
            "compute_output": {"count": 2, "ns": 3_000_000},
        }
    ]
    assert (body["response_stats"], body["memory_usage"]) == ({}, [])


def test_memory_is_bounded_and_freed() -> None:
    statistics = ModelStatistics()
    for rows in range(1, MAX_BATCH_SIZES + 100):
        statistics.on_complete(record(rows))
    found = statistics.of("m", "1")
    assert (len(found.sizes), found.batches) == (MAX_BATCH_SIZES, MAX_BATCH_SIZES + 99)
    statistics.on_unload("m", "1")
    assert statistics.of("m", "1").batches == 0


def test_a_version_that_is_loaded_again_begins_with_zeros() -> None:
    statistics = ModelStatistics()
    statistics.on_complete(record(3))
    statistics.on_answer("m", "1", [1.0], 0)
    statistics.on_unload("m", "1")
    found = statistics.of("m", "1")
    assert (found.batches, found.rows, found.success.count) == (0, 0, 0)
