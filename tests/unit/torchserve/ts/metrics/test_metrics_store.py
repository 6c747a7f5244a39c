from __future__ import annotations

import json

import pytest

from penstock import metrics
from penstock.torchserve.ts.metrics.dimension import Dimension
from penstock.torchserve.ts.metrics.metric import Metric
from penstock.torchserve.ts.metrics.metric_encoder import MetricEncoder
from penstock.torchserve.ts.metrics.metrics_store import MetricsStore
from penstock.torchserve.ts.metrics.unit import Units
from penstock.torchserve.ts.service import emit_metrics


def test_the_store_lists_each_metric_once_and_tells_every_value():
    store = MetricsStore({0: "a"}, "net")
    store.add_counter("n", 1, 0)
    store.add_counter("n", 2, 0)
    store.add_time("t", 5)
    store.add_size("m", 1, 0, "B")
    store.add_percent("p", 9, 0)
    store.add_metric("o", 1, "apples", 0)
    store.add_error("e", "text")
    assert [(m.name, m.value, m.unit) for m in store.store] == [
        ("n", 2, "Count"), ("t", 5, "Milliseconds"), ("m", 1, "Bytes"), ("p", 9, "Percent"), ("o", 1, "apples"),
        ("e", "text", "unit"),
    ]  # fmt: skip
    assert [(d.name, d.value, d.request_id) for d in metrics.drain() or []] == [
        ("n", 1, "a"), ("n", 2, "a"), ("t", 5, "a"), ("m", 1, "a"), ("p", 9, "a"), ("o", 1, "a"),
    ]  # fmt: skip


def test_units_and_dimensions_of_the_store_are_checked():
    store = MetricsStore({0: "a"}, "net")
    with pytest.raises(ValueError, match="timed metric"):
        store.add_time("t", 1, 0, "h")
    with pytest.raises(ValueError, match="size based"):
        store.add_size("t", 1, 0, "TB")
    with pytest.raises(ValueError, match="list of dimensions"):
        store.add_counter("n", 1, 0, "color")


def test_a_metric_shows_itself_as_a_line_and_as_json():
    metric = Metric("n", 3, "ms", [Dimension("Level", "Model")], "r1")
    assert str(metric).startswith("n.Milliseconds:3|#Level:Model|#hostname:")
    assert str(metric).endswith(",r1")
    shown = json.loads(json.dumps(metric, cls=MetricEncoder))
    assert shown["Dimensions"] == [{"Name": "Level", "Value": "Model"}]
    assert (shown["MetricName"], shown["Unit"], shown["RequestId"]) == ("n", "Milliseconds", "r1")
    assert Units().units[None] == "unit"


def test_metrics_made_by_hand_are_told_by_emit_and_reset():
    metric = Metric("n", 3, "ms", [], "r1")
    emit_metrics([metric])
    metric.reset()
    assert [(d.kind, d.value) for d in metrics.drain() or []] == [("counter", 3.0), ("counter", 0.0)]
