import json
import logging
from pathlib import Path

import pytest

from penstock import metrics
from penstock.torchserve.ts import metric_cache as merrors
from penstock.torchserve.ts.metric_cache import (
    Dimension,
    Metric,
    MetricEncoder,
    MetricsCache,
    MetricsCacheYamlImpl,
    MetricsStore,
    MetricTypes,
    Units,
)
from penstock.torchserve.ts.testing import emit_metrics


@pytest.fixture
def cache() -> MetricsCache:
    cache = MetricsCache("net")
    cache.initialize_cache()
    cache.set_request_ids({0: "a", 1: "b"})
    return cache


def told() -> list[tuple[object, ...]]:
    return [(d.kind, d.name, d.value, d.unit, d.labels, d.request_id) for d in metrics.drain() or []]


MODEL = {"ModelName": "net", "Level": "Model"}


def test_each_method_records_a_metric_with_its_type_and_unit(cache):
    cache.add_counter("n", 2, 0)
    cache.add_time("t", 1.5, 1)
    cache.add_time("u", 1, 1, "s")
    cache.add_size("m", 3, 0, "kB")
    cache.add_percent("p", 50, 0)
    cache.add_error("e", 1)
    cache.add_metric("o", 4, "apples", 0, metric_type=MetricTypes.HISTOGRAM)
    assert told() == [
        ("counter", "n", 2.0, "Count", MODEL, "a"),
        ("gauge", "t", 1.5, "Milliseconds", MODEL, "b"),
        ("gauge", "u", 1.0, "Seconds", MODEL, "b"),
        ("gauge", "m", 3.0, "Kilobytes", MODEL, "a"),
        ("gauge", "p", 50.0, "Percent", MODEL, "a"),
        ("counter", "e", 1.0, "unit", {"Level": "Error"}, ""),
        ("histogram", "o", 4.0, "apples", MODEL, "a"),
    ]


def test_a_metric_of_the_whole_batch_has_all_request_ids(cache):
    cache.add_time("HandlerTime", 3)
    cache.add_counter("n", 1, idx=7)
    assert [d[-1] for d in told()] == ["a,b", "a,b"]


def test_before_the_first_batch_a_metric_has_no_request():
    MetricsCache("net").add_time("t", 1)
    assert told() == [("gauge", "t", 1.0, "Milliseconds", {"Level": "Error"}, "")]


def test_own_dimensions_take_precedence_and_stay_unchanged(cache):
    own = [Dimension("Level", "Mine"), Dimension("color", "red")]
    for _ in range(2):
        cache.add_counter("n", 1, 0, own)
    assert [d[4] for d in told()] == [{"Level": "Mine", "color": "red", "ModelName": "net"}] * 2
    assert [d.name for d in own] == ["Level", "color"]


@pytest.mark.parametrize(("method", "unit"), [("add_time", "h"), ("add_size", "TB")])
def test_a_wrong_unit_is_refused(cache, method, unit):
    with pytest.raises(ValueError, match="one of"):
        getattr(cache, method)("n", 1, 0, unit)
    assert told() == []


@pytest.mark.parametrize("value", [-1, float("nan"), "much", None, 10**400])
def test_an_invalid_increment_is_logged_and_not_counted(cache, caplog, value):
    with caplog.at_level(logging.ERROR):
        cache.add_counter("n", value, 0)
    assert told() == []
    assert "metric_refused name=n" in caplog.text


def test_a_gauge_may_be_negative_and_other_types_than_numbers_are_logged(cache, caplog):
    cache.add_percent("p", -1, 0)
    with caplog.at_level(logging.ERROR):
        cache.add_percent("p", "much", 0)
        cache.add_percent("p", None, 0)
    assert [d[2] for d in told()] == [-1.0]
    assert caplog.text.count("metric_refused name=p") == 2


