"""The counters of Triton's statistics: exact sums, bounded sizes, nothing left of an unloaded version."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.contracts import BatchRecord
from penstock.errors import BadOutput, BadRequest, DecodeError, ItemFailed
from penstock.serving.observe.history import StageTotals
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
    assert sums["fail"] == {"count": 3, "ns": 4_000_000_000}
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


def test_the_stages_of_requests_are_the_models_own_and_the_servers() -> None:
    statistics = ModelStatistics()
    statistics.on_complete(record(2, (0.25, 0.5), stages_s=(0.5, 1.0, 0.25), hooks_s=(0.125, 0.25)))
    statistics.on_complete(record(1, stages_s=(0.5, 1.0, 0.25)))
    statistics.on_answer("m", "1", [2.0, 4.0, 8.0], 0)
    assert statistics.stages() == {("m", "1"): StageTotals(14.0, 1.0, 1.25, 0.25, 3.0, 0.5, 0.25)}


def test_failed_requests_are_no_inferences_and_have_no_times() -> None:
    """Of three requests one has a bad input, one fails in the model: the batch of the other two is what ran."""
    statistics = ModelStatistics()
    bad, broken = (0.5, 2, True), (0.25, 1, False)
    statistics.on_complete(record(6, (0.125, 0.5, 0.25), failed_requests=[bad, broken]))
    body = statistics.of("m", "1").body("m", "1")
    assert (body["inference_count"], body["execution_count"]) == (3, 1)
    assert [each["batch_size"] for each in body["batch_stats"]] == [4]
    assert body["inference_stats"]["queue"] == {"count": 1, "ns": 125_000_000}
    assert body["inference_stats"]["compute_infer"] == {"count": 1, "ns": 2_000_000}


def test_a_batch_of_bad_inputs_is_no_execution_and_one_that_the_model_fails_is() -> None:
    statistics = ModelStatistics()
    statistics.on_complete(record(2, failed_requests=[(0.25, 2, True)]))
    found = statistics.of("m", "1")
    assert (found.batches, found.rows, found.sizes, found.last_s) == (0, 0, {}, 0.0)
    statistics.on_complete(record(2, failed_requests=[(0.25, 2, False)]))
    found = statistics.of("m", "1")
    assert (found.batches, found.rows, list(found.sizes), found.queue.count) == (1, 0, [2], 0)


def test_the_queue_time_includes_the_wait_behind_a_running_batch() -> None:
    statistics = ModelStatistics()
    behind: Any = record(2, (0.25, 0.25))
    behind.ahead, behind.seconds, behind.run_s = True, 0.75, 0.5
    statistics.on_complete(behind)
    assert statistics.of("m", "1").queue.body() == {"count": 2, "ns": 1_000_000_000}


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        *((reason, "REJECTED") for reason in ("queue_full", "expired", "timeout", "overload")),
        ("cancelled", "CANCELED"),
        *((reason, "BACKEND") for reason in ("worker_died", "sequence_lost")),
        *((reason, "OTHER") for reason in ("bad_request", "sequence_not_found", "model_not_ready", "internal")),
    ],
)
def test_each_reason_of_a_rejection_is_one_of_tritons(reason: str, expected: str) -> None:
    statistics = ModelStatistics()
    statistics.on_reject("m", "1", reason)
    found = statistics.of("m", "1")
    assert found.failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0} | {expected: 1}
    assert found.fail.count == 1


def test_a_models_fault_is_told_from_a_bad_input() -> None:
    statistics = ModelStatistics()
    for error in (ItemFailed("no"), DecodeError("no"), BadOutput("no"), BadRequest("no")):
        statistics.on_error("m", "1", error)
    found = statistics.of("m", "1").failures
    assert (found["BACKEND"], found["OTHER"]) == (2, 2)


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
