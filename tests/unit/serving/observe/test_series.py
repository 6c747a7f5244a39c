"""Families of metrics that users define."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.serving.observe import series
from penstock.serving.observe.series import SeriesTable
from penstock.serving.observe.text import Family, Page

LABELS = (("Level", "Host"),)


def declared(name: str = "a", kind: str = "counter") -> Family:
    return Family(name, kind, (), "a metric")


def page(table: SeriesTable) -> str:
    found = Page()
    table.write(found)
    return found.encode().decode()


def values(table: SeriesTable) -> dict[str, float]:
    """The samples except buckets, by name and label values."""
    text = page(table)
    assert list(text_string_to_metric_families(text)) or not text  # it is read
    samples = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#" and 'le="' not in line]
    return {re.sub(r"{.*", "", name) + str(re.findall(r'="(.*?)"', name)): float(value) for name, _, value in samples}


def test_counters_add_gauges_show_the_last_and_histograms_count() -> None:
    table = SeriesTable((2.5, 1e7))
    for kind in ("counter", "gauge", "histogram"):
        for found in ((1.0, 2.0), (4.0,)):
            table.change(declared(kind, kind), LABELS, found)
    text = page(table)
    assert 'counter{Level="Host"} 7.0\n' in text
    assert 'gauge{Level="Host"} 4.0\n' in text
    assert 'histogram_bucket{Level="Host",le="2.5"} 2\n' in text
    assert 'histogram_bucket{Level="Host",le="1e+07"} 3\n' in text
    assert 'histogram_sum{Level="Host"} 7.0\n' in text
    assert "# TYPE histogram histogram\n" in text


def test_series_are_dropped_with_their_owner() -> None:
    table = SeriesTable((2.5, 1e7))
    for version in ("1", "2"):
        table.change(declared(), (("v", version),), (1.0,), ("m", version))
    table.forget(("m", "1"))
    assert values(table) == {"a['2']": 1.0}
    table.change(declared(), (("v", "1"),), (5.0,), ("m", "1"))
    assert values(table) == {"a['2']": 1.0, "a['1']": 5.0}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("Wörld", LABELS),
        ("with space", LABELS),
        ("9lives", LABELS),
        ("", LABELS),
        ("penstock_requests_total", LABELS),
        ("process_cpu_seconds_total", LABELS),
        ("other_bucket", LABELS),
        ("ok", (("le", "1"),)),
        ("ok", (("__name__", "x"),)),
        ("ok", (("a b", "x"),)),
        ("ok", (("a", "x"), ("a", "y"))),
    ],
)
def test_a_metric_that_would_break_the_page_is_omitted_and_logged_once(
    name: str, labels: tuple[tuple[str, str], ...], caplog: pytest.LogCaptureFixture
) -> None:
    table = SeriesTable((2.5, 1e7))
    table.change(declared("other", "histogram"), LABELS, (1.0,))
    before = values(table)
    for _ in range(3):
        table.change(declared(name), labels, (1.0,))
    assert values(table) == before
    assert caplog.text.count("metric_refused") == 1


def test_the_first_metric_keeps_its_name(caplog: pytest.LogCaptureFixture) -> None:
    table = SeriesTable((2.5, 1e7))
    table.change(declared("a", "gauge"), LABELS, (1.0,))
    table.change(declared("a", "counter"), LABELS, (9.0,))
    assert values(table) == {"a['Host']": 1.0}
    assert "another metric has this name" in caplog.text


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MAX_SERIES", 2)
    table = SeriesTable((2.5, 1e7))
    for i in range(4):
        table.change(declared(), (("i", str(i)),), (1.0,), ("m", str(i)))
    assert values(table) == {"a['0']": 1.0, "a['1']": 1.0}
    table.forget(("m", "0"))
    table.change(declared(), (("i", "3"),), (1.0,), ("m", "3"))
    assert values(table) == {"a['1']": 1.0, "a['3']": 1.0}
