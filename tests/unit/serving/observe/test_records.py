from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from penstock.core.contracts import BatchRecord
from penstock.serving.observe.records import KEPT, BatchRecords


def test_a_record_tells_why_the_batch_had_this_size(record: Callable[..., BatchRecord]) -> None:
    records = BatchRecords()
    before = time.time()
    records.on_complete(
        record(
            3, 0.5, reason="deadline", waits_s=[0.1, 0.3, 0.2], bucket="b", slot=4, ahead=True, failed=1, outcome="died"
        )
    )
    (told,) = json.loads(records.body(None, 10))["batches"]
    assert before <= told.pop("time_s") <= time.time()
    assert told == {
        "model": "m",
        "version": "1",
        "reason": "deadline",
        "requests": 3,
        "rows": 3,
        "max_batch_size": 64,
        "waited_s": 0.3,
        "bucket": "b",
        "instance": 4,
        "ahead": True,
        "run_s": 0.5,
        "seconds": 0.5,
        "failed": 1,
        "outcome": "died",
    }


def test_the_last_thousand_are_kept_newest_first(record: Callable[..., BatchRecord]) -> None:
    records = BatchRecords()
    for rows in range(1, KEPT + 11):
        records.on_complete(record(1, max_batch_size=rows))
    assert [b.max_batch_size for b in records.newest()] == list(range(KEPT + 10, 10, -1))
    assert [b.max_batch_size for b in records.newest(limit=2)] == [KEPT + 10, KEPT + 9]


@pytest.mark.parametrize(("model", "limit", "rows"), [("a", 10, [5, 3, 1]), ("a", 2, [5, 3]), ("c", 10, [])])
def test_one_model_can_be_asked_for(
    record: Callable[..., BatchRecord], model: str, limit: int, rows: list[int]
) -> None:
    records = BatchRecords()
    for i in range(1, 6):
        records.on_complete(record(i, model="a" if i % 2 else "b"))
    assert [b.rows for b in records.newest(model, limit)] == rows
