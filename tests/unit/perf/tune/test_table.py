from __future__ import annotations

from typing import Any

from msgspec import structs

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.perf.bench.measurement import Latency, Load, Measurement
from penstock.perf.bench.slo import parse_slo
from penstock.perf.tune.table import COLUMNS, as_csv, rows

SLO = parse_slo("p99<=100ms")
MODEL = ModelConfig(target="a:b", instances=3, devices=("cuda:0",), batching=BatchingConfig(max_batch_size=4))


def run(label: str, rate: float, p99_s: float, **keys: Any) -> Measurement:
    latency = Latency(mean_s=p99_s / 2, p99_s=p99_s, max_s=2 * p99_s)
    load = Load(mode="open", rate=rate, seconds=2.0)
    return Measurement(load=load, label=label, requests=int(rate * 2), throughput=rate, latency=latency, **keys)


def table(*runs: Measurement) -> list[dict[str, str]]:
    heading, *found = rows(runs, SLO, MODEL, 1234)
    assert heading == list(COLUMNS)
    return [dict(zip(heading, row, strict=True)) for row in found]


def test_settings_are_told_at_the_largest_rate_that_kept_the_slo() -> None:
    (found,) = table(*(run("batch=8,instances=2", rate, rate / 1000) for rate in (50, 80, 120)))
    assert found == {
        "device": "cuda:0",
        "concurrency": "3.2",
        "requests": "160",
        "workers": "2",
        "batch": "8",
        "payload_bytes": "1234",
        "optimisation": "none",
        "throughput_per_s": "80",
        "p99_ms": "80",
        "offered_per_s": "80",
        "slo": "kept",
        "settings": "batch=8,instances=2",
    }


def test_a_short_run_that_a_longer_one_contradicts_counts_for_nothing() -> None:
    lucky, longer = run("batch=1", 90, 0.09), structs.replace(run("batch=1", 80, 0.2), requests=1000)
    (found,) = table(run("batch=1", 60, 0.06), lucky, longer)
    assert (found["offered_per_s"], found["slo"]) == ("60", "kept")
    (found,) = table(lucky, longer)
    assert (found["offered_per_s"], found["slo"]) == ("80", "missed")


def test_settings_that_never_kept_it_come_last_at_their_smallest_rate() -> None:
    found = table(run("batch=1", 900, 0.9), run("batch=1", 500, 0.5), run("batch=2", 5, 0.05))
    assert [(row["settings"], row["offered_per_s"], row["slo"]) for row in found] == [
        ("batch=2", "5", "kept"),
        ("batch=1", "500", "missed"),
    ]


def test_what_no_knob_turned_is_told_of_the_app_as_it_is() -> None:
    (found,) = table(run("as it is", 5, 0.05))
    assert (found["device"], found["workers"], found["batch"], found["optimisation"]) == ("cuda:0", "3", "4", "none")


def test_precision_and_optimisation_are_told_together() -> None:
    (found,) = table(run("precision=bf16,optimize=compile,device=cpu", 5, 0.05))
    assert (found["optimisation"], found["device"]) == ("bf16 compile", "cpu")


def test_runs_that_say_nothing_and_closed_loops_have_no_row() -> None:
    closed = Measurement(load=Load(mode="closed", concurrency=4), label="batch=1", throughput=9.0)
    assert table(run("batch=1", 5, 0.05, invalid=["late"]), closed) == []


def test_a_file_quotes_what_has_commas() -> None:
    assert as_csv([["a", "b"], ["1", "batch=1,instances=2"]]) == 'a,b\n1,"batch=1,instances=2"\n'
