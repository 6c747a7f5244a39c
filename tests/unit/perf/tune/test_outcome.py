"""What tuning came to: the whole SLO decides, and nothing is promised that was refuted, or could not be seen."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.perf.bench.slo import parse_slo
from penstock.perf.simulate.capacity import Effort
from penstock.perf.tune.confirm import Finalist
from penstock.perf.tune.field import Field
from penstock.perf.tune.journal import Journal
from penstock.perf.tune.meter import Meter
from penstock.perf.tune.outcome import Outcome, Telling
from penstock.perf.tune.space import Settings, parse_settings, parse_space

SLO = parse_slo("p99<=100ms")
A, B = (parse_settings(f"batch={n}") for n in (1, 2))


def field(bench: Any, slo: str = SLO.text) -> Field:
    return Field(Meter(bench, Journal()), parse_space("batch=1,2"), parse_slo(slo), Effort(), 0)


def told(found: Field, *finalists: Finalist) -> Outcome:
    return Telling(found, Settings(), finalists, "done").outcome(seed=0, price=2.0, command="")


def finalist(settings: Settings, rate: float, met: bool | None) -> Finalist:
    found = Finalist(settings, rate)
    found.met = met
    return found


def test_what_is_as_good_and_cheaper_but_below_the_throughput_of_the_slo_does_not_go_first(hill: Any) -> None:
    finalists = finalist(A, 496, True), finalist(B, 505, True)
    assert told(field(hill(lambda _: 1)), *finalists).chosen == A
    outcome = told(field(hill(lambda _: 1), "p99<=100ms,throughput>=500/s"), *finalists)
    assert (outcome.chosen, outcome.verdict.met, outcome.rate) == (B, True, 505)
    outcome = told(field(hill(lambda _: 1), "p99<=100ms,throughput>=600/s"), *finalists)
    assert (outcome.chosen, outcome.verdict.met) == (None, False)


def test_before_any_is_proven_a_rate_that_repeats_have_refuted_is_not_promised(hill: Any) -> None:
    found = field(hill(lambda settings: 1000 if settings == A else 900))
    a, b = found.settle(A).rate, found.settle(B).rate
    assert b < a
    outcome = told(found, finalist(A, 0.95 * b, None))
    assert (outcome.chosen, outcome.rate, outcome.confirmed) == (B, b, False)
    outcome = told(found, finalist(A, 0.95 * a, None), finalist(B, b, False))
    assert (outcome.chosen, outcome.rate) == (A, pytest.approx(0.95 * a, rel=0.01))


def test_where_all_runs_were_invalid_nothing_is_said_of_the_settings(hill: Any) -> None:
    bench = hill(lambda _: 1000)
    bench.invalid = 10**6
    found = field(bench)
    assert not found.settle(A).rate
    outcome = told(found)
    assert (outcome.chosen, outcome.verdict.chosen, outcome.verdict.met) == (None, "", False)
    expected = "whether any settings keep p99<=100ms could not be measured: the generator was too slow"
    assert outcome.verdict.notes[0] == expected
