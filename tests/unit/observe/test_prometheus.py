from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import ItemFailed
from penstock.observe.base import BatchRecord
from penstock.observe.prometheus import SECONDS, PrometheusObserver, _Histogram
from penstock.types import MetricDelta, ModelStatus


def samples(observer: PrometheusObserver) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = observer.render().decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }


M = (("model", "m"), ("version", "1"))


def record(rows: int, seconds: float) -> BatchRecord:
    return BatchRecord("m", "1", 0, rows, 64, "idle", False, seconds, seconds, [0.0] * rows, [seconds] * rows, 0)


def test_batches_requests_and_rejections_are_counted() -> None:
    observer = PrometheusObserver(lambda: [ModelStatus("m", "1", "READY", 2, 1, 64, ("cpu",), queue=3)])
    observer.on_arrival("m", "1")
    observer.on_complete(record(5, 0.2))
    observer.on_reject("m", "1", "queue_full")
    observer.on_error("m", "1", ItemFailed("no"))
    observer.on_worker("m", "1", 0, "died")
    found = samples(observer)
    assert found["penstock_requests_total", M] == 1
    assert found["penstock_answers_total", M] == 5
    assert found["penstock_batches_total", M] == 1
    assert found["penstock_batch_rows_sum", M] == 5
    assert found["penstock_batch_rows_count", M] == 1
    assert found["penstock_request_seconds_count", M] == 5
    assert found["penstock_request_seconds_sum", M] == pytest.approx(1.0)
    assert found["penstock_rejections_total", (M[0], ("reason", "queue_full"), M[1])] == 1
    assert found["penstock_item_failures_total", (("code", "item_failed"), *M)] == 1
    assert found["penstock_worker_events_total", (M[0], ("state", "died"), M[1])] == 1
    assert found["penstock_queue_requests", M] == 3
    assert found["penstock_workers_up", M] == 1


def test_a_models_own_metrics_keep_their_labels_apart() -> None:
    observer = PrometheusObserver()
    observer.on_model_metrics("m", "1", 0, [MetricDelta("counter", "images", 2.0, {"kind": "png"})])
    observer.on_model_metrics("m", "1", 1, [MetricDelta("counter", "images", 3.0, {"kind": "png"})])
    observer.on_model_metrics("m", "1", 0, [MetricDelta("counter", "images", 1.0)])
    observer.on_model_metrics("m", "1", 0, [MetricDelta("gauge", "level", 1.0), MetricDelta("gauge", "level", 7.0)])
    observer.on_model_metrics("m", "1", 0, [MetricDelta("timer", "resize", 0.2)])
    found = samples(observer)
    assert found["images_total", (("kind", "png"), *M)] == 5
    assert found["images_total", M] == 1
    assert found["level", M] == 7
    assert found["resize_seconds_count", M] == 1


@given(st.lists(st.one_of(st.floats(0, 60), st.sampled_from(SECONDS)), max_size=200))
def test_values_fall_into_the_buckets_that_prometheus_client_would_choose(values: list[float]) -> None:
    ours = _Histogram(SECONDS)
    theirs = Histogram("h", "h", buckets=SECONDS, registry=None)
    ours.extend(values)
    for v in values:
        theirs.observe(v)
    expected = [s.value for s in theirs.collect()[0].samples if s.name == "h_bucket"]
    assert [count for _, count in ours.family()[0]] == expected
