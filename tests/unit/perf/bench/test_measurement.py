from collections.abc import Callable

import pytest
from msgspec import structs

from penstock.perf.bench.measurement import (
    Latency,
    Measurement,
    ObjectiveResult,
    goodput,
    group_by_load,
    p99,
    parse_label,
    parse_slo,
    throughput,
)

Make = Callable[..., Measurement]


def test_repeats_of_a_load_form_one_point_in_order(make_measurement: Make) -> None:
    runs = [make_measurement(label=label, clients=n) for label, n in (("b=2", 8), ("", 1), ("b=2", 8), ("b=2", 1))]
    found = group_by_load([*runs, make_measurement(clients=1, invalid=["late"])])
    assert [(p.name, len(p.runs), len(p.invalid)) for p in found] == [
        ("b=2 at 8 clients", 2, 0), ("1 client", 1, 1), ("b=2 at 1 client", 1, 0),
    ]  # fmt: skip


def test_a_median_needs_all_valid_repeats(make_measurement: Make) -> None:
    (point,) = group_by_load(make_measurement(clients=8, most=most) for most in (100.0, 300.0, 200.0))
    assert point.median(throughput) == 200
    silent = make_measurement(clients=8, latency=Latency())
    (point,) = group_by_load([make_measurement(clients=8), silent])
    assert point.median(p99) is None
    assert len(point.values(p99)) == 1
    (point,) = group_by_load([make_measurement(clients=8, invalid=["late"])])
    assert point.median(throughput) is None


@pytest.mark.parametrize(
    ("each", "together"),
    [([True, True], True), ([True, False], False), ([None, False], False), ([True, None], None), ([], None)],
)
def test_an_slo_is_met_if_every_repeat_meets_it(
    make_measurement: Make, each: list[bool | None], together: bool | None
) -> None:
    runs = [make_measurement(clients=1) for _ in each]
    clauses = [ObjectiveResult(text="p99<=1s", value=1, met=met) for met in each]
    judged = [structs.replace(run, slo=[clause]) for run, clause in zip(runs, clauses, strict=True)]
    (point,) = group_by_load([*judged, make_measurement(clients=1, invalid=["late"])])
    assert point.met is together


def test_errors_of_repeats_are_added_by_status(make_measurement: Make) -> None:
    (point,) = group_by_load(
        make_measurement(clients=1, errors=errors) for errors in ({"503": 1, "429": 2}, {"503": 3})
    )
    assert list(point.errors.items()) == [("429", 2), ("503", 4)]


def test_goodput_is_worth_more_than_throughput(make_measurement: Make) -> None:
    assert goodput(make_measurement(clients=8, goodput=7.0)) == 7
    assert goodput(make_measurement(clients=8, goodput=None)) == make_measurement(clients=8).throughput


@pytest.mark.parametrize(
    ("label", "settings"),
    [
        ("batch=8,batching.timeout_s=5", {"batch": "8", "batching.timeout_s": "5"}),
        ("env=A=b,batch=8", {"env": "A=b", "batch": "8"}),
        ("just a name", {}),
    ],
)
def test_a_label_is_read_as_settings(label: str, settings: dict[str, str]) -> None:
    assert parse_label(label) == settings


@pytest.mark.parametrize(
    ("text", "latency_s"),
    [
        ("p99<=100ms", 0.1),
        ("p50<=20ms,p99<=200ms", 0.2),
        ("p99<=200ms,mean<=20ms,error<=1%", 0.2),
        ("max<=1s,p99<=100ms,p99.9<=500ms", 0.1),
        ("p99<=1s,max<=200ms", 0.2),
        ("p95<=90ms,p50<=20ms", 0.09),
        ("p50<=20ms,mean<=30ms", 0.02),
        ("mean<=20ms", 0.02),
        ("error<=1%,throughput>=5", None),
    ],
)
def test_the_tightest_tail_objective_limits_goodput(text: str, latency_s: float | None) -> None:
    assert parse_slo(text).latency_s == latency_s
