from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram as Theirs
from prometheus_client.parser import text_string_to_metric_families

from penstock.serving.observe.prometheus import SECONDS
from penstock.serving.observe.text import Family, Histogram, Page, number, samples


@given(st.lists(st.one_of(st.floats(0, 60), st.sampled_from(SECONDS)), max_size=200))
def test_values_fall_into_the_buckets_that_prometheus_client_would_choose(values: list[float]) -> None:
    ours = Histogram(SECONDS)
    theirs = Theirs("h", "h", buckets=SECONDS, registry=None)
    for v in values[::2]:
        ours.add(v)
        theirs.observe(v)
    ours.extend(values[1::2])
    for v in values[1::2]:
        theirs.observe(v)
    expected = [s.value for s in theirs.collect()[0].samples if s.name == "h_bucket"]
    assert [count for _, count in ours.read()[0]] == expected


def test_a_histogram_without_labels_is_read_back() -> None:
    page, values = Page(), Histogram((1, 2))
    values.extend((0.5, 1.5, 9.0))
    page.write(Family("h", "histogram", (), "help"), [((), values)])
    (family,) = text_string_to_metric_families(page.encode().decode())
    assert family.type == "histogram"
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("h_bucket", {"le": "1"}, 1),
        ("h_bucket", {"le": "2"}, 2),
        ("h_bucket", {"le": "+Inf"}, 3),
        ("h_count", {}, 3),
        ("h_sum", {}, 11.0),
    ]


def test_torchserves_page_writes_bounds_as_its_java_client_does() -> None:
    page = Page(",")
    page.write(Family("h", "histogram", ("m",), "help"), [(("x",), Histogram((0.5, 1, 10)))])
    bounds = [line for line in page.encode().decode().splitlines() if "_bucket" in line]
    assert bounds == [f'h_bucket{{m="x",le="{bound}",}} 0' for bound in ("0.5", "1.0", "10.0", "+Inf")]


@given(st.text('ab,}\\"{= \n'), st.sampled_from(["", ","]))
def test_samples_are_read_from_a_page_whatever_their_labels_hold(value: str, end: str) -> None:
    page, values = Page(end), Histogram((1,))
    page.write(Family("h", "histogram", ("a", "model"), "help"), [((value, "m"), values), ((value, "other"), values)])
    page.sample("plain", (), 1.0)
    found = list(samples(page.encode().decode(), "m"))
    assert [name for name, _, _ in found] == ["h_bucket", "h_bucket", "h_count", "h_sum", "plain"]
    assert all(set(labels) - {"le"} == {"a", "model"} for _, labels, _ in found[:-1])


@given(st.floats())
def test_every_number_is_read_back(value: float) -> None:
    page = Page()
    page.sample("x", (), value)
    (family,) = text_string_to_metric_families(page.encode().decode())
    assert repr(family.samples[0].value) == repr(value)


def test_nan_and_infinity_are_written_in_prometheus_notation() -> None:
    assert [number(float(x)) for x in ("nan", "inf", "-inf")] == ["NaN", "+Inf", "-Inf"]