def test_an_added_metric_is_found_by_name_and_type(cache):
    metric = cache.add_metric_to_cache("faces", "count", ["color"], MetricTypes.COUNTER)
    assert cache.get_metric("faces") is metric
    metric.add_or_update(2, ["red"], "r")
    assert told() == [("counter", "faces", 2.0, "Count", {"color": "red"}, "r")]
    with pytest.raises(merrors.MetricsCacheKeyError, match="'faces' doesn't exist"):
        cache.get_metric("faces", MetricTypes.GAUGE)
    assert "counter:faces" in cache.cache_keys()


def test_a_value_without_its_dimensions_is_logged_and_not_counted(cache, caplog):
    metric = cache.add_metric_to_cache("faces", "count", ["color"])
    with caplog.at_level(logging.ERROR):
        metric.add_or_update(2, [])
        metric.add_or_update(2, None)
    assert told() == []
    assert caplog.text.count("metric_refused") == 2


def test_update_replaces_the_dimensions(cache):
    metric = cache.add_metric_to_cache("faces", "count", ["color"])
    metric.update(1, "r", [Dimension("size", "big")])
    assert told() == [("counter", "faces", 1.0, "Count", {"size": "big"}, "r")]


@pytest.mark.parametrize("arguments", [(1, "count"), ("n", 1), ("n", "count", "color"), ("n", "count", [], "counter")])
def test_arguments_of_the_wrong_type_are_refused(cache, arguments):
    with pytest.raises(merrors.MetricsCacheTypeError):
        cache.add_metric_to_cache(*arguments)


def test_a_worker_has_the_declared_metrics():
    cache = MetricsCache("net", {"histogram": [{"name": "len", "unit": "tokens", "dimensions": []}]})
    cache.initialize_cache()
    assert cache.cache_keys() == ["histogram:len"]
    assert cache.get_metric("len", MetricTypes.HISTOGRAM).unit == "tokens"


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        ({}, merrors.MetricsCacheValueError),
        ({"summary": []}, merrors.MetricsCacheKeyError),
        ({"gauge": [{"name": "x", "unit": "ms"}]}, merrors.MetricsCacheKeyError),
    ],
)
def test_a_wrong_declaration_is_refused(declared, error):
    with pytest.raises(error):
        MetricsCache("net", declared).initialize_cache()


def test_a_yaml_file_declares_metrics(tmp_path: Path):
    file = tmp_path / "metrics.yaml"
    file.write_text("model_metrics:\n  counter:\n    - {name: faces, unit: count, dimensions: [ModelName]}\n")
    cache = MetricsCacheYamlImpl(str(file))
    cache.initialize_cache()
    assert cache.cache_keys() == ["counter:faces"]


def test_wrong_yaml_files_are_refused(tmp_path: Path):
    file = tmp_path / "metrics.yaml"
    with pytest.raises(merrors.MetricsCacheIOError):
        MetricsCacheYamlImpl(str(file))
    with pytest.raises(merrors.MetricsCacheTypeError):
        MetricsCacheYamlImpl("")
    file.write_text("a: [")
    with pytest.raises(merrors.MetricsCachePyYamlError):
        MetricsCacheYamlImpl(str(file))
    file.write_text("dimensions: []")
    with pytest.raises(merrors.MetricsCacheKeyError, match="model_metrics"):
        MetricsCacheYamlImpl(str(file)).initialize_cache()


def test_the_store_lists_each_metric_once_and_records_every_value():
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


def test_a_metric_can_be_written_as_a_log_line_and_as_json():
    metric = Metric("n", 3, "ms", [Dimension("Level", "Model")], "r1")
    assert str(metric).startswith("n.Milliseconds:3|#Level:Model|#hostname:")
    assert str(metric).endswith(",r1")
    shown = json.loads(json.dumps(metric, cls=MetricEncoder))
    assert shown["Dimensions"] == [{"Name": "Level", "Value": "Model"}]
    assert (shown["MetricName"], shown["Unit"], shown["RequestId"]) == ("n", "Milliseconds", "r1")
    assert Units().units[None] == "unit"


def test_emit_and_reset_record_metrics():
    metric = Metric("n", 3, "ms", [], "r1")
    emit_metrics([metric])
    metric.reset()
    assert [(d.kind, d.value) for d in metrics.drain() or []] == [("counter", 3.0), ("counter", 0.0)]
