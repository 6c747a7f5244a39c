"""The whole SLO decides the choice, nothing refuted is promised, and the table shows each of the settings."""

from typing import Any

import pytest
from msgspec import structs

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.perf.bench.measurement import Latency, Load, Measurement, parse_slo
from penstock.perf.bench.results import as_csv
from penstock.perf.tune.job import COLUMNS, settings_table
from penstock.perf.tune.rates import Effort, Finalist
from penstock.perf.tune.runner import Journal, TrialRunner
from penstock.perf.tune.search import SearchState
from penstock.perf.tune.space import CandidateSettings, parse_settings, parse_space
from penstock.perf.tune.tuner import ResultBuilder, TuningResult

SLO = parse_slo("p99<=100ms")
A, B = (parse_settings(f"batch={n}") for n in (1, 2))


def state(bench: Any, slo: str = SLO.text) -> SearchState:
    return SearchState(TrialRunner(bench, Journal()), parse_space("batch=1,2"), parse_slo(slo), Effort(), 0)


def build(found: SearchState, *finalists: Finalist) -> TuningResult:
    return ResultBuilder(found, CandidateSettings(), finalists, "done").build(seed=0, price=2.0, command="")


def finalist(settings: CandidateSettings, rate: float, met: bool | None) -> Finalist:
    found = Finalist(settings, rate)
    found.met = met
    return found


def test_cheaper_settings_below_the_throughput_of_the_slo_are_not_preferred(hill: Any) -> None:
    finalists = finalist(A, 496, True), finalist(B, 505, True)
    assert build(state(hill(lambda _: 1)), *finalists).chosen == A
    outcome = build(state(hill(lambda _: 1), "p99<=100ms,throughput>=500/s"), *finalists)
    assert (outcome.chosen, outcome.verdict.met, outcome.rate) == (B, True, 505)
    outcome = build(state(hill(lambda _: 1), "p99<=100ms,throughput>=600/s"), *finalists)
    assert (outcome.chosen, outcome.verdict.met) == (None, False)


def test_a_rate_that_repeats_refuted_is_not_promised(hill: Any) -> None:
    found = state(hill(lambda settings: 1000 if settings == A else 900))
    a, b = found.settle(A).rate, found.settle(B).rate
    assert b < a
    outcome = build(found, finalist(A, 0.95 * b, None))
    assert (outcome.chosen, outcome.rate, outcome.confirmed) == (B, b, False)
    outcome = build(found, finalist(A, 0.95 * a, None), finalist(B, b, False))
    assert (outcome.chosen, outcome.rate) == (A, pytest.approx(0.95 * a, rel=0.01))


def test_if_all_runs_are_invalid_there_is_no_statement_about_the_settings(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    bench.invalid = 10**6
    found = state(bench)
    assert not found.settle(A).rate
    outcome = build(found)
    assert (outcome.chosen, outcome.verdict.chosen, outcome.verdict.met) == (None, "", False)
    expected = "could not measure whether any settings meet p99<=100ms: the generator was too slow"
    assert outcome.verdict.notes[0] == expected
    assert outcome.unproven == f"nothing was measured: {expected}"


MODEL = ModelConfig(target="a:b", instances=3, devices=("cuda:0",), batching=BatchingConfig(max_batch_size=4))


def run(label: str, rate: float, p99_s: float, **keys: Any) -> Measurement:
    latency = Latency(mean_s=p99_s / 2, p99_s=p99_s, max_s=2 * p99_s)
    load = Load(mode="open", rate=rate, seconds=2.0)
    return Measurement(load=load, label=label, requests=int(rate * 2), throughput=rate, latency=latency, **keys)


def table(*runs: Measurement) -> list[dict[str, str]]:
    heading, *found = settings_table(runs, SLO, MODEL, 1234)
    assert heading == list(COLUMNS)
    return [dict(zip(heading, row, strict=True)) for row in found]


def test_a_row_shows_the_largest_rate_that_met_the_slo() -> None:
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
        "slo": "met",
        "settings": "batch=8,instances=2",
    }


def test_a_run_that_a_longer_one_contradicts_is_ignored() -> None:
    lucky, longer = run("batch=1", 90, 0.09), structs.replace(run("batch=1", 80, 0.2), requests=1000)
    (found,) = table(run("batch=1", 60, 0.06), lucky, longer)
    assert (found["offered_per_s"], found["slo"]) == ("60", "met")
    (found,) = table(lucky, longer)
    assert (found["offered_per_s"], found["slo"]) == ("80", "missed")


def test_settings_that_never_met_the_slo_come_last_at_their_smallest_rate() -> None:
    found = table(run("batch=1", 900, 0.9), run("batch=1", 500, 0.5), run("batch=2", 5, 0.05))
    assert [(row["settings"], row["offered_per_s"], row["slo"]) for row in found] == [
        ("batch=2", "5", "met"),
        ("batch=1", "500", "missed"),
    ]


def test_unchanged_parameters_show_the_values_of_the_baseline() -> None:
    (found,) = table(run("baseline", 5, 0.05))
    assert (found["device"], found["workers"], found["batch"], found["optimisation"]) == ("cuda:0", "3", "4", "none")


def test_precision_and_optimisation_share_a_column() -> None:
    (found,) = table(run("precision=bf16,optimize=compile,device=cpu", 5, 0.05))
    assert (found["optimisation"], found["device"]) == ("bf16 compile", "cpu")


def test_invalid_runs_and_closed_loops_have_no_row() -> None:
    closed = Measurement(load=Load(mode="closed", concurrency=4), label="batch=1", throughput=9.0)
    assert table(run("batch=1", 5, 0.05, invalid=["late"]), closed) == []


def test_csv_quotes_values_with_commas() -> None:
    assert as_csv([["a", "b"], ["1", "batch=1,instances=2"]]) == 'a,b\n1,"batch=1,instances=2"\n'
