from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.observe.batches import LANES, LANES_S, SLOW_S, batches, delayed_by, nodes, reasons
from penstock.serving.observe.recorders import BatchReport

NOW = 1000.0


def report(time_s: float = NOW, **changed: object) -> BatchReport:
    fields = {
        "time_s": time_s, "model": "m", "version": "1", "reason": "full", "requests": 1, "rows": 1, "max_batch_size": 8,
        "waited_s": 0.0, "bucket": "", "instance": 0, "ahead": False, "run_s": 0.1, "seconds": 0.1, "failed": 0,
        "outcome": "ok",
    }  # fmt: skip
    return BatchReport(**(fields | changed))  # type: ignore[arg-type]


def test_the_slowest_request_is_unfolded_with_the_batch_that_delayed_it() -> None:
    blocker = report(NOW - 1.0, run_s=3.0, seconds=3.0, rows=8)
    elsewhere = report(NOW - 0.9, instance=1)
    early = report(NOW - 8.0)
    slow = report(
        NOW, waited_s=2.0, seconds=1.0, run_s=0.8, stages_s=(0.25, 0.5, 0.125), hooks_s=(0.125, 0.0625), reason="ahead"
    )
    found = batches([slow, elsewhere, blocker, early], NOW + 5)["slow"]
    assert (found["reason"], found["ago_s"]) == ("ahead", 5)
    parts = [found[name] for name in ("waited_s", "handover_s", "decode_s", "preprocess_s", "predict_s")]
    assert parts == [2.0, 0.125, 0.125, 0.125, 0.5]
    assert (found["postprocess_s"], found["encode_s"]) == (0.0625, 0.0625)
    assert (found["before"]["rows"], found["before"]["ended_s"]) == (8, 2.0), "two seconds after the request came"
    assert delayed_by(early, [slow, elsewhere, blocker, early]) is None


def test_batches_are_counted_by_reason_and_size() -> None:
    sizes = [1, 2, 3, 4, 5, 8, 9]
    found = reasons([report(rows=rows, reason="full" if rows > 4 else "ahead") for rows in sizes])
    assert found == {"ahead": {1: 1, 2: 1, 4: 2}, "full": {8: 2, 16: 1}}


@pytest.mark.parametrize("now_s", [NOW - 3600, NOW + 3600])
def test_a_clock_that_is_set_hides_batches_and_breaks_nothing(now_s: float) -> None:
    found = batches([report(), report(NOW - 1)], now_s)
    assert (found["lanes"], found["reasons"], "slow" in found) == ([], {}, False)


def test_the_metrics_of_a_pipeline_are_sums_of_its_nodes() -> None:
    series = [
        ("pipeline_items_total", {"node": "net", "outcome": "ok"}, 6.0),
        ("pipeline_items_total", {"node": "net", "outcome": "expired"}, 1.0),
        ("pipeline_batches_total", {"node": "net", "size": "2"}, 1.0),
        ("pipeline_batches_total", {"node": "net", "size": "4"}, 1.0),
        ("pipeline_run_seconds", {"node": "net"}, 0.5),
        ("pipeline_queue_items", {"node": "decode"}, 3.0),
        ("pipeline_other", {"node": "net"}, 9.0),
        ("pipeline_own", {}, 9.0),
    ]
    assert nodes(series) == {
        "net": {"items": 6.0, "failed": 1.0, "batches": 2.0, "rows": 6.0, "run_s": 0.5},
        "decode": {"queue": 3.0},
    }


reports = st.builds(
    report,
    st.floats(NOW - 100, NOW + 10),
    rows=st.integers(1, 64),
    instance=st.integers(0, 3),
    waited_s=st.floats(0, 10),
    run_s=st.floats(0, 5),
    seconds=st.floats(0, 5),
    reason=st.sampled_from(["full", "ahead"]),
    stages_s=st.none() | st.tuples(*[st.floats(0, 2)] * 3),
    hooks_s=st.none() | st.tuples(*[st.floats(0, 2)] * 2),
)


@given(st.lists(reports, max_size=30))
def test_every_shown_batch_is_recent_and_no_part_is_negative(found: list[BatchReport]) -> None:
    newest = sorted(found, key=lambda b: -b.time_s)
    shown = batches(newest, NOW)
    recent = [b for b in newest if 0 <= NOW - b.time_s <= SLOW_S]
    assert sum(sum(sizes.values()) for sizes in shown["reasons"].values()) == len(recent)
    assert len(shown["lanes"]) == sum(NOW - b.time_s <= LANES_S for b in recent)
    assert ("slow" in shown) == bool(recent)
    if recent:
        slow = shown["slow"]
        assert all(value >= 0 for each in (slow, slow.get("before", {})) for n, value in each.items() if n[-2:] == "_s")


def test_lanes_are_bounded_and_begin_with_the_oldest_batch_that_is_shown() -> None:
    found = batches([report(NOW - i * 0.001, run_s=0.001) for i in range(LANES * 2)], NOW)
    assert len(found["lanes"]) == LANES
    assert found["lanes_s"] == pytest.approx(LANES * 0.001)
