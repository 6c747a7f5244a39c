from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.serving.observe.prometheus import CustomMetrics
from penstock.serving.observe.series import MAX_SERIES
from penstock.serving.observe.text import Page
from penstock.types import MetricDelta

M = (("model", "m"), ("version", "1"))


def shown(custom: CustomMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = Page()
    custom.write(page)
    families = text_string_to_metric_families(page.encode().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_a_models_own_metrics_keep_their_labels_apart() -> None:
    custom = CustomMetrics()
    custom.add("m", "1", [MetricDelta("counter", "images", 2.0, {"kind": "png"})])
    custom.add("m", "1", [MetricDelta("counter", "images", 3.0, {"kind": "png"})])
    custom.add("m", "1", [MetricDelta("counter", "images", 1.0)])
    custom.add("m", "1", [MetricDelta("gauge", "level", 1.0), MetricDelta("gauge", "level", 7.0)])
    custom.add("m", "1", [MetricDelta("timer", "resize", 0.2)])
    found = shown(custom)
    assert found["images_total", (("kind", "png"), *M)] == 5
    assert found["images_total", M] == 1
    assert found["level", M] == 7
    assert found["resize_seconds_count", M] == 1


def test_a_counter_name_gets_the_suffix_total_only_once() -> None:
    custom = CustomMetrics()
    custom.add("m", "1", [MetricDelta("counter", "images_total", 2.0)])
    assert list(shown(custom)) == [("images_total", M)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MetricDelta("counter", "x", 1.0), MetricDelta("gauge", "x", 2.0)),
        (MetricDelta("gauge", "x_total", 1.0), MetricDelta("counter", "x", 2.0)),
        (MetricDelta("timer", "x", 1.0), MetricDelta("gauge", "x_seconds", 2.0)),
        (MetricDelta("gauge", "x_seconds_sum", 1.0), MetricDelta("timer", "x", 2.0)),
        (MetricDelta("counter", "x", 1.0), MetricDelta("counter", "x_total", 2.0)),
    ],
)
def test_a_second_kind_of_the_same_name_is_dropped(
    first: MetricDelta, second: MetricDelta, caplog: pytest.LogCaptureFixture
) -> None:
    alone, both = CustomMetrics(), CustomMetrics()
    alone.add("m", "1", [first])
    with caplog.at_level(logging.WARNING):
        both.add("m", "1", [first])
        for _ in range(3):
            both.add("other", "1", [second])
    assert shown(both) == shown(alone)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("kind", "label"), [("counter", "a-b"), ("counter", ""), ("gauge", "__x"), ("timer", "le"), ("gauge", "ä")]
)
def test_a_series_with_an_invalid_label_is_dropped(kind: str, label: str) -> None:
    custom = CustomMetrics()
    custom.add("m", "1", [MetricDelta(kind, "x", 1.0, {label: "v"}), MetricDelta("gauge", "good", 1.0)])
    assert shown(custom) == {("good", M): 1.0}


def test_a_label_with_ever_new_values_is_bounded() -> None:
    custom = CustomMetrics()
    for i in range(MAX_SERIES + 10):
        custom.add("m", "1", [MetricDelta("counter", "x", 1.0, {"request": str(i)})])
    custom.add("m", "1", [MetricDelta("counter", "x", 1.0, {"request": "0"})])
    found = shown(custom)
    assert len(found) == MAX_SERIES
    assert found["x_total", (M[0], ("request", "0"), M[1])] == 2


def test_the_series_of_an_unloaded_version_make_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    custom = CustomMetrics()
    for version in ("1", "2"):
        custom.add("m", version, [MetricDelta("gauge", "x", 1.0, {"k": str(k)}) for k in range(MAX_SERIES // 2)])
    custom.forget("m", "1")
    custom.add("m", "3", [MetricDelta("gauge", "x", 3.0, {"k": str(k)}) for k in range(MAX_SERIES // 2)])
    versions = [dict(labels)["version"] for _, labels in shown(custom)]
    assert (versions.count("1"), versions.count("2"), versions.count("3")) == (0, MAX_SERIES // 2, MAX_SERIES // 2)
    assert not caplog.records


def test_an_unused_name_can_become_another_kind() -> None:
    custom = CustomMetrics()
    custom.add("m", "1", [MetricDelta("timer", "x", 1.0)])
    custom.forget("m", "1")
    assert shown(custom) == {}
    custom.add("m", "2", [MetricDelta("gauge", "x_seconds", 2.0)])
    assert shown(custom) == {("x_seconds", (("model", "m"), ("version", "2"))): 2.0}
